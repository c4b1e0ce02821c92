"""Methods of this package, without tuning and with a learning rate."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import radazo_jax as zo
from board.oracle import Oracle
from board.problems import Problem
from common.estimators import evaluations
from radazo_jax.estimators import Draw

DIRECTIONS = 10  # K, the default of the estimators.
_CHUNK = 64  # Steps between two looks at what was reached.

FORWARD = zo.forward_difference(zo.sphere(), DIRECTIONS)

# The learning rate of the paper, and a grid, in units that suit a problem.
PAPER = 1e-3
RATES = {
    "ZO-AdaMM": (zo.zo_adamm, (0.03, 0.1, 0.3, 1.0, 3.0)),
    "R-AdaZO": (zo.radazo, (0.003, 0.01, 0.03, 0.1, 0.3)),
    "ZO-SGD": (zo.zo_sgd, (1 / 16, 1 / 4, 1.0, 4.0, 16.0)),
}


def evaluations_of_default(dimension: int) -> int:
    """Evaluations per step of the default method."""
    params = np.zeros(dimension)
    return evaluations(zo.default_method(params)[1], params)


class Untuned(NamedTuple):
    """A method without a learning rate, compiled if JAX can trace the function.

    Attributes:
      each: The number of evaluations per step, a function of d.
      optimizer: An Optax transformation; by default, the default method's.
      estimator: An estimator, likewise.
      search: A search, likewise.
    """

    each: Callable[[int], int]
    optimizer: optax.GradientTransformation | None = None
    estimator: zo.GradientEstimator | None = None
    search: zo.search.Search | None = None

    def __call__(self, problem: Problem, oracle: Oracle, seed: int) -> None:
        each = self.each(problem.dimension)

        def after(report: zo.runs.Report) -> bool:
            oracle.see(report.values, each)
            return oracle.finished

        # What stopped it is of no interest, and what it reached is known. Outside of
        # JAX a point that a step has twice is evaluated once.
        with contextlib.suppress(zo.RunError):
            if problem.traced is not None and not problem.noise:
                zo.minimize(
                    problem.traced,
                    jnp.asarray(problem.start),
                    self.optimizer,
                    self.estimator,
                    self.search,
                    num_steps=-(-oracle.budget // each),
                    key=seed,
                    chunk_size=_CHUNK,
                    progress=False,
                    callback=after,
                )
            else:
                zo.minimize_black_box(
                    oracle.one,
                    problem.start,
                    self.optimizer,
                    self.estimator,
                    self.search,
                    num_steps=oracle.budget,
                    key=seed,
                    progress=False,
                    callback=lambda report: oracle.finished,
                )


# `minimize` with neither an optimizer nor an estimator.
DEFAULT = Untuned(evaluations_of_default)
# With an optimizer that is named, the default estimator is not accelerated, and a step
# has no lookahead point.
PLAIN = Untuned(
    lambda d: evaluations_of_default(d) - 1,
    optax.sgd(1.0),
    search=zo.search.parabolic(),
)
RADAZO = Untuned(
    lambda d: DIRECTIONS + 2,
    zo.radazo(1.0),
    zo.forward_difference(zo.orthonormal(), DIRECTIONS),
    zo.search.parabolic(extra_evaluations=1),
)


def sweep(
    problem: Problem,
    make_oracle: Callable[[], Oracle],
    seed: int,
    estimator: zo.GradientEstimator = FORWARD,
) -> dict[str, list[Oracle]]:
    """Three methods at six learning rates, the paper's first, side by side.

    Returns:
      For each method an oracle a rate.
    """
    rates = np.array([scaled(name, problem) for name in RATES])
    oracles = [[make_oracle() for _ in row] for row in rates]
    start, ask, tell = _programs(estimator)
    params, states, memories = start(jnp.asarray(problem.start), jnp.asarray(rates))
    flat = [oracle for row in oracles for oracle in row]
    run_key = key = jax.random.key(seed)
    for step in itertools.count():
        if all(oracle.finished for oracle in flat):
            break
        key, now = jax.random.split(key)
        draw = Draw(now, run_key, jnp.int32(step))
        asked = np.asarray(ask(draw, params, memories))
        each = asked.shape[-2]
        values = np.full(asked.shape[:-1], np.nan)
        going = np.array([not one.finished for one in flat]).reshape(rates.shape)
        # What is done for is not evaluated, so that counts are exact.
        found = problem.evaluate(asked[going].reshape(-1, problem.dimension))
        values[going] = found.reshape(-1, each)
        for oracle, row in zip(flat, values.reshape(-1, each), strict=True):
            if not oracle.finished:
                row[:] = oracle.told(row)
        params, states, memories = tell(
            draw, params, states, memories, jnp.asarray(rates), values
        )
    return dict(zip(RATES, oracles, strict=True))


def scaled(name: str, problem: Problem) -> tuple[float, ...]:
    """The paper's rate, and the grid in the units of a problem.

    The unit of the adaptive methods is the distance to the minimum. The unit of ZO-SGD
    is the inverse curvature along the gradient. A user knows neither.
    """
    d, grid = problem.dimension, np.array(RATES[name][1])
    if name == "ZO-SGD":
        unit = min(1.0, DIRECTIONS / d) * 2 * problem.gap / (problem.slope or 1)
    else:
        unit = problem.distance * np.sqrt(min(1.0, DIRECTIONS / d))
    return (PAPER, *(unit * grid))


@functools.lru_cache(maxsize=2)
def _programs(estimator: zo.GradientEstimator) -> tuple[Callable[..., Any], ...]:
    """Compiled once a dimension, whatever the problem."""
    makers = [make for make, _ in RATES.values()]

    @jax.jit
    def start(params: jax.Array, rates: jax.Array) -> Any:
        states = [
            jax.vmap(lambda rate, make=make: make(rate).init(params))(row)
            for make, row in zip(makers, rates, strict=True)
        ]
        beside = params, estimator.init(params)
        params, memories = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (*rates.shape, *leaf.shape)), beside
        )
        return params, states, memories

    def candidates(draw: Draw, params: jax.Array, memory: Any) -> jax.Array:
        points, _ = estimator.points(draw, params, memory)
        return zo.estimators.candidates(points, params)

    def estimate(draw: Draw, params: jax.Array, memory: Any, values: jax.Array):
        points, memory = estimator.points(draw, params, memory)
        values = points.split(values)
        found, memory = estimator.reduce(points, values, params, memory)
        return found.gradient.materialize(params), memory

    def step(gradient: jax.Array, params: Any, state: Any, rate: Any, make):
        updates, state = make(rate).update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def tell(draw, params, states, memories, rates, values):
        gradients, memories = of_each(estimate)(draw, params, memories, values)
        done = [
            jax.vmap(functools.partial(step, make=make))(
                gradients[i], params[i], states[i], rates[i]
            )
            for i, make in enumerate(makers)
        ]
        stepped = jnp.stack([p for p, _ in done])
        return stepped, [state for _, state in done], memories

    def of_each(fun):
        """For each method and rate, along the same directions."""

        def of_all(draw: Draw, *trees: Any) -> Any:
            return jax.vmap(jax.vmap(functools.partial(fun, draw)))(*trees)

        return of_all

    return start, jax.jit(of_each(candidates)), tell
