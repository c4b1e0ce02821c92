"""Values that are known: no point of a grid is evaluated twice."""

import numpy as np

from radazo_jax._src.methods.contract import Ask, End, Part, T, answered


class Known:
    """The points that a method has evaluated, and their values.

    Attributes:
      points: Points in the order of their evaluation, shape [d] each.
      values: Their values, infinite if they failed.
      best: The best point, its value, and no reason.
    """

    def __init__(self, point: np.ndarray, value: float):
        """Knows a point.

        Args:
          point: The point, shape [d].
          value: Its value, infinite if it failed.
        """
        self.points: list[np.ndarray] = []
        self.values: list[float] = []
        self._at: dict[bytes, float] = {}
        self.best = End(point, value, "")
        self._add(point, value)

    def __contains__(self, point: np.ndarray) -> bool:
        return point.tobytes() in self._at

    def _add(self, point: np.ndarray, value: float) -> None:
        value = value if np.isfinite(value) else np.inf
        self._at[point.tobytes()] = value
        self.points.append(point)
        self.values.append(value)
        if value < self.best.value:
            self.best = End(point, value, "")

    def at(self, points: np.ndarray) -> Part[np.ndarray]:
        """Returns the values at points, and evaluates what is not known.

        Args:
          points: Points, shape [n, d].

        Returns:
          The values, infinite if they failed, shape [n].
        """
        new = {point.tobytes(): point for point in points if point not in self}
        if new:
            values = yield np.array(list(new.values()))
            for point, value in zip(new.values(), values, strict=True):
                self._add(point, float(value))
        return np.array([self._at[point.tobytes()] for point in points])

    def received(self, asked: Ask) -> Part[np.ndarray]:
        """Returns the values that a method receives, NaN if they failed."""
        values = yield from self.at(asked.points)
        return np.where(np.isfinite(values), values, np.nan)

    def steps(self, inner: Part[T]) -> Part[T]:
        """Takes the steps of a method, with values that are known."""
        return (yield from answered(inner, self.received))
