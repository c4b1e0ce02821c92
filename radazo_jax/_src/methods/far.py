"""Long moves, along which functions with steps change."""

from typing import NamedTuple

import numpy as np

from radazo_jax._src.methods.contract import Ask, Part
from radazo_jax._src.methods.points import Space, along

# Long differences: their first length, in units, its factor, and the least of it.
_FIRST, _NEARER, _NEAREST = 0.3, 1 / 3, 0.02

# The lengths of a step along long differences.
_SHARES = (1.0, 0.5, 0.25)

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
      space: Where points lie.

    Returns:
      The best point and its value.
    """
    length, which = _FIRST, np.arange(len(x))
    while length > _NEAREST:
        ends = space.ends(x, length * units)
        steps = ends - x
        points = along(x, which, ends)
        others = along(x, which, space.point(x - steps))
        values = finite((yield Ask(points, others)))
        best, lower = points[np.argmin(values)], float(np.min(values))
        known = np.isfinite(values) & (steps != 0)
        changes = np.where(known, values - value, 0)
        direction = -changes / np.where(known, steps, 1) * units**2
        norm = float(np.linalg.norm(direction / units))
        if norm > 0:
            direction *= length * np.sqrt(len(x)) / norm
            tries = [space.point(x + share * direction) for share in _SHARES]
            for i, new in enumerate(tries):
                likely = np.array(tries[i + 1 :]) if i + 1 < len(tries) else None
                at = float(finite((yield Ask(new[None], likely)))[0])
                if at < value:
                    if at < lower:
                        best, lower = new, at
                    break
        if lower < value:
            x, value = best, lower
        else:
            length *= _NEARER
    return x, value


class Looked(NamedTuple):
    """The end of a look along parameters that seemed to have no effect.

    Attributes:
      x: Best point, shape [d].
      value: Its value.
      matter: Whether any of the parameters has an effect.
    """

    x: np.ndarray
    value: float
    matter: bool


def look(
    x: np.ndarray, value: float, dead: np.ndarray, units: np.ndarray, space: Space
) -> Part[Looked]:
    """Moves parameters far whose short differences were exactly 0.

    Each is moved up and down, further each time until the value changes. A move that
    helps is doubled as long as it helps.

    Args:
      x: The point, shape [d].
      value: Its value, finite.
      dead: Whether a parameter seemed to have no effect: bool, shape [d].
      units: Units of the moves, shape [d].
      space: Where points lie.
    """
    begun, at = value, x
    which, matter = np.flatnonzero(dead), False
    for share in _LOOKS:
        if not len(which):
            break
        ends = [space.point(x + sign * share * units)[which] for sign in (1, -1)]
        points = np.concatenate([along(x, which, end) for end in ends])
        values = finite((yield points)).reshape(2, len(which))
        points = points.reshape(2, len(which), len(x))
        changed = np.any(values != begun, axis=0)
        matter |= bool(np.any(changed))
        lower = np.flatnonzero(np.any(values < begun, axis=0))
        for i in lower[np.argsort(np.min(values[:, lower], axis=0), kind="stable")]:
            side = int(np.argmin(values[:, i]))
            move = points[side, i] - x
            at, value = yield from _doubled(
                at, value, move, space, float(values[side, i]) if at is x else None
            )
        which = which[~changed]
    return Looked(at, value, matter)


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
