"""The noise of values, and the sizes of parameters."""

import enum
import math
from typing import NamedTuple

import numpy as np

from radazo_jax._src.methods.contract import Part
from radazo_jax._src.methods.points import AxisDifferences, Space, along

# The number of points on a line that show noise, and the share of the values within
# which they must lie.
_POINTS, _CLOSE = 6, 0.1

# Three levels of noise agree within this factor.
_AGREE = 4.0

# The factor of a distance that is too short or too long, the number of tries, and the
# limits of the distance.
_FACTOR, _TRIES, _NEAR, _FAR_AWAY = 100.0, 4, 1e-14, 0.2

# Less noise than so many roundings is rounding.
_ROUNDING = 100.0

# A size changes the value by about this share of it, within this factor.
AIM, _WITHIN = 1e-2, 10.0

# Changes of so many roundings are hidden. Factors of a distance with a hidden change:
# of the next distance, and of the size.
_HIDDEN, _IF_HIDDEN, _GUESS_IF_HIDDEN = 4.0, 1e4, 1e3

# Factors of the next distance at least and at most, and the number of rounds.
_SHORTEST, _LONGEST, _ROUNDS = 1e-4, 1e6, 10

# Without a change at so many sizes, a parameter is dead.
_FAR = 100.0

# A change by a move of this many spans shows that values have few digits.
PROBE = 1e-3

# Short changes have jitter if they miss the change along all parameters by this share.
# The first distance of the points that show its level, in spans.
_AMISS, _SHORT = 0.5, 1e-5

# A value that is lower than this share of the rise by a short move is 0.
_ZERO = 1e-10

# The share of moves that shows whether changes have digits.
_PART = 0.37

# Near a minimum, a move twice as long raises the value by such a factor: 4 along
# a parabola, 16 along a fourth power.
_PARABOLA = 3.6, 18.0

# A short change of this share of the aim of sizes belongs to a jump.
_JUMP = 3e-2

# A function is flat if a slope is this share of the slope of a shorter move.
_FLAT = 0.1

# The share of a distance after a failure.
_IF_FAILED = 1e-2


def level(values: np.ndarray) -> float | None:
    """Returns the standard deviation of noise in values of equidistant points.

    The k-th differences of a smooth function fall fast with k; of noise with a standard
    deviation ε they have the mean square ε² (2k)!/(k!)². So three successive estimates
    that agree belong to noise. ECnoise.

    Args:
      values: Values in the order of their points, shape [n], n ≥ 5.

    Returns:
      The level; `None` if no estimates agree: the points are too close or too far.

    References:
      Moré & Wild, Estimating Computational Noise, SIAM J. Sci. Comput. 2011,
      <https://doi.org/10.1137/100786125>.
    """
    table, levels, changes_sign = values, [], []
    for k in range(1, len(values)):
        table = np.diff(table)
        gamma = math.factorial(k) ** 2 / math.factorial(2 * k)
        levels.append(math.sqrt(gamma * float(np.mean(table**2))))
        changes_sign.append(bool(np.min(table) < 0 < np.max(table)))
    for k in range(len(levels) - 2):
        three = levels[k : k + 3]
        if changes_sign[k] and max(three) <= _AGREE * min(three):
            return levels[k]
    return None


def measured(
    x: np.ndarray, value: float, length: float, space: Space
) -> Part[float | None]:
    """Measures the relative noise of values near a point that seem to have some.

    Args:
      x: The point, shape [d].
      value: Its value, finite.
      length: First distance of the points, in spans of the parameters.
      space: The space of the points.

    Returns:
      The standard deviation as a share of the value, `None` if it cannot be told from
      the function, or is no more than rounding.
    """
    d, shorter, direction = len(x), False, space.spans(x) / math.sqrt(len(x))
    # Away from bounds that are close; otherwise up and down in turn.
    above, below = space.box.upper - x, x - space.box.lower
    signs = np.where(above < below, -1.0, 1.0)
    signs = np.where(above == below, 1 - 2 * (np.arange(d) % 2), signs)
    for _ in range(_TRIES):
        numbers = np.arange(1, _POINTS + 1)[:, None]
        points = space.point(x + numbers * length * signs * direction)
        values = np.concatenate([[value], (yield points)])
        if not np.all(np.isfinite(values)):
            return None
        low, high = float(np.min(values)), float(np.max(values))
        found, largest = level(values), max(abs(low), abs(high))
        if found is None or high - low > _CLOSE * largest:
            length, shorter = length / _FACTOR, True
        elif found > _ROUNDING * np.finfo(float).eps * largest:
            return found / largest
        elif shorter:
            return None  # A short line is smooth, and a long one jumps.
        else:
            length *= _FACTOR  # Values with few digits are equal, or lie on a line.
        if not _NEAR < length < _FAR_AWAY:
            return None
    return None


def are_hidden(changes: np.ndarray, value: float) -> np.ndarray:
    """Says whether changes may be rounding: bool, shape [d]."""
    least = _HIDDEN * np.finfo(float).eps * abs(value)
    return np.isfinite(changes) & (abs(changes) <= least)


def are_digits(changes: np.ndarray, value: float, begun: float) -> bool:
    """Says whether changes are whole multiples of one, as of values with few digits.

    Near a minimum of 0, short changes of a smooth function are as alike, but no larger
    than roundings of the value `begun` at the start.
    """
    sizes = abs(changes[np.isfinite(changes) & (changes != 0)])
    if len(sizes) < 2:
        return False
    digit = np.min(sizes)
    away = abs(sizes / digit - np.round(sizes / digit)) < 0.05
    least = max(1e-9 * abs(value), _ROUNDING * np.finfo(float).eps * abs(begun))
    return bool(digit > least and np.mean(away) > 0.9)


class Seek(NamedTuple):
    """A search for the sizes of parameters.

    Attributes:
      distances: Distances of this round, shape [d].
      guesses: Sizes as far as they are known, shape [d].
      found: Whether the search for a size has ended: bool, shape [d].
      slopes: Changes over distances of the round before, shape [d].
    """

    distances: np.ndarray
    guesses: np.ndarray
    found: np.ndarray
    slopes: np.ndarray

    def after(self, changes: np.ndarray, value: float, far: np.ndarray) -> "Seek":
        """Returns the search after a round.

        Args:
          changes: Changes of the value at the distances, shape [d].
          value: Value at the point.
          far: Distances beyond which nothing is sought, shape [d].
        """
        change, aim = abs(changes), AIM * abs(value)
        finite, hidden = np.isfinite(change), are_hidden(changes, value)
        with np.errstate(all="ignore"):
            ratio = np.where(finite & (change > 0), aim / change, 0)
        met = finite & (ratio >= 1 / _WITHIN) & (ratio <= _WITHIN)
        # A short change is linear, and a long one at most quadratic.
        root = np.where(finite, np.sqrt(ratio), _IF_FAILED)
        too_far = ~finite | (change > aim)
        guess = np.where(too_far, root, np.where(hidden, _GUESS_IF_HIDDEN, ratio))
        longer = np.where(hidden, _IF_HIDDEN, np.clip(ratio, _WITHIN, _LONGEST))
        factor = np.where(too_far, np.maximum(root, _SHORTEST), longer)
        distances = np.where(self.found, self.distances, factor * self.distances)
        guess = self.distances * np.where(met, 1, guess)
        # A parameter without an effect has no size that could be found, and beyond a
        # distance at which a function becomes flat nothing is sought.
        dead = hidden & (self.distances >= far)
        guess = np.where(dead, far / _FAR, guess)
        slopes = change / self.distances
        flat = finite & ~hidden & ~too_far & (slopes < _FLAT * self.slopes)
        guess = np.where(flat & ~met, self.distances, guess)
        return Seek(
            np.where(hidden, np.minimum(distances, far), distances),
            np.where(self.found, self.guesses, guess),
            self.found | met | dead | flat,
            np.where(hidden, 0, slopes),
        )


class Short(enum.Enum):
    """Kinds of short changes."""

    SLOPES = enum.auto()
    DIGITS = enum.auto()  # 0 or of one size, because values have few digits.
    FLAT = enum.auto()  # 0 at a minimum; longer moves show curvature.
    STEEP = enum.auto()  # Large next to a minimum of about 0.


def short(
    x: np.ndarray, value: float, begun: float, first: AxisDifferences, space: Space
) -> Part[Short]:
    """Says what short changes are, by longer moves if many are 0 or very large."""
    if are_digits(first.changes, value, begun):
        # Equal slopes are no digits: a part of the moves changes the value by a part.
        part = (yield space.point(x + _PART * first.steps)[None])[0] - value
        digit = np.min(abs(first.changes[first.changes != 0]))
        if part == 0 or are_digits(np.array([digit, part]), value, begun):
            return Short.DIGITS
    free, eps = first.steps != 0, np.finfo(float).eps
    hidden, jumps = are_hidden(first.changes, value), are_jumps(first, value)
    longer = PROBE * space.spans(x) * np.sign(first.steps)
    # A parabola that hides short changes rises by so little along longer moves.
    least = (
        _HIDDEN
        * len(x)
        * eps
        * abs(value)
        * np.max((longer[free] / first.steps[free]) ** 2)
    )
    if 4 * np.sum(hidden) >= np.sum(free):
        one, two = yield from _twice(x, value, np.where(hidden, longer, 0), space)
        if _is_parabola(one, two) and one <= least:
            return Short.FLAT
        if one != 0 or two != 0:
            return Short.DIGITS
    if 4 * np.sum(jumps) >= np.sum(free):
        one, two = yield from _twice(x, value, np.where(jumps, first.steps, 0), space)
        if _is_parabola(one, two):
            return Short.STEEP if abs(value) > _ZERO * one else Short.FLAT
    return Short.SLOPES


def _twice(
    x: np.ndarray, value: float, moves: np.ndarray, space: Space
) -> Part[np.ndarray]:
    """Returns the changes of the value by moves, and by moves twice as long."""
    return (yield space.point(x + np.array([[1.0], [2.0]]) * moves)) - value


def _is_parabola(one: float, two: float) -> bool:
    """Says whether a move, and one twice as long, change values as at a minimum."""
    return one > 0 and _PARABOLA[0] * one < two < _PARABOLA[1] * one


def jitter(
    x: np.ndarray, value: float, first: AxisDifferences, space: Space
) -> Part[float | None]:
    """Measures the relative noise of values whose short changes do not add up."""
    if np.any(first.dead) or not np.all(first.known):
        return None
    whole = (yield space.point(x + first.steps)[None])[0] - value
    missed = abs(whole - np.sum(first.changes))
    if not missed > _AMISS * np.linalg.norm(first.changes):
        return None
    return (yield from measured(x, value, _SHORT, space))


def measured_sizes(
    x: np.ndarray, value: float, first: AxisDifferences, space: Space
) -> Part[np.ndarray]:
    """Finds the move of each parameter that changes the value by about a hundredth.

    Finite bounds are sizes without a search.

    Args:
      x: The point, shape [d].
      value: Its value, finite.
      first: AxisDifferences there, which are the first round.
      space: The space of the points.
    """
    width = space.box.upper - space.box.lower
    bounded = np.isfinite(width)
    far = _FAR * np.maximum(space.sizes, abs(x))
    seek = Seek(
        abs(first.steps),
        np.where(bounded & (width > 0), width, space.sizes),
        bounded | (first.steps == 0),
        np.zeros_like(x),
    )
    signs, changes = np.where(first.steps < 0, -1, 1), first.changes
    for _ in range(_ROUNDS):
        seek = seek.after(changes, value, far)
        if np.all(seek.found):
            break
        which = np.flatnonzero(~seek.found)
        ends = space.point(x + signs * seek.distances)[which]
        changes = np.full_like(x, np.nan)
        changes[which] = (yield along(x, which, ends)) - value
    usable = np.isfinite(seek.guesses) & (seek.guesses > 0)
    return np.where(usable, seek.guesses, space.sizes)


def are_needed(first: AxisDifferences, value: float) -> bool:
    """Says whether slopes are too unlike for parameters of one size."""
    changes, slopes = first.changes[first.known], abs(first.gradient[first.known])
    if not len(changes):
        return False
    hidden = are_hidden(changes, value) & (changes != 0)
    wide = bool(np.any(abs(changes) > abs(value)) and value != 0)
    slopes = slopes[slopes > 0]
    apart = len(slopes) > 0 and np.max(slopes) > 1e4 * np.min(slopes)
    return bool(np.any(hidden)) or wide or bool(apart)


def are_of_steps(first: AxisDifferences, value: float) -> bool:
    """Says whether most short changes are 0, or as large as changes by long moves."""
    moved = first.steps != 0
    of_steps = moved & (first.dead | are_jumps(first, value))
    return bool(2 * np.sum(of_steps) > np.sum(moved))


def are_jumps(first: AxisDifferences, value: float) -> np.ndarray:
    """Says whether short changes are as large as changes by long moves: bool, [d]."""
    return abs(first.changes) > _JUMP * AIM * abs(value)
