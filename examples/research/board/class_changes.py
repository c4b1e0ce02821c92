"""Changes of a function: boxes, scales, failures, jumps, noise and far starts.

A change is `change(found, draw, ...)`, and `changed(change, ...)` makes a family of
another one. All but boxes keep the minimum.
"""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from board.class_problems import Family, Function, known, polished

Draw = np.random.Generator


def changed(change: Callable[..., Function], *settings: Any) -> Callable[..., Family]:
    """Returns a map of families that changes their functions."""

    def of(base: Family) -> Family:
        return lambda draw, d: change(base(draw, d), draw, *settings)

    return of


def boxed(found: Function, draw: Draw) -> Function:
    """In a box that cuts off the minimum in a third of the parameters.

    The box ends between start and minimum there, and is wide in the others. f* is
    polished in the box.
    """
    d, away = found.dimension, found.start - found.best
    away = np.where(np.abs(away) < 0.1, np.copysign(0.5, away), away)
    cut = draw.permutation(d) % 3 == 0
    end = found.best + draw.uniform(0.2, 0.6, d) * away
    wide = draw.uniform(1.5, 4, d) * np.abs(away) + 0.5
    lower = np.where(cut & (away > 0), end, found.best - wide)
    upper = np.where(cut & (away < 0), end, found.best + wide)
    start = np.clip(found.start, lower, upper)
    points = [np.clip(found.best, lower, upper), start]
    return polished(found.fun, start, points, (lower, upper))


def inside(found: Function, draw: Draw) -> Function:
    """In a box that a user would guess, which holds the minimum.

    The sizes of the parameters are from 10⁻³ to 10³, and half of the starts are the
    middle of the box.
    """
    d = found.dimension
    sizes = 10 ** draw.uniform(-3, 3, d)
    width = np.maximum(np.abs(found.start - found.best), 0.3) * draw.uniform(2, 6, d)
    lower = found.best - width * draw.uniform(0.1, 0.9, d)
    start = lower + width / 2
    if draw.random() < 0.5:
        start = np.clip(found.start, lower, lower + width)
    bounds = lower, lower + width
    best = sizes * polished(found.fun, start, [found.best, start], bounds).best

    def fun(x: np.ndarray) -> float:
        return found.fun(np.clip(x / sizes, *bounds))

    scaled = (sizes * bounds[0], sizes * bounds[1])
    return Function(fun, sizes * start, float(fun(best)), best, scaled)


def jittered(found: Function, draw: Draw) -> Function:
    """With a solver's tolerance of 10⁻⁴: it adds to values by a hash.

    It adds nothing at the minimum itself, whose value is the least one.
    """
    salt = int(draw.integers(2**32))

    def fun(x: np.ndarray) -> float:
        value, point = found.fun(x), np.asarray(x, np.float64)
        hashed = zlib.crc32(point.tobytes(), salt) / 2**32
        return value + 1e-4 * abs(value) * hashed * (not np.all(x == found.best))

    return found.changed(fun)


def scaled(found: Function, draw: Draw, power: float) -> Function:
    """With parameters of sizes from 10^-power to 10^power."""
    sizes = 10 ** draw.permutation(np.linspace(-power, power, found.dimension))
    start, best = sizes * found.start, sizes * found.best
    return found.changed(lambda x: found.fun(x / sizes), start=start, best=best)


def failing(found: Function, draw: Draw, share: float) -> Function:
    """NaN at a share of the points, by a hash of the point."""
    limit, salt = int(share * 2**32), int(draw.integers(2**32))
    while zlib.crc32(found.start.tobytes(), salt) < limit:
        salt += 1

    def fun(x: np.ndarray) -> float:
        fails = zlib.crc32(np.asarray(x, np.float64).tobytes(), salt) < limit
        return np.nan if fails else found.fun(x)

    return found.changed(fun)


def halved(found: Function, draw: Draw) -> Function:
    """NaN beyond a plane through the minimum."""
    away = found.start - found.best
    normal = away / np.linalg.norm(away)
    normal = normal + draw.normal(size=away.size) / away.size**0.5
    normal = normal if normal @ away >= 0 else -normal
    # The minimum itself is in the region, with its rounding.
    edge = float(normal @ found.best) - 1e-12
    return found.changed(lambda x: found.fun(x) if normal @ x >= edge else np.nan)


def stepped(found: Function, draw: Draw) -> Function:
    """With six jumps up, across planes between the minimum and the start."""
    d, away = found.dimension, found.start - found.best
    normals = away / np.linalg.norm(away) + draw.normal(size=(6, d)) / d**0.5
    normals *= np.sign(normals @ away)[:, None]
    edges = normals @ found.best + draw.uniform(0.1, 0.9, 6) * (normals @ away)
    heights = draw.uniform(0.05, 0.3, 6) * found.gap
    return found.changed(
        lambda x: found.fun(x) + float(heights @ (normals @ x > edges))
    )


def torn(found: Function, draw: Draw) -> Function:
    """With a jump up or down at every plane of a set; the minimum is low."""
    away = found.start - found.best
    normal = draw.normal(size=away.size) / np.linalg.norm(away) * draw.uniform(2, 6)
    height = draw.uniform(0.1, 0.3) * found.gap

    def fun(x: np.ndarray) -> float:
        odd = np.floor(normal @ (x - found.best) + 0.5) % 2
        return found.fun(x) + height * float(odd)

    return found.changed(fun)


def noisy(found: Function, draw: Draw, noise: float, relative: float) -> Function:
    """Above 0, with values that a method gets with noise."""
    del draw
    sizes = {"noise": noise, "relative": relative}
    return found.changed(lambda x: found.fun(x) - found.least, least=0.0, **sizes)


def far(found: Function, draw: Draw) -> Function:
    """From a start that is 30 to 1000 times as far from the minimum."""
    away = 10 ** draw.uniform(1.5, 3) * (found.start - found.best)
    return known(found.fun, found.best + away, found.best)
