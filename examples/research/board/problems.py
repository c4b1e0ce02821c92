"""The problems, with the place and the value of their minima.

These define the targets, and the grids of the methods that are tuned. The methods
without tuning receive values only.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

from paper import functions

_SEED = 2026  # Of starts and rotations, which all runs share.
_BLOCK = 50  # Rotations are by blocks, as in bbob-largescale, between permutations.
_BATCHES = (256, 16)  # How many points are evaluated together: two programs a problem.

# Noise: a standard deviation, as a share of the gap at the start.
NOISES = (0.01, 0.0001)

# Of a millisecond or more an evaluation, or of a start at 1e40.
_LEFT_OUT = {"DMN15102LS", "DMN15103LS", "INTEQNELS", "PENALTY3", "TENFOLDTRLS"}
_LARGE = ("EDENSCH", "DIXMAANB", "WOODS", "ENGVAL1", "ARWHEAD", "BDQRTIC")


# Compared by identity, because it holds arrays.
@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A function of a vector, with its minimum and its scales.

    Attributes:
      start: The start of all methods, float64 [d].
      evaluate: Points [n, d] to values [n].
      traced: The function for JAX, [d] to a scalar, or None.
      least: The value that gaps are measured from.
      distance: Distance from the start to the minimum, as a root of mean squares.
      gap: The value at the start minus the least value.
      slope: The squared length of the gradient at the start.
      noise: The standard deviation of what is added to values.
      bounds: The lower and the upper bounds, [d] each; `None` without.
    """

    start: np.ndarray
    evaluate: Callable[[np.ndarray], np.ndarray]
    traced: Callable[[jax.Array], jax.Array] | None
    least: float
    distance: float
    gap: float
    slope: float
    noise: float = 0.0
    bounds: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def dimension(self) -> int:
        return self.start.size


def known(
    start: np.ndarray,
    evaluate: Callable[[np.ndarray], np.ndarray],
    least: float,
    at: np.ndarray,
    traced: Callable[[jax.Array], jax.Array] | None = None,
) -> Problem:
    """Returns a problem with its least value and the point of this value."""
    distance = float(np.sqrt(np.mean((at - start) ** 2)))
    gap = float(evaluate(start[None])[0]) - least
    if traced is None:
        step = 1e-6 * max(1.0, distance)
        steps = step * np.eye(start.size)
        slopes = (evaluate(start + steps) - evaluate(start - steps)) / (2 * step)
    else:
        slopes = jax.grad(traced)(jnp.asarray(start))
    slope = float(np.sum(np.asarray(slopes) ** 2))
    return Problem(start, evaluate, traced, least, distance, gap, slope)


# What tells a row of a record from the others, and what measures the rest of it.
Row = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


class Case(NamedTuple):
    """A problem that is not built yet."""

    kind: str
    name: str
    dimension: int
    make: Callable[[], Problem]


def cases(fast: bool = False) -> list[Case]:
    """All problems that are installed, and last what a record can go without."""
    if fast:  # Importing sif2jax takes a minute by itself.
        found = [*_synthetic(100), *_bbob(80, [1])]
        kinds = dict.fromkeys(case.kind for case in found)
        return [next(case for case in found if case.kind == kind) for kind in kinds]
    cutest = _cutest(50, 5000)
    found = [case for case in cutest if case.dimension <= 100]
    found += _synthetic(100) + _bbob(80, range(1, 21))
    found.sort(key=lambda case: case.dimension)
    thousand = _synthetic(1000)
    found += [case for case in thousand if case.kind == "Synthetic"]
    found += [case for case in cutest if 100 < case.dimension <= 200]
    found += [case for case in cutest if case.name in _LARGE]
    found += [case for case in _synthetic(10_000) if case.kind == "Synthetic"]
    found += [case for case in cutest if 200 < case.dimension <= 1100]
    found += _bbob(320, range(1, 21, 2))
    return found + [case for case in thousand if case.kind == "Rotated"]


def _synthetic(dimension: int) -> list[Case]:
    """The paper's functions and the ellipsoid, as they are, rotated, and with noise."""
    every = {
        **functions.PROBLEMS,
        "Ellipsoid": functions.Problem(functions.ellipsoid, 0.0),
    }
    found = []
    for name, (fun, at) in every.items():
        make = functools.partial(synthetic, fun, at, dimension)
        found.append(Case("Synthetic", name, dimension, make))
        if name != "Quadratic":  # Turned it is the same.
            turned = functools.partial(make, rotated=True)
            found.append(Case("Rotated", name, dimension, turned))
        for noise in NOISES if dimension == 100 else ():
            noisy = functools.partial(make, noise=noise)
            found.append(Case("Noisy", f"{name}, {noise:.2%}", dimension, noisy))
    return found


def synthetic(
    fun: Callable[[jax.Array], jax.Array],
    minimizer: float,
    dimension: int,
    rotated: bool = False,
    noise: float = 0.0,
) -> Problem:
    """A function with its minimum 0 at a known point."""
    start = jnp.asarray(
        functions.uniform_start(jax.random.key(_SEED), dimension), jnp.float64
    )
    least = jnp.full(dimension, minimizer)
    traced = fun
    if rotated:
        turn, back = rotation(dimension)
        # The minimum does not move.
        least, traced = back(least), lambda theta: fun(turn(theta))
    problem = _of_jax(traced, start, 0.0, np.asarray(least))
    return dataclasses.replace(problem, noise=noise * problem.gap)


def rotation(dimension: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An orthogonal map of vectors, and its inverse."""
    draw = np.random.default_rng(_SEED)
    blocks = draw.normal(size=(dimension // _BLOCK, _BLOCK, _BLOCK))
    blocks = np.stack([np.linalg.qr(block)[0] for block in blocks])
    first, last = draw.permutation(dimension), draw.permutation(dimension)

    def turn(x: jax.Array) -> jax.Array:
        parts = x[first].reshape(-1, _BLOCK)
        return jnp.einsum("bij,bj->bi", blocks.astype(x.dtype), parts).ravel()[last]

    def back(x: jax.Array) -> jax.Array:
        parts = x[np.argsort(last)].reshape(-1, _BLOCK)
        turned = jnp.einsum("bji,bj->bi", blocks.astype(x.dtype), parts).ravel()
        return turned[np.argsort(first)]

    return turn, back


def _cutest(least: int, most: int) -> list[Case]:
    """The unconstrained problems of sif2jax in so many dimensions."""
    if importlib.util.find_spec("sif2jax") is None:
        return []
    import sif2jax

    found = []
    for problem in sif2jax.unconstrained_minimisation_problems:
        name = type(problem).__name__
        if least <= problem.y0.size <= most and name not in _LEFT_OUT:
            make = functools.partial(_of_sif2jax, problem)
            found.append(Case("CUTEst", name, problem.y0.size, make))
    return found


def _of_sif2jax(problem: Any) -> Problem:
    """Returns a problem whose least value is found by exact gradients."""

    def fun(theta: jax.Array) -> jax.Array:
        return problem.objective(theta, problem.args)

    exact = jax.jit(jax.value_and_grad(fun))
    start = np.asarray(problem.y0, np.float64)
    options = {"maxiter": 3000, "maxfun": 6000, "ftol": 1e-15, "gtol": 1e-12}
    found = minimize(
        lambda x: [np.asarray(one, np.float64) for one in exact(x)],
        start,
        jac=True,
        method="L-BFGS-B",
        options=options,
    )
    return _of_jax(fun, start, float(found.fun), found.x)


def _of_jax(
    fun: Callable[[jax.Array], jax.Array], start: Any, least: float, at: np.ndarray
) -> Problem:
    start = np.asarray(start, np.float64)
    together = jax.jit(jax.vmap(fun))

    def evaluate(points: np.ndarray) -> np.ndarray:
        """Programs are compiled for two sizes, and the last one is filled up."""
        values = [np.zeros(0)]
        while len(points):
            size = _BATCHES[0] if len(points) > 4 * _BATCHES[1] else _BATCHES[1]
            part, points = points[:size], points[size:]
            filled = np.resize(part, (size, part.shape[1]))
            values.append(np.asarray(together(filled), np.float64)[: len(part)])
        return np.concatenate(values)

    return known(start, evaluate, least, at, fun)


def _bbob(dimension: int, numbers: Iterable[int]) -> list[Case]:
    """Functions of bbob-largescale; 21 to 24 are slow."""
    if importlib.util.find_spec("cocoex") is None:
        return []
    # Now, for a record tells the versions of what is imported, whichever rows it takes.
    importlib.import_module("cocoex")
    return [
        Case(
            "BBOB",
            f"f{number}",
            dimension,
            functools.partial(_of_coco, number, dimension),
        )
        for number in numbers
    ]


def _of_coco(number: int, dimension: int) -> Problem:
    import cocoex

    wanted = f"function_indices:{number} dimensions:{dimension} instance_indices:1"
    suite = cocoex.Suite("bbob-largescale", "", wanted)
    problem = suite.get_problem(0)
    # The best point is told in a file.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        problem._best_parameter("print")
        (file,) = Path(folder).iterdir()
        best = np.loadtxt(file)

    def evaluate(points: np.ndarray, suite: Any = suite) -> np.ndarray:
        del suite  # The problem lives as long as its suite.
        return np.array([problem(np.asarray(x, np.float64)) for x in points])

    start = np.zeros(dimension)
    return known(start, evaluate, problem(best), best)
