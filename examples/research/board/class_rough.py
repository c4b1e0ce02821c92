"""Functions that are not smooth, or whose start or minimum is hard to leave or find.

Families are as in `class_problems`. Their docstrings say how f* is found.
"""

from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq, linprog

from board.class_problems import Family, Function, known, lattice, polished, rotation


def _weighted(power: float, value: Callable[[np.ndarray, np.ndarray], float]) -> Family:
    """A value of up to 10^power weights, and of rotated coordinates of the minimum."""

    def family(draw: np.random.Generator, d: int) -> Function:
        turn, _ = rotation(draw, d)
        weights, best = np.logspace(0, draw.uniform(0, power), d), draw.normal(size=d)

        def fun(x: np.ndarray) -> float:
            return float(value(weights, turn(x - best)))

        return known(fun, best + draw.normal(size=d), best)

    return family


# Without a gradient at the minimum; f* is 0.
absolutes = _weighted(2, lambda weights, z: weights @ np.abs(z))
squares = _weighted(2, lambda weights, z: (weights * z**2).max())


def largest(draw: np.random.Generator, d: int) -> Function:
    """The largest of 3d absolute linear forms; f* is 0."""
    forms, best = draw.normal(size=(3 * d, d)), draw.normal(size=d)

    def fun(x: np.ndarray) -> float:
        return float(np.abs(forms @ (x - best)).max())

    return known(fun, best + draw.normal(size=d), best)


def bends(draw: np.random.Generator, d: int) -> Function:
    """A chain of valleys with absolute values; f* is 0."""
    steep, best = draw.uniform(2, 10), draw.normal(size=d)

    def fun(x: np.ndarray) -> float:
        y = 1 + x - best
        ahead = np.abs(y[1:] - np.abs(y[:-1]))
        return float(steep * ahead.sum() + np.abs(1 - y[:-1]).sum())

    return known(fun, best + draw.normal(size=d), best)


def regression(draw: np.random.Generator, d: int) -> Function:
    """A quantile regression on noisy data; a linear program gives f*."""
    features = draw.normal(size=(100, d)) @ np.diag(np.logspace(0, -1, d))
    values = features @ draw.normal(size=d) + 0.3 * draw.standard_t(2, size=100)
    share = draw.uniform(0.3, 0.7)

    def fun(x: np.ndarray) -> float:
        r = values - features @ x
        return float(np.maximum(share * r, (share - 1) * r).sum()) / r.size

    # values = features x + above - below, both at least 0.
    costs = np.r_[np.zeros(d), np.full(100, share), np.full(100, 1 - share)]
    sides = np.hstack([features, np.eye(100), -np.eye(100)])
    box = [(None, None)] * d + [(0, None)] * 200
    found = linprog(costs, A_eq=sides, b_eq=values, bounds=box)
    return known(fun, np.zeros(d), found.x[:d])


def margin(draw: np.random.Generator, d: int) -> Function:
    """The mean hinge loss with an absolute penalty; a linear program gives f*."""
    features = draw.normal(size=(100, d))
    odds = features @ draw.normal(size=d) + draw.logistic(size=100)
    signed, penalty = np.sign(odds)[:, None] * features, 1e-2

    def fun(x: np.ndarray) -> float:
        loss = np.maximum(0, 1 - signed @ x)
        return float(loss.sum()) / loss.size + penalty * float(np.abs(x).sum())

    # x is the difference of two parts that are at least 0.
    costs = np.r_[np.full(2 * d, penalty), np.full(100, 0.01)]
    found = linprog(costs, np.hstack([-signed, signed, -np.eye(100)]), -np.ones(100))
    return known(fun, np.zeros(d), found.x[:d] - found.x[d : 2 * d])


# With many minima.
def ripples(draw: np.random.Generator, d: int) -> Function:
    """Rastrigin's function, rotated, with ripples of a height of 0.1 to 3."""
    turn, _ = rotation(draw, d)
    height, best = 10 ** draw.uniform(-1, 0.5), draw.normal(size=d)

    def fun(x: np.ndarray) -> float:
        z = turn(x - best)
        return float(z @ z + height * (d - np.cos(2 * np.pi * z).sum()))

    return known(fun, best + draw.uniform(-3, 3, d), best)


def funnel(draw: np.random.Generator, d: int) -> Function:
    """Ackley's function, with weights and a rotation; f* is 0."""
    turn, _ = rotation(draw, d)
    best = draw.normal(size=d)

    def fun(x: np.ndarray) -> float:
        z = turn(x - best)
        narrow = 20 - 20 * np.exp(-0.2 * np.sqrt(z @ z / d))
        return float(narrow + np.e - np.exp(np.cos(2 * np.pi * z).sum() / d))

    return known(fun, best + draw.uniform(-5, 5, d), best)


def products(draw: np.random.Generator, d: int) -> Function:
    """Griewank's function, rotated, on a scale of ten; f* is 0."""
    turn, _ = rotation(draw, d)
    best, roots = draw.normal(size=d), np.sqrt(np.arange(1, d + 1))

    def fun(x: np.ndarray) -> float:
        z = 10 * turn(x - best)
        return float(z @ z / 400 + 1 - np.cos(z / roots).prod())

    return known(fun, best + draw.uniform(-4, 4, d), best)


def hollows(draw: np.random.Generator, d: int) -> Function:
    """The deepest of 6 Gaussian hollows at a point; f* is 0 in the deepest of all."""
    centers = draw.uniform(-3, 3, size=(6, d))
    depths = np.r_[1.0, draw.uniform(0.2, 0.8, 5)]
    widths = 4 * d * 10 ** draw.uniform(-0.3, 0.3, 6)

    def fun(x: np.ndarray) -> float:
        apart = centers - x
        far = np.einsum("ij,ij->i", apart, apart)
        return 1 - float((depths * np.exp(-far / widths)).max())

    return known(fun, draw.uniform(-2, 2, d), centers[0])


def waves(draw: np.random.Generator, d: int) -> Function:
    """Frequencies and amplitudes of d/2 waves, from exact measurements; f* is 0."""
    times, count = np.linspace(0, 4, 80), d // 2
    best = np.r_[draw.uniform(1, 6, count), draw.uniform(0.5, 1.5, d - count)]

    def model(x: np.ndarray) -> np.ndarray:
        waves = np.sin(times[:, None] * x[:count]) @ x[count : 2 * count]
        return waves + x[2 * count :].sum()

    measured = model(best)

    def fun(x: np.ndarray) -> float:
        r = model(x) - measured
        return float(r @ r) / r.size

    start = np.r_[draw.uniform(1, 6, count), np.ones(d - count)]
    return known(fun, start, best)


_TETRAHEDRON = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])


def atoms(draw: np.random.Generator, d: int) -> Function:
    """Lennard-Jones atoms from a random start: four in space (d = 12), or in a plane.

    f* is polished from the densest cluster: a tetrahedron, or a part of a lattice.
    """
    space = 3 if d == 12 else 2
    count = d // space
    first, second = np.triu_indices(count, 1)

    def fun(x: np.ndarray) -> float:
        points = x.reshape(count, space)
        apart = points[first] - points[second]
        sixth = np.einsum("ij,ij->i", apart, apart) ** -3
        return float(sixth @ (sixth - 2))

    dense = lattice(count, space)
    if space == 3:
        dense = _TETRAHEDRON / 8**0.5
    scattered = 1.5 * lattice(count, space) + 0.3 * draw.normal(size=(count, space))
    return polished(fun, scattered.ravel(), [dense.ravel()])


# Slopes are constant far away, or vanish at the start.
slopes = _weighted(1, lambda weights, z: weights @ (np.logaddexp(z, -z) - np.log(2)))
cone = _weighted(2, lambda weights, z: np.sqrt(1 + weights @ (z * z)))


def _over(height: Callable[[float], float], distance: float) -> Family:
    """A function of a rotated quadratic form, and a start so far from the minimum."""

    def family(draw: np.random.Generator, d: int) -> Function:
        turn, back = rotation(draw, d)
        weights, best = np.logspace(0, draw.uniform(0, 1), d), draw.normal(size=d)

        def fun(x: np.ndarray) -> float:
            z = turn(x - best)
            return height(float(weights @ (z * z)))

        away = draw.normal(size=d)
        away *= distance * draw.uniform(0.9, 1.1) / np.sqrt(weights @ away**2)
        return known(fun, best + back(away), best)

    return family


hole = _over(lambda z: -float(np.expm1(-z / 2)), 4.5)
well = _over(lambda z: z / (1 + z), 30.0)
basin = _over(lambda z: float(np.tanh(z / 4)), 5.0)


def saddle(draw: np.random.Generator, d: int) -> Function:
    """Double wells in rotated coordinates, from the middle of them; f* is 0."""
    turn, back = rotation(draw, d)
    middle, tilt = draw.normal(size=d), 10 ** draw.uniform(-5, -3)

    def fun(x: np.ndarray) -> float:
        z = turn(x - middle)
        return float(((z * z - 1) ** 2).sum())

    best = middle + back(draw.choice([-1.0, 1.0], d))
    return known(fun, middle + tilt * draw.normal(size=d), best)


def inflection(draw: np.random.Generator, d: int) -> Function:
    """Squares of cubes plus one, from the inflection of the cubes; f* is 0."""
    turn, back = rotation(draw, d)
    middle, weights = draw.normal(size=d), 10 ** draw.uniform(0, 1, d)

    def fun(x: np.ndarray) -> float:
        z = turn(x - middle)
        r = z * z * z + 1
        return float(weights @ (r * r))

    best = middle - back(np.ones(d))
    return known(fun, middle + 10 ** draw.uniform(-3, -1.5) * draw.normal(size=d), best)


# NaN outside of a region, at whose boundary the minimum is.
def ball(draw: np.random.Generator, d: int) -> Function:
    """A rotated quadratic form in a ball that its center is out of.

    The root of the secular equation of a trust region gives f*.
    """
    turn, back = rotation(draw, d)
    weights, center = np.logspace(0, draw.uniform(0, 2), d), draw.normal(size=d)
    center *= draw.uniform(1.5, 3) / np.linalg.norm(center)

    def fun(x: np.ndarray) -> float:
        if x @ x > 1 + 1e-12:
            return np.nan
        z = turn(x) - center
        return 0.5 * float(weights @ (z * z))

    def inner(shift: float) -> np.ndarray:
        return weights * center / (weights + shift)

    shift = brentq(
        lambda s: inner(s) @ inner(s) - 1, 0, 1e3 * weights[-1], xtol=1e-14, rtol=1e-14
    )
    best = back(inner(shift))
    return known(fun, -0.5 * best + 0.1 * draw.normal(size=d) / d**0.5, best)


def roots(draw: np.random.Generator, d: int) -> Function:
    """Square roots of coordinates above a corner; f* is 0 at the corner."""
    weights, best = 10 ** draw.uniform(0, 1, d), draw.normal(size=d)

    def fun(x: np.ndarray) -> float:
        with np.errstate(invalid="ignore"):
            return float(weights @ np.sqrt(x - best))

    return known(fun, best + draw.uniform(0.5, 2, d), best)


def wealth(draw: np.random.Generator, d: int) -> Function:
    """The growth of a portfolio of d + 1 assets, whose shares must be positive.

    The last share is what the others leave. Cover's multiplicative updates give f*,
    and some shares are 0 there.
    """
    returns = np.exp(
        0.3 * draw.normal(size=(40, d + 1)) + 0.05 * draw.normal(size=d + 1)
    )

    def fun(x: np.ndarray) -> float:
        last = 1 - x.sum()
        if last < 0 or (x < 0).any():
            return np.nan
        return -float(np.log(returns[:, :-1] @ x + returns[:, -1] * last).mean())

    shares = np.full(d + 1, 1 / (d + 1))
    start = shares[:-1]
    for _ in range(20_000):
        shares = shares * (returns / (returns @ shares)[:, None]).mean(axis=0)
    shares = np.where(shares < 1e-12, 0, shares)
    shares /= shares.sum()
    best = shares[:-1] * (1 - 1e-15 * (shares[-1] == 0))
    return known(fun, start, best)


def barrier(draw: np.random.Generator, d: int) -> Function:
    """A linear function with a weak logarithmic barrier; Newton's steps give f*."""
    sides = draw.normal(size=(3 * d, d))
    costs, weak = draw.normal(size=d), 10 ** draw.uniform(-3, -2)
    sides = np.vstack([sides, np.eye(d), -np.eye(d)])
    limits = np.r_[np.ones(3 * d), np.full(2 * d, 2.0)]

    def fun(x: np.ndarray) -> float:
        room = limits - sides @ x
        if room.min() <= 0:
            return np.nan
        return float(costs @ x - weak * np.log(room).sum())

    best = np.zeros(d)
    for path in np.geomspace(1.0, weak, 12):
        for _ in range(50):
            room = limits - sides @ best
            slope = costs + path * (sides.T @ (1 / room))
            curves = path * (sides.T / room**2) @ sides
            step = np.linalg.solve(curves, slope)
            # Half of the way to the nearest side, at most.
            reach = (-(sides @ step) / room).max()
            best = best - min(1.0, 0.5 / max(reach, 1e-300)) * step
    return known(fun, np.zeros(d), best)
