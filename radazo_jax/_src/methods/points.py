"""Points of a box, and differences of values along the parameters."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from radazo_jax._src.methods.contract import Ask, Box, Part, Start, Steps, answered

# The move of a parameter is measured in its distance from the origin, but in this share
# of its size at least.
_LEAST = 0.1

# A shorter move than so many roundings of a parameter means nothing.
_ROUNDINGS = 64

# A difference that failed is tried again at these shares of its step.
_SHARES = (-1.0, 0.5, -0.5)


def finite(values: np.ndarray) -> np.ndarray:
    """Returns values that can be compared: infinite if they failed."""
    return np.where(np.isfinite(values), values, np.inf)


class Space(NamedTuple):
    """The space of a method's points, and their distances.

    Attributes:
      box: Bounds.
      round: Rounds points to the dtypes of the parameters.
      origin: Point from which moves are measured, shape [d].
      sizes: Sizes of the parameters, shape [d].
    """

    box: Box
    round: Callable[[np.ndarray], np.ndarray]
    origin: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, start: Start, sizes: np.ndarray) -> "Space":
        """Returns the space of a run, in which moves are measured from zero."""
        return cls(start.box, start.round, np.zeros_like(start.params), sizes)

    def point(self, x: np.ndarray) -> np.ndarray:
        """Returns the nearest point that the function can have, for rows x."""
        return self.round(self.box.clip(x))

    def spans(self, x: np.ndarray) -> np.ndarray:
        """Returns the length of a move that matters, for each parameter."""
        span = np.maximum(abs(x - self.origin), _LEAST * self.sizes)
        width = self.box.upper - self.box.lower
        return np.where(width > 0, np.minimum(span, width), span)

    def ends(self, x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns the end of each parameter's move of this length.

        A parameter moves away from a bound that is closer. A length below the rounding
        of a parameter is lengthened, so that a parameter stays only if its bounds are
        equal.
        """
        lengths = np.maximum(lengths, _ROUNDINGS * np.finfo(float).eps * abs(x))
        lengths = np.maximum(lengths, np.finfo(float).tiny)
        while True:
            ahead, back = self.point(x + lengths), self.point(x - lengths)
            cut = 2 * abs(ahead - x) < abs(back - x)
            ends = np.where(cut, back, ahead)
            stays = (ends == x) & (self.box.lower < self.box.upper) & (lengths < 1e300)
            if not np.any(stays):
                return ends
            lengths = np.where(stays, 4 * lengths, lengths)


class AxisDifferences(NamedTuple):
    """Differences of values along the parameters.

    Attributes:
      steps: Moves of the parameters, 0 for a parameter that cannot move, shape [d].
      changes: Changes of the value, NaN if it failed, 0 without a move, shape [d].
      dead: Whether moves changed nothing: bool, shape [d].
      rise: The largest rise at both sides of the point, or away from a bound.
    """

    steps: np.ndarray
    changes: np.ndarray
    dead: np.ndarray
    rise: float = 0.0

    @classmethod
    def none(cls, x: np.ndarray) -> "AxisDifferences":
        """Returns the differences of parameters that do not move."""
        return cls(np.zeros_like(x), np.zeros_like(x), np.zeros(len(x), bool))

    @property
    def known(self) -> np.ndarray:
        """Whether there is a difference: bool, shape [d]."""
        return np.isfinite(self.changes) & (self.steps != 0)

    @property
    def gradient(self) -> np.ndarray:
        """The slopes, 0 if they are not known, shape [d]."""
        known = self.known
        return np.where(known, self.changes, 0) / np.where(known, self.steps, 1)


def along(x: np.ndarray, which: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns points that differ from x in one parameter each, shape [n, d].

    Args:
      x: Shape [d].
      which: Numbers of the parameters, shape [n].
      ends: Their values, shape [n].
    """
    points = np.repeat(x[None], len(which), axis=0)
    points[np.arange(len(which)), which] = ends
    return points


def forward(
    x: np.ndarray, value: float, lengths: np.ndarray, space: Space
) -> Part[AxisDifferences]:
    """Takes a forward difference along each parameter.

    A difference that failed is tried on the other side, and at half of its step.

    Args:
      x: The point, shape [d].
      value: Its value, finite.
      lengths: Lengths of the moves, shape [d].
      space: The space of the points.
    """
    ends = space.ends(x, lengths)
    steps, changes = ends - x, np.zeros_like(x)
    which = np.flatnonzero(steps)
    if not len(which):
        return AxisDifferences.none(x)
    first = steps.copy()
    changes[which] = (yield along(x, which, ends[which])) - value
    for share in _SHARES:
        failed = np.flatnonzero(~np.isfinite(changes))
        if not len(failed):
            break
        ends = space.point(x + share * first)
        failed = failed[ends[failed] != x[failed]]
        if not len(failed):
            continue
        steps[failed] = ends[failed] - x[failed]
        changes[failed] = (yield along(x, failed, ends[failed])) - value
    return AxisDifferences(steps, changes, (changes == 0) & (steps != 0))


class Sides(NamedTuple):
    """Changes of the value by moves of each parameter to both sides.

    Attributes:
      steps: Moves away from the closer bound, 0 for a parameter that cannot move: [d].
      first: Changes by them, NaN if one failed or there is none: [d].
      others: Moves to the other side; near a bound, half of the steps: [d].
      second: Changes by them: [d].
      lowest: The lowest of the points, `None` if no parameter can move.
      change: Its change, infinite if all failed.
    """

    steps: np.ndarray
    first: np.ndarray
    others: np.ndarray
    second: np.ndarray
    lowest: np.ndarray | None = None
    change: float = np.inf

    def mean(self) -> np.ndarray:
        """Returns the mean of both slopes, or the one that is known, else 0: [d]."""
        with np.errstate(all="ignore"):
            ahead, back = self.first / self.steps, self.second / self.others
        known = np.isfinite(ahead) * 1 + np.isfinite(back)
        total = np.where(np.isfinite(ahead), ahead, 0) + np.where(
            np.isfinite(back), back, 0
        )
        return total / np.maximum(known, 1)


def both_sides(
    x: np.ndarray, value: float, lengths: np.ndarray, space: Space
) -> Part[Sides]:
    """Moves each parameter to both sides; see `forward` for the arguments."""
    ahead = space.ends(x, lengths)
    steps = ahead - x
    back = space.point(x - steps)
    back = np.where(back == x, space.point(x + steps / 2), back)
    others = np.where(back - x == steps, 0, back - x)
    first, second = np.full_like(x, np.nan), np.full_like(x, np.nan)
    which, twice = np.flatnonzero(steps), np.flatnonzero(others)
    if not len(which):
        return Sides(steps, first, others, second)
    both = along(x, which, ahead[which]), along(x, twice, back[twice])
    points = np.concatenate(both)
    values = (yield points) - value
    first[which], second[twice] = values[: len(which)], values[len(which) :]
    values = finite(values)
    i = int(np.argmin(values))
    return Sides(steps, first, others, second, points[i], float(values[i]))


def central(
    x: np.ndarray, value: float, lengths: np.ndarray, space: Space
) -> Part[AxisDifferences]:
    """Takes a central difference along each parameter; near a bound, a one-sided one.

    The change belongs to a parabola through the three values: its slope times the step.
    The rise at both sides is their mean, twice, and 0 along a line.
    See `forward` for the arguments.
    """
    sides = yield from both_sides(x, value, lengths, space)
    h, first, k, second = sides[:4]
    # Half of the move to the other side stands for a side that failed.
    ahead = np.isfinite(first)
    ends = space.point(x + np.where(ahead, h, k) / 2)
    one = np.flatnonzero((ahead != np.isfinite(second)) & (ends != x))
    if len(one):
        table, rows = np.stack([h, first, k, second]), np.where(ahead[one], 2, 0)
        changes = (yield along(x, one, ends[one])) - value
        table[rows, one], table[rows + 1, one] = (ends - x)[one], changes
        h, first, k, second = table
    with np.errstate(all="ignore"):
        slopes = (first * (k / h) - second * (h / k)) / (k - h)
        slopes = np.where(np.isfinite(slopes), slopes, first / h)
        slopes = np.where(np.isfinite(slopes), slopes, second / k)
        # With no change at one side and a rise at the other, x is next to a step.
        flat = ((first == 0) & ~(second < 0)) | ((second == 0) & ~(first < 0))
        slopes = np.where((first == 0) & (second < 0), second / k, slopes)
        slopes = np.where((second == 0) & (first < 0), first / h, slopes)
        changes = np.where((h != 0) & ~flat, slopes * h, 0)
        # What failed is a rise.
        ahead, back = finite(first), finite(second)
        bends = ahead - back * (h / k)
        rises = np.where(h * k < 0, bends, np.minimum(ahead, back))
    rise = np.max(rises, initial=0.0, where=(h != 0) & (k != 0))
    return AxisDifferences(h, changes, (h != 0) & flat, float(rise))


def scaled(inner: Callable[..., Steps], values: np.ndarray) -> Steps:
    """Takes the steps of a method whose values are powers of 2 times those received.

    The first value is near 1 then, so that squares of values are numbers.

    Args:
      inner: Returns the steps, given the first values.
      values: The first values, NaN if one failed.
    """
    known = values[np.isfinite(values)]
    power = math.frexp(known[0])[1] if len(known) else 0

    def answer(asked: Ask) -> Part[np.ndarray]:
        values = yield asked
        with np.errstate(all="ignore"):
            return np.ldexp(values, -power)

    end = yield from answered(inner(*np.ldexp(values, -power).tolist()), answer)
    with np.errstate(all="ignore"):
        return end._replace(value=float(np.ldexp(end.value, power)))
