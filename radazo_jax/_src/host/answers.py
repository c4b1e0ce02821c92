"""Answers to the questions of a method, and what the run learned from its values."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from radazo_jax._src.host.table import Row, Table, name
from radazo_jax._src.host.vectors import Vectors
from radazo_jax._src.methods.contract import Ask
from radazo_jax._src.runs.results import Best
from radazo_jax._src.steps.states import Failures

# Two values of a point are equal up to so many roundings.
_EQUAL = 8

# The number of the lowest points that are compared at the end of a noisy run.
_CANDIDATES = 5

_EPS = float(np.finfo(np.float64).eps)


class Candidate(NamedTuple):
    """A point that may be the best one of a run.

    Attributes:
      number: Number of its evaluation in the run; -1 if it was not evaluated.
      point: The point, shape [d].
      value: Its value.
      info: The other result of the function.
      num_values: The number of evaluations of which the value is the mean.
    """

    number: int
    point: np.ndarray
    value: float
    info: Any = None
    num_values: int = 1

    def as_best(self, vectors: Vectors) -> Best:
        """The point with its value, in arrays that nobody else has."""
        number, point, value, info, count = self
        return Best(vectors.one(point), value, number, info, count)


class Tally:
    """Counts of the evaluations that a run has used, and the best of them.

    Attributes:
      best: The best point so far.
      lowest: The points with the lowest values, the lowest first.
      count: The number of evaluations.
      num_failed: The number of failures.
      in_a_row: The number of failures since the last finite value.
      skipped: The number of steps without a finite value.
      is_noisy: Whether a point had two different values.
      resolution: Relative spacing of the values; 0 before the first.
      last_failure: A text about the last failure, or an empty string.
    """

    def __init__(self, start: np.ndarray, value: Callable[[Any], float]):
        """Counts nothing yet.

        Args:
          start: The start, shape [d].
          value: Returns what a row has as a number.
        """
        self.best = Candidate(-1, start, np.inf)
        self.lowest: list[Candidate] = []
        self.count = self.num_failed = self.in_a_row = self.skipped = 0
        self.is_noisy, self.resolution, self.last_failure = False, 0.0, ""
        self._value = value
        self._first: dict[bytes, float] = {}

    def add(self, point: np.ndarray, row: Row) -> float:
        """Counts an evaluation; returns its value, NaN if it failed."""
        number, self.count = self.count, self.count + 1
        value = self.value_of(row)
        row.is_used = True
        info, row.info = row.info, None  # It may be large: the best points keep theirs.
        if math.isnan(value):
            self.num_failed, self.in_a_row = self.num_failed + 1, self.in_a_row + 1
            self.last_failure = row.failure
            return value
        self.in_a_row = 0
        eps = float(jnp.finfo(row.dtype).eps) if row.dtype else _EPS
        # Several dtypes have the resolution of the widest one.
        self.resolution = min(eps, self.resolution or eps)
        first = self._first.setdefault(row.point, value)
        if abs(first - value) > _EQUAL * self.resolution * abs(value):
            self.is_noisy = True
        new = Candidate(number, point, value, info)
        if value < self.best.value:
            self.best = new
        if len(self.lowest) < _CANDIDATES or value < self.lowest[-1].value:
            self._keep(new)
        return value

    def move(self, point: np.ndarray) -> None:
        """Makes a point the best one if its value is the lowest up to rounding."""
        value = self._first.get(name(point), math.inf)
        rounding = _EQUAL * self.resolution * abs(self.best.value)
        if not self.is_noisy and value <= self.best.value + rounding:
            self.best = self.best._replace(point=point, value=value)

    def value_of(self, row: Row) -> float:
        """The value of a row as a number, NaN if it failed."""
        value = self._value(row.value)
        return value if math.isfinite(value) else math.nan

    def _keep(self, new: Candidate) -> None:
        """Keeps one of the lowest points, each of them once."""
        of_point = {x.point.tobytes(): x for x in self.lowest}
        data = new.point.tobytes()
        of_point[data] = min(of_point.get(data, new), new, key=lambda x: x.value)
        ordered = sorted(of_point.values(), key=lambda x: x.value)
        self.lowest = ordered[:_CANDIDATES]

    def failures(self, dimension: int) -> Failures:
        """Counts for a policy: d + 1 failures in a row are a step in a row."""
        counts = self.num_failed, self.skipped, self.in_a_row // (dimension + 1)
        ends: Any = (np.int32(min(count, 2**31 - 2)) for count in counts)
        return Failures(*ends)


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
