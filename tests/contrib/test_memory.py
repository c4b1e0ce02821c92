"""Relatives that remember: against their equations, in float64 NumPy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from radazo_jax._src.base.trees import wide
from tests.helpers.compare import Hashed
from tests.helpers.relatives import (
    DIMENSION,
    PARAMS,
    Steps,
    derivative,
    flat,
    moved,
    rows,
    traced,
)
from tests.helpers.tables import jit, slow

# --- Priors ------------------------------------------------------------------------


def test_the_length_of_a_prior_does_not_matter():
    """Even if its square is 0 or infinite in float32."""

    @jit
    @jax.vmap
    def gradient(scale):
        def prior(x):
            return jax.tree.map(lambda x: scale * (x - 0.5), x)

        estimator = zo.contrib.prior_guided(zo.sphere(), 1, 0.1, prior=prior)
        (_, found), _ = zo.estimators.estimate(
            estimator, traced, 0, PARAMS, estimator.init(PARAMS)
        )
        return found

    short, expected, long = rows(gradient(jnp.array([1e-25, 1.0, 1e20])))
    np.testing.assert_allclose(short, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(long, expected, rtol=1e-4, atol=1e-5)


def test_a_prior_of_several_dtypes():
    """The gradient itself, in bfloat16 and float32, is the prior."""
    params = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.arange(3.0)}
    estimator = zo.contrib.prior_guided(
        num_directions=1, smoothing=0.1, prior=lambda p: p
    )

    def half_square(params):
        return optax.tree.norm(jax.tree.map(wide, params), squared=True) / 2

    estimate = jit(functools.partial(zo.estimators.estimate, estimator, half_square, 0))
    (_, gradient), _ = estimate(params, estimator.init(params))
    np.testing.assert_allclose(gradient["a"].astype(np.float32), 1, atol=0.1)
    np.testing.assert_allclose(gradient["b"], params["b"], atol=0.1)


@pytest.mark.slow
def test_history_prior_guided():
    """The projection on the span of the directions and the average of the past."""
    mu, size, decay = 1e-2, 2, 0.5
    steps = Steps(zo.contrib.prior_guided(zo.sphere(), size, mu, decay=decay))
    prior = np.zeros(DIMENSION)
    for i in range(3):
        params = moved(PARAMS, 0.1 * i)
        estimate, at, _, _ = steps(i, params)
        away = (at[1:] - at[0]) / mu
        span = away[: size + (i > 0)]
        expected = np.linalg.pinv(span) @ (span @ derivative(flat(params)))
        np.testing.assert_allclose(
            flat(estimate.gradient), expected, rtol=0.02, atol=0.06
        )
        if i:
            unit = prior / np.linalg.norm(prior)
            np.testing.assert_allclose(away[-1], unit, atol=1e-3)
        prior = decay * prior + (1 - decay) * flat(estimate.gradient)
    # A step without a value forgets nothing.
    before = steps.state
    steps(3, values=lambda at: np.full(len(at), np.nan))
    chex.assert_trees_all_equal(steps.state, before)


# --- Past queries ------------------------------------------------------------------


@pytest.mark.parametrize(
    "distribution", [Hashed(), slow(zo.sphere()), slow(zo.orthonormal())]
)
def test_query_reuse(distribution):
    mu, size, memory = 0.5, 2, 3
    steps = Steps(zo.contrib.query_reuse(distribution, size, mu, memory))
    past_u, past_y = np.zeros((0, DIMENSION)), np.zeros(0)
    for i in range(5):
        estimate, _, values, us = steps(i, moved(PARAMS, 0.1 * i), level=3.0)
        past_u = np.concatenate([past_u, us])[-size * memory :]
        past_y = np.append(past_y, values)[-size * memory :]
        residuals = (past_y - past_y.mean()) / mu
        factor = distribution.factor(DIMENSION)
        expected = factor / (len(past_y) - 1) * residuals @ past_u
        np.testing.assert_allclose(
            flat(estimate.gradient), expected, rtol=1e-3, atol=1e-3
        )
    # A failed query is not stored, and nothing changes if all fail.
    before = steps.state
    steps(5, values=lambda at: np.full(len(at), np.nan))
    chex.assert_trees_all_equal(steps.state, before)
    steps(6, values=lambda at: np.array([np.nan, 1.0]))
    assert np.isnan(np.asarray(steps.state.values)).sum() == 1


@pytest.mark.parametrize(
    "maker", [zo.contrib.query_reuse, zo.contrib.linear_interpolation]
)
def test_a_query_takes_a_few_bytes(maker):
    """The size does not depend on the number of parameters."""
    state = jax.eval_shape(
        maker(num_directions=5, memory_size=4).init, jnp.zeros(10**6)
    )
    steps = 4 if maker is zo.contrib.query_reuse else 3
    buffer = state.buffer
    assert (
        len(buffer.key_data) == buffer.numbers.size == buffer.scales.size == 5 * steps
    )
    leaves = jax.tree.leaves((buffer.numbers, buffer.scales, state.values))
    assert sum(4 * leaf.size for leaf in leaves) <= 12 * 6 * steps


@pytest.mark.slow
def test_linear_interpolation():
    """The shortest vector that interpolates what lies within the radius."""
    mu, size, radius = 0.3, 1, 0.62
    steps = Steps(zo.contrib.linear_interpolation(zo.sphere(), size, mu, 3, radius))
    past_x, past_y, reused = [], [], []
    for i in range(4):
        params = moved(PARAMS, 0.15 * i)
        estimate, at, values, _ = steps(i, params)
        x = np.concatenate([at[1:], *past_x[-2:]])
        y = np.concatenate([values[1:], *past_y[-2:]])
        past_x, past_y = [*past_x, at], [*past_y, values]
        away, changes = x - at[0], y - values[0]
        norms = np.linalg.norm(away, axis=1)
        near = (norms <= radius) | (np.arange(len(x)) < size)
        away, changes = away[near], changes[near]
        norms = norms[near]
        unit = away / norms[:, None]
        among = unit @ unit.T + 1e-4 * np.eye(len(unit))
        expected = unit.T @ np.linalg.solve(among, changes / norms)
        np.testing.assert_allclose(
            flat(estimate.gradient), expected, rtol=0.01, atol=0.02
        )
        reused.append(near.sum() - size)
        assert len(x) - size - reused[-1] > 0 or i < 2
    assert max(reused) > 0


@pytest.mark.parametrize("step", [1e-7, slow(5e-3)])
def test_queries_that_lie_at_the_parameters_are_left_out(step):
    """After steps by rounding, or by μ, with which past points come to lie at θ."""
    estimator = zo.contrib.linear_interpolation(smoothing=5e-3)

    def next_step(carry, key):
        x, state = carry
        (_, gradient), state = zo.estimators.estimate(
            estimator, lambda x: 3 * x[0], key, x, state
        )
        return (x - step * jnp.sign(gradient), state), gradient

    @jit
    def run(x):
        keys = jax.random.split(jax.random.key(1), 200)
        return jax.lax.scan(next_step, (x, estimator.init(x)), keys)[1]

    np.testing.assert_allclose(run(jnp.ones(1)), 3, rtol=1e-2)


# --- Surrogates --------------------------------------------------------------------


def posterior(kernel, xs, ys, x, jitter):
    """The posterior mean at x, of values less their mean, in float64."""
    among = kernel(xs[:, None], xs[None]) + jitter * np.eye(len(xs))
    return kernel(x[None], xs) @ np.linalg.solve(among, ys - ys.mean())


def matern(scale, x, y):
    r = np.sqrt(5) * np.linalg.norm(x - y, axis=-1) / scale
    return (1 + r + r**2 / 3) * np.exp(-r)


def numerical_gradient(f, x, h=1e-5):
    steps = h * np.eye(len(x))
    return np.array([(f(x + e) - f(x - e)) / (2 * h) for e in steps])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "lengthscale"), [(1, 0.9), (2, None)])
def test_gaussian_process(size, lengthscale):
    """The derivative of the posterior mean of the latest queries, by differences."""
    memory, jitter, mu = 7, 1e-2, 0.4
    steps = Steps(
        zo.contrib.gaussian_process(zo.sphere(), size, mu, memory, lengthscale, jitter)
    )
    xs, ys = np.zeros((0, DIMENSION)), np.zeros(0)
    for i in range(4):
        params = moved(PARAMS, 0.1 * i)
        estimate, at, values, _ = steps(i, params)
        xs, ys = np.concatenate([xs, at])[-memory:], np.append(ys, values)[-memory:]
        between = np.linalg.norm(xs[:, None] - xs[None], axis=-1)
        mean = between.sum() / max(len(xs) * (len(xs) - 1), 1)
        scale = lengthscale or 2 * mean or 1.0
        mean_at = functools.partial(
            posterior, functools.partial(matern, scale), xs, ys, jitter=jitter
        )
        expected = numerical_gradient(mean_at, flat(params))
        np.testing.assert_allclose(
            flat(estimate.gradient), expected, rtol=2e-3, atol=2e-3
        )
        np.testing.assert_allclose(estimate.value, values[0], rtol=1e-6)
        assert int(estimate.num_values) == size + 1
    before = steps.state
    steps(4, values=lambda at: np.full(len(at), np.nan))
    chex.assert_trees_all_equal(steps.state, before)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0.0, 1e3])
def test_a_surrogate_of_queries_that_are_the_same_is_finite(level):
    """The matrix of the kernel is then singular up to rounding, or indefinite."""
    steps = Steps(
        zo.contrib.gaussian_process(
            zo.sphere(), 4, 1e-4, 40, lengthscale=10.0, jitter=1e-9
        )
    )
    for i in range(8):
        # Far points cost the distances of the near ones their digits.
        params = moved(PARAMS, level if i % 2 else 0.0)
        assert np.isfinite(flat(steps(i, params)[0].gradient)).all()


def test_a_surrogate_has_limits():
    estimator = zo.contrib.gaussian_process()
    message = r"params must have at most 10000 coordinates for a surrogate; got 10001"
    with pytest.raises(ValueError, match=message):
        estimator.init(jnp.zeros(10_001))
    with pytest.raises(ValueError, match=message):
        zo.train(jnp.sum, jnp.zeros(10_001), zo.radazo(0.1), estimator, num_steps=1)
