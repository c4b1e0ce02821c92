"""The contract of a method: a generator that yields points and receives values."""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

# The size of a parameter with two bounds, as a share of their distance.
_OF_WIDTH = 2 / 3


class Box(NamedTuple):
    """Bounds of the parameters.

    Attributes:
      lower: Lower bounds, float64, shape [d]; −∞ for none.
      upper: Upper bounds, float64, shape [d]; ∞ for none.
    """

    lower: np.ndarray
    upper: np.ndarray

    def clip(self, points: np.ndarray) -> np.ndarray:
        """Returns the nearest points within the bounds, with the shape of `points`."""
        return np.clip(points, self.lower, self.upper)


def _unreported(method: str, reason: str) -> None:
    """Reports nothing."""
    del method, reason


class Start(NamedTuple):
    """The problem as a run gives it to a method.

    Attributes:
      params: Starting point θ₀, float64, shape [d]; within the box and rounded.
      box: Bounds, which all points must respect. Finite ones are rounded inward to the
        dtypes of the parameters, so that a point of the box is in it once rounded.
      rng: Random numbers of the run. A method has no other source of randomness.
      resolution: Relative spacing of the values: the machine epsilon of the dtype in
        which the function computes.
      step: Spacing of the values of each parameter, 0 if it is continuous, shape [d].
      round: Rounds points to multiples of `step` and to the dtypes of the parameters,
        any shape [..., d]. A method yields rounded points, and divides differences by
        rounded steps.
      flatten: Converts a number, or a tree like the parameters of numbers and arrays
        that broadcast to the leaves, to float64 of shape [d]. Used for `scale`.
      limited: Whether a budget of evaluations, steps or seconds ends the run.
      report: `report(method, reason)` says in words which method takes the next steps,
        and why. A run lists them as the `stages` of its result.
    """

    params: np.ndarray
    box: Box
    rng: np.random.Generator
    resolution: float
    step: np.ndarray
    round: Callable[[np.ndarray], np.ndarray]
    flatten: Callable[[Any], np.ndarray]
    limited: bool
    report: Callable[[str, str], None] = _unreported


def check(method: Any, start: Start) -> None:
    """Checks what a built-in method was given, before the first evaluation.

    Raises:
      TypeError, ValueError: If an argument of the method does not fit the parameters.
    """
    if getattr(method, "scale", None) is not None:
        sizes(start, method.scale)


def sizes(start: Start, scale: Any) -> np.ndarray:
    """Returns the sizes of the parameters, shape [d]; see `evolution`."""
    unit = start.flatten(scale)
    if not np.all((unit > 0) & (unit < np.inf)):
        raise ValueError(f"scale must be positive and finite; got {scale!r}.")
    width = start.box.upper - start.box.lower
    typical = unit * max(1.0, np.sqrt(np.mean((start.params / unit) ** 2)))
    return np.where((width > 0) & (width < np.inf), _OF_WIDTH * width, typical)


def check_continuous(method: str, start: Start) -> None:
    """Raises if a method that takes short differences has parameters on a grid.

    Raises:
      ValueError: If a run has a `step`.
    """
    if np.any(start.step):
        raise ValueError(
            f"step must be None or 0 with {method}, which takes short differences; got "
            f"{np.max(start.step)}. Use untuned() or evolution()."
        )


class Ask(NamedTuple):
    """Points to evaluate, with what else a method can say about them.

    A method that has nothing else to say yields an array of points.

    Attributes:
      points: Points, float64, shape [n, d]. The method receives exactly their values.
      center: Estimate of the minimum, shape [d], or `None`. If the function is noisy,
        a run compares it with the best points at its end.
      again: Whether the points are evaluated even if their values are known, as noise
        requires.
      fit: Fit of a method of least squares, or `None`.
    """

    points: np.ndarray
    center: np.ndarray | None = None
    again: bool = False
    fit: Any = None


class End(NamedTuple):
    """The end of a method.

    Attributes:
      params: Best point, float64, shape [d].
      value: Value at the best point.
      reason: Reason for the end, a phrase such as "a minimum was found".
      fit: Fit of a method of least squares, or `None`.
      unused: Whether a parameter changed no value wherever it was moved from the best
        point: bool, shape [d]; or `None`. Such parameters stay at θ₀.
    """

    params: np.ndarray
    value: float
    reason: str
    fit: Any = None
    unused: np.ndarray | None = None


T = TypeVar("T")

# A part of a method: it yields points, receives values, NaN if one failed, and returns.
Part = Generator[np.ndarray | Ask, np.ndarray, T]
Steps = Part[End]


def answered(
    inner: Part[T], answer: Callable[[Ask], Part[np.ndarray | None]]
) -> Part[Any]:
    """Takes the steps of a part whose values another part finds, or until it has none.

    Arithmetic that overflows in the part is its normal course, and gives no warning.

    Args:
      inner: The part.
      answer: Returns the values at what it asks for, or `None` if it must end.

    Returns:
      The result of the part, or `None` if it was ended.
    """
    values: Any = None
    while True:
        with np.errstate(all="ignore"):
            try:
                asked = inner.send(values)
            except StopIteration as stop:
                return stop.value
        values = yield from answer(asked if isinstance(asked, Ask) else Ask(asked))
        if values is None:
            return None


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


class Method(Protocol):
    """A minimizer: a function from the start of a run to a generator of points."""

    def __call__(self, start: Start) -> Steps:
        """Yields points, shape [n, d], receives their values, shape [n]; returns `End`.

        A value is NaN if the function failed at its point.
        """
        ...
