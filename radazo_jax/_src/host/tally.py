"""The best point, the noise and the failures of the evaluations that a run uses."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from radazo_jax._src.host.table import Row, name
from radazo_jax._src.host.vectors import Vectors
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
