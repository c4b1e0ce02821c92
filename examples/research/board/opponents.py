"""Other tools, with their own defaults, and at the best of a few scales.

Scales are in units of the distance to the minimum, which one does not know.
"""

import contextlib
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import minimize

from board.oracle import Finished, Oracle
from board.problems import Problem

_STEP = 1e-8  # SciPy's own, `eps` of L-BFGS-B.


def lbfgs(problem: Problem, oracle: Oracle, seed: int) -> None:
    """SciPy's L-BFGS-B on forward differences along the coordinates, as it does them.

    All points are in one batch. SciPy evaluates the same points one after another.
    """
    del seed
    d = problem.dimension

    def value_and_gradient(theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, slopes = oracle.one(theta), np.empty(d)
        for first in range(0, d, 256):
            if oracle.finished:
                raise Finished
            rows = np.arange(first, min(first + 256, d))
            points = np.repeat(theta[None], len(rows), axis=0)
            points[np.arange(len(rows)), rows] += _STEP
            slopes[rows] = (oracle(points) - value) / _STEP
        return value, slopes

    options = {"maxfun": 10**9, "maxiter": 10**9}
    with contextlib.suppress(Finished):
        minimize(
            value_and_gradient,
            problem.start,
            jac=True,
            method="L-BFGS-B",
            options=options,
        )


def cma(problem: Problem, oracle: Oracle, seed: int, scale: float, kind: str) -> None:
    """pycma: "full", "separable" or "vkd"."""
    import cma
    from cma.restricted_gaussian_sampler import GaussVkDSampler

    options: dict[str, Any] = {"seed": seed + 1, "verbose": -9, "maxfevals": np.inf}
    options |= {"CMA_diagonal": kind == "separable"}
    if kind == "vkd":
        options = GaussVkDSampler.extend_cma_options(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sigma = scale * problem.distance
        search = cma.CMAEvolutionStrategy(problem.start, sigma, options)
        while not oracle.finished and not search.stop():
            points = search.ask()
            search.tell(points, oracle(np.array(points)))


def nevergrad(problem: Problem, oracle: Oracle, seed: int) -> None:
    """NGOpt, which knows the budget and chooses the method."""
    import nevergrad as ng

    space = ng.p.Array(init=problem.start)
    space.random_state = np.random.RandomState(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search = ng.optimizers.NGOpt(space, oracle.budget)
        while not oracle.finished:
            point = search.ask()
            search.tell(point, oracle.one(point.value))


def evosax(
    problem: Problem, oracle: Oracle, seed: int, name: str, scale: float | None = None
) -> None:
    """An algorithm of evosax, at a scale of the distance to the minimum or as it is.

    Args:
      problem: The problem.
      oracle: Its values.
      seed: The seed.
      name: "SNES", or "Open_ES".
      scale: The standard deviation of SNES, the learning rate of Open_ES; None for
        the defaults.
    """
    length = 1.0 if scale is None else problem.distance
    search = _evosax(name, problem.dimension, name == "Open_ES" and scale is not None)
    params = search.default_params
    if name == "SNES" and scale is not None:
        params = params.replace(std_init=scale)
    key, first = jax.random.split(jax.random.key(seed))
    state = search.init(first, jnp.zeros(problem.dimension), params)
    if name == "Open_ES" and scale is not None:
        rate = scale * min(1.0, np.sqrt(10 / problem.dimension))
        held = optax.tree_utils.tree_set(state.opt_state, learning_rate=rate)
        state = state.replace(opt_state=held)
    while not oracle.finished:
        key, ask, tell = jax.random.split(key, 3)
        points, state = search.ask(ask, state, params)
        values = oracle(problem.start + length * np.asarray(points))
        values = np.where(np.isfinite(values), values, 1e300)
        state, _ = search.tell(tell, points, jnp.asarray(values), state, params)


@functools.cache
def _evosax(name: str, dimension: int, tuned: bool) -> Any:
    """Returns one object for all problems of a size, with its compiled programs."""
    import evosax.algorithms as algorithms

    size = 2 * (2 + int(1.5 * np.log(dimension)))  # 4 + 3 ln d, and even.
    options = {}
    if tuned:
        adam = optax.inject_hyperparams(optax.adam)(learning_rate=1.0)
        options = {"optimizer": adam, "std_schedule": optax.constant_schedule(0.1)}
    make = getattr(algorithms, name)
    return make(population_size=size, solution=jnp.zeros(dimension), **options)
