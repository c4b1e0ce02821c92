"""Long moves, along which piecewise constant functions change."""

import itertools
import math
from typing import NamedTuple

import numpy as np

from radazo_jax._src.methods.contract import Ask, End, Part, T, answered
from radazo_jax._src.methods.ends import Reason
from radazo_jax._src.methods.points import Space, along, both_sides, finite
from radazo_jax._src.methods.slopes import Memory, Searched, line_search

# Long differences: their first length, in units, its factor, and the least of it.
_FIRST, _NEARER, _NEAREST = 0.3, 1 / 3, 0.09

# A bowl: lengths of moves, in units, and the factors between which the curvature grows
# from one to the next, 9 for fourth powers.
_BOWL, _ALIKE = (0.1, 0.3, 0.6), (0.5, 10.0)

# Moves along the parameters: their first lengths, in units, the factor of one that does
# not help, and the share of the whole fall that a round or a length must be worth.
_MOVES, _SHORTER, _WORTH = (0.3, 1.0, 0.1, 0.03), 0.5, 0.03

# Steps are idle if so many evaluations, times d + 1, lowered the value by less than a
# share of its whole fall, at so many units from the start.
_IDLE, _SLOW, _AWAY = 20, 1e-2, 10.0

# The number of the latest values, times d + 1.
_LATEST = 2

# The number of shorter tries along long differences.
_TRIES = 3

# How far a parameter without an effect is moved, in units, and the number of times that
# a move that helps is doubled.
_LOOKS, _DOUBLED = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0), 20


def long_differences(
    x: np.ndarray, value: float, units: np.ndarray, space: Space
) -> Part[tuple[np.ndarray, float, bool]]:
    """Takes steps along differences that cross the steps of a function.

    Args:
      x: First point, shape [d].
      value: Its value, finite.
      units: Units of the lengths, shape [d].
      space: The space of the points.

    Returns:
      The best point, its value, and whether any move changed the value.
    """
    length, memory, everywhere = _FIRST, Memory(len(x)), np.ones(len(x), bool)
    changed = False
    before: tuple[np.ndarray, np.ndarray] | None = None
    while length > _NEAREST:
        sides = yield from both_sides(x, value, length * units, space)
        gradient = sides.mean() * units
        changed |= bool(np.any(sides.first != 0) or np.any(sides.second != 0))
        if before is not None:
            memory.add((x - before[0]) / units, gradient - before[1])
        direction = memory.direction(gradient, everywhere)
        norm = float(np.linalg.norm(direction))
        if norm > 0 and not memory.pairs:
            direction *= length * np.sqrt(len(x)) / norm
        searched = Searched(None, value)
        if gradient @ direction < 0:
            searched = yield from line_search(
                x, value, gradient / units, direction * units, space, 2, _TRIES
            )
        new, at = searched.x, searched.value
        if value + sides.change < at:
            new, at = sides.lowest, value + sides.change
        before = None if new is None else (x, gradient)
        if new is None:
            length, memory = length * _NEARER, Memory(len(x))
        else:
            x, value = new, at
    return x, value, changed


def is_bowl(x: np.ndarray, value: float, units: np.ndarray, space: Space) -> Part[bool]:
    """Says whether moves of each parameter rise at both sides, as along a parabola.

    Values of few digits do so at a minimum, if the moves are long enough.

    Args:
      x: The point, shape [d].
      value: Its value, finite.
      units: Units of the lengths, shape [d].
      space: The space of the points.
    """
    before = None
    for share in _BOWL:
        sides = yield from both_sides(x, value, share * units, space)
        moved, both = sides.steps != 0, sides.steps * sides.others < 0
        first, second = finite(sides.first), finite(sides.second)
        rises = np.minimum(first, second)  # A failure is a rise.
        if not np.all(rises[moved] >= 0):
            return False
        mean = (first + second) / 2 / share**2
        if before is not None and np.all(rises[moved] > 0):
            both = moved & both & np.isfinite(mean + before)
            ratio = mean[both] / before[both]
            if np.all((ratio > _ALIKE[0]) & (ratio < _ALIKE[1])):
                return True
        before = mean
    return False


class Looked(NamedTuple):
    """The end of a look along parameters that seemed to have no effect.

    Attributes:
      x: Best point, shape [d].
      value: Its value.
      lengths: Length of the move by which a parameter first changed the value, 0 if
        none did, shape [d].
    """

    x: np.ndarray
    value: float
    lengths: np.ndarray


def look(
    x: np.ndarray, value: float, dead: np.ndarray, units: np.ndarray, space: Space
) -> Part[Looked]:
    """Moves parameters far whose short differences were exactly 0.

    Each is moved up and down, further each time until the value changes there. A move
    that helps is doubled as long as it helps.

    Args:
      x: The point, shape [d].
      value: Its value, finite.
      dead: Whether a parameter seemed to have no effect: bool, shape [d].
      units: Units of the moves, shape [d].
      space: The space of the points.
    """
    begun, at, lengths = value, x, np.zeros_like(x)
    numbers = np.flatnonzero(dead)
    which, signs = np.tile(numbers, 2), np.repeat([1.0, -1.0], len(numbers))
    for share in _LOOKS:
        ends = x[which] + signs * share * units[which]
        points = space.point(along(x, which, ends))
        moves = np.any(points != x, axis=1)
        which, signs, points = which[moves], signs[moves], points[moves]
        if not len(which):
            break
        values = finite((yield points))
        changed = values != begun
        seen = which[changed & (lengths[which] == 0)]
        lengths[seen] = share * units[seen]
        lower = np.flatnonzero(values < begun)
        for i in lower[np.argsort(values[lower], kind="stable")]:
            move = points[i] - x
            if at is x:
                at, value, move = points[i], float(values[i]), 2 * move
            at, value, _ = yield from _doubled(at, value, move, space)
        which, signs = which[~changed], signs[~changed]
    return Looked(at, value, lengths)


def moves(
    x: np.ndarray, value: float, units: np.ndarray, space: Space
) -> Part[tuple[np.ndarray, float]]:
    """Moves one parameter after another, as far as the value falls.

    A move that helps is doubled as long as it helps. One that does not is tried the
    other way, and is shorter next time. After a round, the move of all parameters is
    repeated as long as it helps. Once rounds are worth little, moves of another length
    follow, until none of the lengths is worth more.

    Args:
      x: The point, shape [d].
      value: Its value, finite.
      units: Units of the lengths, shape [d].
      space: The space of the points.

    Returns:
      The best point and its value.

    References:
      Hooke & Jeeves, "Direct Search" Solution of Numerical and Statistical Problems,
      Journal of the ACM 1961.
    """
    begun, useless = value, 0
    for share in itertools.cycle(_MOVES):
        lengths, first, before = share * units, value, np.inf
        while before - value > _WORTH * (begun - value):
            before = value
            x, value, lengths = yield from _round(x, value, lengths, space)
        useless = 0 if first - value > _WORTH * (begun - value) else useless + 1
        if useless == len(_MOVES):
            break
    return x, value


def _round(
    x: np.ndarray, value: float, lengths: np.ndarray, space: Space
) -> Part[tuple[np.ndarray, float, np.ndarray]]:
    """Moves each parameter once; returns the point, its value, and the next lengths."""
    begun, axes, lengths = x, np.eye(len(x)), lengths.copy()
    for i in np.flatnonzero(space.box.lower < space.box.upper):
        for sign in (1, -1):
            move = sign * lengths[i] * axes[i]
            x, value, times = yield from _doubled(x, value, move, space)
            if times:
                lengths[i] *= sign * 2.0 ** (times - 1)
                break
        else:
            lengths[i] *= _SHORTER
    x, value, _ = yield from _doubled(x, value, x - begun, space)
    return x, value, lengths


def _doubled(
    x: np.ndarray, value: float, move: np.ndarray, space: Space
) -> Part[tuple[np.ndarray, float, int]]:
    """Doubles a move as long as it helps.

    Returns:
      The best point, its value, and the number of moves that helped.
    """
    for times in range(_DOUBLED):
        new = space.point(x + move)
        if np.array_equal(new, x):
            return x, value, times
        at = float(finite((yield new[None]))[0])
        if not at < value:
            return x, value, times
        x, value, move = new, at, 2 * move
    return x, value, _DOUBLED


class Watch:
    """A watch on whether the values of steps fall, and on how far the points go.

    Attributes:
      best: The best point so far.
    """

    def __init__(self, best: End, origin: np.ndarray, units: np.ndarray):
        self.best, self._first, self._latest = best, best.value, best.value
        self._origin, self._units, self._size = origin, units, len(units) + 1
        self._idle, self._since = 0, math.inf

    def see(self, points: np.ndarray, values: np.ndarray) -> None:
        """Takes notice of the values of a step."""
        comparable, count = finite(values), len(values)
        self._since = self._since + count if np.all(np.isfinite(values)) else 0
        i = int(np.argmin(comparable))
        if comparable[i] < self.best.value:
            self.best = End(points[i], float(comparable[i]), Reason.NOWHERE)
        fall, whole = self._latest - self.best.value, self._first - self.best.value
        self._idle += count
        if fall > _SLOW * whole:
            self._latest, self._idle = self.best.value, 0

    @property
    def is_far(self) -> bool:
        """Whether the best point is many units away from the first one."""
        away = (self.best.params - self._origin) / self._units
        return bool(np.sqrt(np.mean(away**2)) > _AWAY)

    @property
    def is_idle(self) -> bool:
        """Whether the value has stopped falling on a plateau far away."""
        return self._idle > _IDLE * self._size and self.is_far

    @property
    def fails(self) -> bool:
        """Whether one of the latest values failed."""
        return self._since < _LATEST * self._size


def watched(inner: Part[T], watch: Watch) -> Part[T | None]:
    """Takes steps until they are idle; returns `None` then, or else their result."""

    def answer(asked: Ask) -> Part[np.ndarray | None]:
        values = yield asked
        watch.see(asked.points, values)
        return None if watch.is_idle else values

    return (yield from answered(inner, answer))
