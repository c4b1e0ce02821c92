"""Functions that are constant around almost every point, and whole numbers.

Families are as in `class_problems`.
"""

from collections.abc import Callable

import numpy as np

from board.class_problems import Function, known, rotation


# Steps: the function is constant around almost every point.
def floors(draw: np.random.Generator, d: int) -> Function:
    """Squares of whole numbers of coordinates; f* is 0 in a cube."""
    steps, best = draw.uniform(2, 10), draw.normal(size=d)
    weights = 10 ** draw.uniform(0, 1, d)

    def fun(x: np.ndarray) -> float:
        z = np.floor(np.abs(x - best) * steps)
        return float(weights @ (z * z))

    return known(fun, best + 2 * draw.normal(size=d), best)


def grid(draw: np.random.Generator, d: int) -> Function:
    """A quadratic form of parameters that are rounded to multiples of a step; f* is 0.

    The curvatures are between 1 and 30, and neighbors are coupled.
    """
    step, weights = draw.uniform(0.05, 0.3), 10 ** draw.uniform(0, 1.5, d)
    best = np.round(draw.normal(size=d) / step) * step

    def fun(x: np.ndarray) -> float:
        z = np.round((x - best) / step) * step
        return float(weights @ (z * z) + (z[1:] - z[:-1]) @ (z[1:] - z[:-1]))

    return known(fun, best + 1.5 * draw.normal(size=d), best)


def mistakes(draw: np.random.Generator, d: int) -> Function:
    """The share of mistakes (0/1) of a linear classifier; another makes none."""
    features, best = draw.normal(size=(400, d)), draw.normal(size=d)
    odds = features @ best
    # The points next to the plane are left out, so that there is a margin.
    kept = np.abs(odds) > np.quantile(np.abs(odds), 0.3)
    features, labels = features[kept], odds[kept] > 0

    def fun(x: np.ndarray) -> float:
        return float(np.count_nonzero((features @ x > 0) != labels)) / labels.size

    return known(fun, draw.normal(size=d), best)


def units(draw: np.random.Generator, d: int) -> Function:
    """The share of mistakes of a network of d/2 threshold units; another has none."""
    features, count = draw.normal(size=(400, 2)), d // 2
    angles = draw.uniform(0, 2 * np.pi, count)
    planes = np.stack([np.cos(angles), np.sin(angles)])

    def classes(x: np.ndarray) -> np.ndarray:
        hidden = features @ planes + x[:count] > 0
        return hidden @ x[count : 2 * count] > x[2 * count :].sum()

    best = draw.normal(size=d)
    while not 0.2 < classes(best).mean() < 0.8:  # Neither class is rare.
        best = draw.normal(size=d)
    labels = classes(best)

    def fun(x: np.ndarray) -> float:
        return float(np.count_nonzero(classes(x) != labels)) / labels.size

    start = draw.normal(size=d)
    while fun(start) < 0.2:
        start = draw.normal(size=d)
    return known(fun, start, best)


def order(draw: np.random.Generator, d: int) -> Function:
    """The share of pairs that a linear score puts in the wrong order; f* is 0."""
    features, best = draw.normal(size=(60, d)), draw.normal(size=d)
    first, second = np.triu_indices(60, 1)
    truth = features @ best
    ahead = truth[first] > truth[second]

    def fun(x: np.ndarray) -> float:
        score = features @ x
        wrong = (score[first] > score[second]) != ahead
        return float(np.count_nonzero(wrong)) / wrong.size

    return known(fun, draw.normal(size=d), best)


def digits(draw: np.random.Generator, d: int) -> Function:
    """A rotated quadratic form with two to three digits; f* is 0 near its center."""
    turn, _ = rotation(draw, d)
    weights, best = np.logspace(0, draw.uniform(0, 2), d), draw.normal(size=d)
    start = best + draw.normal(size=d)
    coarse = 10 ** draw.uniform(-3, -2) * float(weights @ turn(start - best) ** 2)

    def fun(x: np.ndarray) -> float:
        return coarse * float(np.floor(weights @ turn(x - best) ** 2 / coarse))

    return known(fun, start, best)


# Whole numbers, in a box of 20 around the minimum; f* is 0.
def _whole(
    value: Callable[[np.ndarray], float], draw: np.random.Generator, best: np.ndarray
) -> Function:
    """A function of the rounded distance to the minimum."""

    def fun(x: np.ndarray) -> float:
        return float(value(np.round(x) - best))

    bounds = best - draw.integers(5, 16, best.size), best + 10.0
    start = np.clip(np.round(best + 5 * draw.normal(size=best.size)), *bounds)
    start[0] += start[0] == best[0]
    return Function(fun, start, fun(best), best, bounds, step=1.0)


def _best(draw: np.random.Generator, d: int) -> np.ndarray:
    return np.round(6 * draw.normal(size=d))


def counts(draw: np.random.Generator, d: int) -> Function:
    """A rotated quadratic form."""
    turn, _ = rotation(draw, d)
    weights = np.logspace(0, draw.uniform(0, 2), d)
    return _whole(lambda z: weights @ turn(z) ** 2, draw, _best(draw, d))


def shares(draw: np.random.Generator, d: int) -> Function:
    """Absolute misses of d sums."""
    forms = np.eye(d) + draw.integers(-1, 2, (d, d))
    return _whole(lambda z: np.abs(forms @ z).sum(), draw, _best(draw, d))


def sites(draw: np.random.Generator, d: int) -> Function:
    """Ripples on a bowl."""
    best, period = _best(draw, d), draw.uniform(2, 4)

    def value(z: np.ndarray) -> float:
        return z @ z / 2 + 4 * np.sum(1 - np.cos(2 * np.pi * z / period))

    return _whole(value, draw, best)


def neighbors(draw: np.random.Generator, d: int) -> Function:
    """Squares of the differences of neighbors, and a bowl."""
    best, bowl = _best(draw, d), draw.uniform(0.02, 0.2)
    return _whole(lambda z: np.sum(np.diff(z) ** 2) + bowl * (z @ z), draw, best)


def stocks(draw: np.random.Generator, d: int) -> Function:
    """Costs of too much and of too little, which differ, and of the sum."""
    best, (over, under) = _best(draw, d), draw.uniform(1, 9, (2, d))

    def value(z: np.ndarray) -> float:
        return over @ np.maximum(z, 0) + under @ np.maximum(-z, 0) + z.sum() ** 2

    return _whole(value, draw, best)
