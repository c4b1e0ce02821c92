"""Long moves, along which piecewise constant functions change."""

from typing import NamedTuple

import numpy as np

from radazo_jax._src.methods.contract import Ask, Part
from radazo_jax._src.methods.points import Space, along, both_sides
from radazo_jax._src.methods.slopes import Memory, Searched, line_search

# Long differences: their first length, in units, its factor, and the least of it.
_FIRST, _NEARER, _NEAREST = 0.3, 1 / 3, 0.09

# The number of shorter tries along long differences.
_TRIES = 3

# How far a parameter without an effect is moved, in units, and the number of times that
# a move that helps is doubled.
_LOOKS, _DOUBLED = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0), 20


def finite(values: np.ndarray) -> np.ndarray:
    """Returns values that can be compared: infinite if they failed."""
    return np.where(np.isfinite(values), values, np.inf)


def long_differences(
    x: np.ndarray, value: float, units: np.ndarray, space: Space
) -> Part[tuple[np.ndarray, float]]:
    """Steps along differences that are long enough to cross the steps of a function.

    Args:
      x: First point, shape [d].
      value: Its value, finite.
      units: Units of the lengths, shape [d].
      space: The space of the points.

    Returns:
      The best point and its value.
    """
    length, memory, everywhere = _FIRST, Memory(len(x)), np.ones(len(x), bool)
    before: tuple[np.ndarray, np.ndarray] | None = None
    while length > _NEAREST:
        sides = yield from both_sides(x, value, length * units, space)
        gradient = sides.mean() * units
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
    return x, value


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
            known = float(values[i]) if at is x else None
            at, value = yield from _doubled(at, value, points[i] - x, space, known)
        which, signs = which[~changed], signs[~changed]
    return Looked(at, value, lengths)


def _doubled(
    x: np.ndarray, value: float, move: np.ndarray, space: Space, known: float | None
) -> Part[tuple[np.ndarray, float]]:
    """Returns the end of a move that is doubled as long as it helps, and its value."""
    for _ in range(_DOUBLED):
        new = space.point(x + move)
        if known is None:
            likely = space.point(x + 2 * move)[None]
            at = float(finite((yield Ask(new[None], likely)))[0])
        else:
            at, known = known, None
        if not at < value:
            break
        x, value, move = new, at, 2 * move
    return x, value
