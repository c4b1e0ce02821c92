"""Answers to what a method asks: from the table, or by evaluations."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from radazo_jax._src.host.table import Row, Table, name
from radazo_jax._src.host.tally import Tally
from radazo_jax._src.methods.contract import Ask


class Question(NamedTuple):
    """A point of a step, and which of its values is asked for.

    Attributes:
      point: The point, float64, shape [d].
      name: Its name in the table.
      repeat: The number of the value among the values of this point.
    """

    point: np.ndarray
    name: bytes
    repeat: int


class Answer(NamedTuple):
    """A value that a run uses.

    Attributes:
      question: The question.
      row: Its row in the table.
      value: The value as a number, NaN if it failed.
      is_new: Whether the run has not used this value before.
    """

    question: Question
    row: Row
    value: float
    is_new: bool


class Answers:
    """Answers questions, each value once.

    A point has one value, unless a step asks for it twice, a method asks for another
    value explicitly, or the values of a point were seen to differ. Then the k-th
    question gets the k-th value.
    """

    def __init__(
        self, table: Table, tally: Tally, evaluate: Callable[[list[Question]], None]
    ):
        """Answers nothing yet.

        Args:
          table: The table.
          tally: Counts what is used.
          evaluate: Adds rows of questions to the table; not all if it is interrupted.
        """
        self.table, self.tally, self._evaluate = table, tally, evaluate
        self._used: dict[bytes, int] = {}  # The number of values of a point.
        self._step: tuple[Ask | None, list[Question]] = None, []

    def of_step(self, asked: Ask) -> list[Question]:
        """The questions of a step, which stay the same if it is answered in parts."""
        if self._step[0] is not asked:
            self._step = asked, self.questions(asked.points, asked.again)
        return self._step[1]

    def questions(self, points: np.ndarray, again: bool) -> list[Question]:
        """The questions of some points.

        Args:
          points: The points, shape [n, d].
          again: Whether other values than the known ones are asked for.
        """
        again = again or self.tally.is_noisy
        counts: dict[bytes, int] = {}
        found = []
        for point in points:
            named = name(point)
            used = self._used.get(named, 0)
            repeat = counts.get(named, used if again else 0)
            counts[named] = repeat + 1
            found.append(Question(point, named, repeat))
        return found

    def restart(self) -> None:
        """Answers a method that begins anew by the values that were used."""
        self._used.clear()

    def _is_new(self, question: Question) -> bool:
        row = self.table.at(question.name, question.repeat)
        return row is None or not row.is_used

    def missing(self, questions: Sequence[Question]) -> list[Question]:
        """The questions that the table does not answer."""
        at = self.table.at
        return [question for question in questions if at(*question[1:]) is None]

    def answered(
        self, questions: list[Question], most: float, target: float = -np.inf
    ) -> list[Answer]:
        """Answers the first questions, as many as are allowed.

        Args:
          questions: The questions of a step.
          most: The number of values that the run may still use.
          target: A value that ends the run: no answer follows it.

        Returns:
          The answers.
        """
        new = [i for i, question in enumerate(questions) if self._is_new(question)]
        if len(new) > most:
            questions = questions[: new[int(most)]]
        missing = self.missing(questions)
        if missing:
            self._evaluate(missing)
        answers: list[Answer] = []
        for question in questions:
            row = self.table.at(question.name, question.repeat)
            if row is None:
                break
            is_new, used = not row.is_used, self._used.get(question.name, 0)
            self._used[question.name] = max(used, question.repeat + 1)
            if is_new:
                value = self.tally.add(question.point, row)
            else:
                value = self.tally.value_of(row)
            answers.append(Answer(question, row, value, is_new))
            if is_new and value <= target:
                break
        return answers


def values_of(answers: Sequence[Answer], residuals: bool) -> np.ndarray:
    """The values that a method receives, [n] or [n, m]: NaN if they failed."""
    if not residuals:
        return np.array([answer.value for answer in answers])
    rows: list[Any] = [
        answer.row.value if np.isfinite(answer.value) else np.nan for answer in answers
    ]
    shape = next((np.shape(x) for x in rows if np.ndim(x)), (1,))
    return np.array([np.broadcast_to(x, shape) for x in rows], np.float64)
