"""A method whose questions a table answers, and what the values tell of the run."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from radazo_jax._src.host.problem import Problem, Questions
from radazo_jax._src.host.table import EvaluationTable, Row, name
from radazo_jax._src.methods.contract import Ask
from radazo_jax._src.runs.results import Best
from radazo_jax._src.steps.states import Failures

# Two values of a point are equal up to so many roundings.
_EQUAL = 8

# The number of the lowest points that are compared at the end of a noisy run.
_CANDIDATES = 5

_EPS = float(np.finfo(np.float64).eps)


class Statistics:
    """Statistics of the evaluations that a run has used, and the best of them.

    Attributes:
      best: The best point so far, whose parameters are a vector.
      lowest: The points with the lowest values, likewise, the lowest first.
      count: The number of evaluations.
      num_failed: The number of failures.
      in_a_row: The number of failures since the last finite value.
      skipped: The number of steps without a finite value.
      is_noisy: Whether a point had two different values.
      resolution: Relative spacing of the values; 0 before the first.
      last_failure: A text about the last failure, or an empty string.
    """

    def __init__(self, start: np.ndarray, value: Callable[[float | np.ndarray], float]):
        """Counts nothing yet.

        Args:
          start: The start, shape [d].
          value: Converts what a row has to a number.
        """
        self.best = Best(start)
        self.lowest: list[Best] = []
        self.count = self.num_failed = self.in_a_row = self.skipped = 0
        self.is_noisy, self.resolution, self.last_failure = False, 0.0, ""
        self._value = value
        self._first: dict[bytes, float] = {}

    def add(self, point: np.ndarray, row: Row) -> float:
        """Counts an evaluation; returns its value, NaN if it failed."""
        number, self.count = self.count, self.count + 1
        value = self.value_of(row.value)
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
        new = Best(point, value, number, info)
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
            self.best = self.best._replace(params=point, value=value)

    def value_of(self, found: float | np.ndarray) -> float:
        """Converts what a row has to a number, NaN if it failed."""
        value = self._value(found)
        return value if math.isfinite(value) else math.nan

    def _keep(self, new: Best) -> None:
        """Keeps one of the lowest points, each of them once."""
        of_point = {x.params.tobytes(): x for x in self.lowest}
        data = new.params.tobytes()
        of_point[data] = min(of_point.get(data, new), new, key=lambda x: x.value)
        ordered = sorted(of_point.values(), key=lambda x: x.value)
        self.lowest = ordered[:_CANDIDATES]

    def failures(self) -> Failures:
        """Returns counts for a policy: d + 1 failures in a row are a step in a row."""
        counts = (
            self.num_failed,
            self.skipped,
            self.in_a_row // (len(self.best.params) + 1),
        )
        return Failures(*np.minimum(counts, 2**31 - 2).astype(np.int32))


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
      point: The point, shape [d].
      row: Its row in the table.
      value: The value as a number, NaN if it failed.
      is_new: Whether the run has not used this value before.
    """

    point: np.ndarray
    row: Row
    value: float
    is_new: bool


class MethodRun:
    """A run of a method, whose questions are answered from a table, each value once.

    A point has one value, unless a step asks for it twice, a method asks for another
    value explicitly, or the values of a point were seen to differ. Then the k-th
    question gets the k-th value.

    Attributes:
      problem: The problem.
      table: The table.
      questions: The questions of the method.
      statistics: The statistics of the values that it has used.
    """

    def __init__(self, problem: Problem, table: EvaluationTable, limited: bool):
        """Begins the method.

        Args:
          problem: The problem.
          table: The table.
          limited: Whether a budget ends the run.
        """
        self.problem, self.table = problem, table
        self.questions = Questions(problem, limited)
        self.statistics = Statistics(self.questions.start.params, problem.value)
        self._used: dict[bytes, int] = {}  # The number of values of a point.
        self._step: tuple[Ask | None, list[Question]] = None, []

    def best_of(self, best: Best) -> Best:
        """Returns a point of the statistics as a tree of new arrays."""
        params = self.problem.vectors.tree_of(best.params)
        return best._replace(params=params)

    def step_questions(self) -> list[Question]:
        """Returns the questions of the step, which may be answered in parts."""
        asked = self.questions.asked
        if self._step[0] is not asked:
            self._step = asked, self.questions_at(asked.points, asked.again)
        return self._step[1]

    def questions_at(self, points: np.ndarray, again: bool) -> list[Question]:
        """Returns the questions of some points.

        Args:
          points: The points, shape [n, d].
          again: Whether other values than the known ones are asked for.
        """
        again = again or self.statistics.is_noisy
        counts: dict[bytes, int] = {}
        found = []
        for point in points:
            named = name(point)
            used = self._used.get(named, 0)
            repeat = counts.get(named, used if again else 0)
            counts[named] = repeat + 1
            found.append(Question(point, named, repeat))
        return found

    def missing(self, questions: Sequence[Question]) -> list[Question]:
        """Returns the questions that the table does not answer."""
        return [x for x in questions if self.table.at(x.name, x.repeat) is None]

    def answered(
        self,
        questions: list[Question],
        most: float = np.inf,
        target: float = -np.inf,
        evaluate: Callable[[list[Question]], object] = lambda questions: None,
    ) -> list[Answer]:
        """Answers the first questions, as many as are allowed.

        Args:
          questions: The questions of a step.
          most: The number of values that the run may still use.
          target: A value that ends the run: no answer follows it.
          evaluate: Adds rows of questions to the table; not all if it is interrupted.

        Returns:
          The answers.
        """
        rows = [self.table.at(x.name, x.repeat) for x in questions]
        new = [i for i, row in enumerate(rows) if row is None or not row.is_used]
        if len(new) > most:
            questions = questions[: new[int(most)]]
        missing = self.missing(questions)
        if missing:
            evaluate(missing)
        answers: list[Answer] = []
        for question in questions:
            row = self.table.at(question.name, question.repeat)
            if row is None:
                break
            is_new, used = not row.is_used, self._used.get(question.name, 0)
            self._used[question.name] = max(used, question.repeat + 1)
            if is_new:
                value = self.statistics.add(question.point, row)
            else:
                value = self.statistics.value_of(row.value)
            answers.append(Answer(question.point, row, value, is_new))
            if is_new and value <= target:
                break
        return answers

    def send(self, answers: Sequence[Answer]) -> None:
        """Sends the method the values of its step, and receives the next questions."""
        values = np.array([x.value for x in answers])
        failed = np.isnan(values)
        if self.problem.residuals:
            found = [np.nan if np.isnan(x.value) else x.row.value for x in answers]
            shape = next((np.shape(x) for x in found if np.ndim(x)), (1,))
            values = np.array([np.broadcast_to(x, shape) for x in found], np.float64)
        if self.questions.answer(values, self.statistics.resolution):
            self._used.clear()
        self.statistics.skipped += bool(failed.all())
