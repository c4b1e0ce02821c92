"""Contracts of custom distributions, estimators and wrappers, in every kind of run."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from radazo_jax.estimators import Draw, Estimate, Values
from tests.helpers import short_runs
from tests.helpers.relatives import MAKERS, PARAMS, flat, make, quadratic, rows, traced
from tests.helpers.tables import DISTRIBUTIONS, FAST, every, jit, mesh_of

# --- A distribution, an estimator and a wrapper, by public names alone ------------


@dataclasses.dataclass(frozen=True)
class Uniform(zo.Distribution):
    """Directions of norm 1, with independent uniform elements before the division."""

    normalized = True
    scale: float = 1.0

    def factor(self, dimension):
        return float(dimension)

    def draw(self, key, number, at):
        return self.scale * (2 * zo.random.uniform(key, at) - 1)


@dataclasses.dataclass(frozen=True)
class Annealed(zo.GradientEstimator):
    """Forward differences whose distance shrinks from step to step."""

    distribution: zo.Distribution
    num_directions: int = 3
    smoothing: float = 0.05

    def init(self, params):
        return jnp.int32(0)

    def points(self, draw, params, step):
        scales = self.smoothing / jnp.sqrt(step.astype(jnp.float32) + 1)
        points = zo.estimators.sample_points(
            self.distribution, draw, self.num_directions, scales[None], params,
            includes_params=True,
        )  # fmt: skip
        return points, step + 1

    def reduce(self, points, values, params, step):
        slopes = (values.along - values.base)[:, 0] / points.scales[:, 0]
        usable = jnp.isfinite(slopes)
        slopes = jnp.where(usable, slopes, 0)
        weight = points.factor / self.num_directions
        gradient = points.combine(weight * slopes)
        count = jnp.sum(usable, dtype=jnp.int32)
        slope = weight * jnp.sum(slopes**2)
        return Estimate(values.base, slope, count, gradient), step


@dataclasses.dataclass(frozen=True)
class Antithetic(zo.GradientEstimator):
    """Evaluates the mirror image of each point too, and drops the even part."""

    inner: zo.GradientEstimator

    def init(self, params):
        return self.inner.init(params)

    def points(self, draw, params, state):
        points, state = self.inner.points(draw, params, state)
        scales = jnp.concatenate([points.scales, -points.scales], 1)
        return dataclasses.replace(points, scales=scales), state

    def reduce(self, points, values, params, state):
        above, below = jnp.split(values.along, 2, axis=1)
        half = points.scales[:, : above.shape[1]]
        odd = values.base + (above - below) / 2
        estimate, state = self.inner.reduce(
            dataclasses.replace(points, scales=half),
            Values(values.base, odd),
            params,
            state,
        )
        mirrored = jnp.sum(jnp.isfinite(below), dtype=jnp.int32)
        count = estimate.num_values
        count = jnp.where(count > 0, count + mirrored, 0)
        return estimate._replace(num_values=count), state


CUSTOM = {
    "uniform": zo.forward_difference(Uniform(), 3),
    "annealed": Annealed(Uniform()),
    "antithetic": Antithetic(zo.forward_difference(Uniform(), 2)),
    "antithetic(orthonormal)": Antithetic(zo.forward_difference(zo.orthonormal(), 2)),
}
BY_NAME = CUSTOM | {name: make(name) for name in MAKERS}


# --- Every estimator in every kind of run -----------------------------------------

STEPS, OPTIMIZER, KEY = 5, optax.sgd(1e-3), 3


@functools.cache
def compiled(name):
    """The state of the run in one compiled loop: the reference of all others."""
    return run(BY_NAME[name]).state


def run(estimator, **options):
    method = OPTIMIZER, estimator
    return short_runs.traced(traced, PARAMS, STEPS, method, key=KEY, **options)


def journaled(estimator, path):
    return run(estimator, journal=path).state


def replayed(estimator, path):
    state = journaled(estimator, path)
    again = zo.replay(path, PARAMS, OPTIMIZER, estimator)
    chex.assert_trees_all_equal(again, state)
    return again


def told(estimator, path):
    del path  # Values come from NumPy, in float64.
    run = zo.ask_tell(PARAMS, OPTIMIZER, estimator, key=KEY)
    for _ in range(STEPS):
        run.tell(quadratic(rows(run.ask())))
    return run.state


def black_box(estimator, path):
    def fun(params):
        return float(quadratic(flat(params)))

    method = OPTIMIZER, estimator
    return short_runs.run(fun, PARAMS, STEPS, method, key=KEY, journal=path).state


def stepped(estimator, path):
    del path
    chex.clear_trace_counter()  # It counts by name, in all tests of a process.
    init, step = zo.solver(traced, OPTIMIZER, estimator)
    state, step = init(PARAMS, KEY), jax.jit(chex.assert_max_traces(step, 1))
    for _ in range(STEPS):
        state, _ = step(state)
    return state


def one_by_one(estimator, path):
    del path
    return run(estimator, evaluator=zo.vectorized(batch_size=1)).state


def sharded(estimator, path):
    del path
    with jax.set_mesh(mesh_of(8)):
        return run(estimator, evaluator=zo.sharded("k")).state


DRIVERS = (journaled, replayed, told, black_box, stepped, one_by_one, sharded)
IN_FAST_RUN = [("annealed", driver) for driver in (journaled, told, sharded)]


# Each estimator in one kind of run, and each kind of run with several estimators.
CASES = list(zip(BY_NAME, itertools.cycle(DRIVERS), strict=False))


@pytest.mark.parametrize(
    ("name", "driver"), every(dict.fromkeys([*IN_FAST_RUN, *CASES]), *IN_FAST_RUN)
)
def test_takes_the_same_steps_in_every_kind_of_run(name, driver, tmp_path):
    expected, got = compiled(name), driver(BY_NAME[name], tmp_path / "run.jsonl")
    assert not np.array_equal(flat(expected.params), flat(PARAMS))
    # Differences of float32 values are divided by the smoothing.
    chex.assert_trees_all_close(got.params, expected.params, rtol=2e-3, atol=2e-4)
    assert int(got.step) == STEPS and int(got.failures.skipped) == 0
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)


# --- Distributions do not change, and axes belong to the layout -------------------


@pytest.mark.parametrize("name", [*FAST, "uniform"])
def test_the_distribution_of_sampled_directions_is_the_given_one(name):
    distribution = (DISTRIBUTIONS | {"uniform": Uniform()})[name]
    params = {"w": jnp.ones((4, 6)), "b": jnp.ones(4)}

    def fun(params):
        return jnp.sum(params["w"] @ jnp.ones(6) + params["b"])

    estimator = zo.forward_difference(distribution, 3)
    draw = Draw.once(jax.random.key(0))._replace(fun=fun)
    points, _ = estimator.points(draw, params, ())
    for found in (points, zo.vectorized().cache(points)):
        assert found.directions.distribution == distribution
        assert hash(found.directions.distribution) == hash(distribution)
        assert found.layout == points.layout


def test_axes_of_matrices_are_in_the_layout():
    """The use of a leaf decides; perturbation and gradient agree on it."""
    params = jnp.ones((3, 4, 5))

    def stacked(w):
        return jnp.sum(jnp.einsum("ia,abc->bc", jnp.ones((2, 3)), w))

    estimator = zo.forward_difference(zo.low_rank(), 2, 1.0)

    @functools.partial(jit, static_argnums=0)
    def sampled(fun):
        draw = Draw.once(jax.random.key(0))._replace(fun=fun)
        points, _ = estimator.points(draw, params, ())
        gradient = points.combine(jnp.array([1.0, -2.0])).materialize(params)
        return points, zo.estimators.candidates(points, params), gradient

    (used, *of_used), (unused, *of_unused) = map(sampled, (stacked, None))
    assert [leaf.axes for leaf in used.layout.leaves] == [((0,), (1, 2))]
    assert [leaf.axes for leaf in unused.layout.leaves] == [((1,), (2,))]
    assert used.directions.distribution == unused.directions.distribution
    # A leaf is one 3 × 20 matrix if `stacked` uses it, else three 4 × 5 matrices.
    for (at, gradient), shape in ((of_used, (2, 3, 20)), (of_unused, (2, 3, 4, 5))):
        at = np.asarray(at, np.float64)
        u = at[1:] - at[0]
        singular = np.linalg.svd(u.reshape(shape), compute_uv=False)
        assert (singular[..., 1] < 1e-5 * singular[..., 0]).all()
        np.testing.assert_allclose(gradient, u[0] - 2 * u[1], atol=1e-5)


# --- Normalized distributions -----------------------------------------------------


class Unnormalized(Uniform):
    normalized = False


def materialized(distribution, key, params):
    return distribution.materialize(distribution.sample(key, params), params)


@pytest.mark.parametrize("scale", [1.0, 0.3, 7.9])
def test_a_normalized_direction_has_norm_one(scale):
    params = {"a": jnp.zeros((30, 50)), "b": jnp.zeros(77), "c": jnp.zeros(())}
    u, z = jit(
        lambda key: [
            materialized(distribution, key, params)
            for distribution in (Uniform(scale), Unnormalized(scale))
        ]
    )(jax.random.key(1))
    np.testing.assert_allclose(np.linalg.norm(flat(u)), 1, rtol=1e-6)
    np.testing.assert_allclose(flat(u), flat(z) / np.linalg.norm(flat(z)), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("evaluator", [zo.vectorized(), zo.vectorized(1)])
def test_elements_too_large_for_the_exact_norm_skip_the_step(evaluator):
    """From 8 on, an element does not fit: the direction is NaN, and so are values."""
    u = materialized(Uniform(100.0), jax.random.key(0), PARAMS)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(u))
    with pytest.raises(zo.RunError, match="no finite value to use in any") as caught:
        run(zo.forward_difference(Uniform(100.0), 3), evaluator=evaluator)
    state = caught.value.state
    chex.assert_trees_all_equal(state.params, PARAMS)
    assert int(state.failures.skipped) == STEPS
    assert int(state.failures.evaluations) == 3 * STEPS
