"""Forward differences whose distance follows their scale."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.tables import jit

DISTRIBUTION, SMOOTHING, SIZE = Hashed(), 1e-2, 4


def after(steps, base=0.0):
    """The smoothing after each step of these differences, [steps, K]."""
    estimator = zo.adaptive_difference(DISTRIBUTION, len(steps[0]), SMOOTHING)
    params = jnp.zeros(3)

    @jit
    def run(steps):
        def step(state, differences):
            draw = zo.estimators.Draw.once(jax.random.key(0))
            points, state = estimator.points(draw, params, state)
            values = base + jnp.concatenate([jnp.zeros(1), differences])
            values = points.split(values)
            estimate, state = estimator.reduce(points, values, params, state)
            return state, (state.smoothing, points.scales[0, 0], estimate.slope)

        return jax.lax.scan(step, estimator.init(params), steps)[1]

    return [np.asarray(x, np.float64) for x in run(jnp.asarray(steps, jnp.float32))]


def rule(steps):
    """The same in float64."""
    mu, average, square, found = SMOOTHING, 0.0, 0.0, []
    # The average of independent shares has the weights 0.1 · 0.9ᵗ.
    error = np.sqrt(np.sum((0.1 * 0.9 ** np.arange(1000)) ** 2))
    for differences in steps:
        share = differences.mean() / np.sqrt((differences**2).mean())
        average = 0.9 * average + 0.1 * share
        square = 0.9 * square + 0.1 * share**2
        variance, slopes = square - average**2, 1 / len(differences)
        if abs(average) > max(0.2, 3 * error * np.sqrt(square)):
            mu, average, square = mu / 2, average / 2, square / 4
        elif variance > slopes + max(0.1, slopes):
            mu = min(1.2 * mu, 200 * SMOOTHING)
        else:
            mu = min(1.05 * mu, max(mu, SMOOTHING))
        found.append(mu)
    return np.array(found)


def test_follows_the_share_of_curvature():
    """The differences have one sign, or both."""
    draw = np.random.default_rng(0)
    steps = draw.normal(size=(60, SIZE)) + np.repeat([1.0, 0.0, -2.0], 20)[:, None]
    smoothing, used, _ = after(steps)
    expected = rule(steps)
    np.testing.assert_allclose(smoothing, expected, rtol=1e-5)
    np.testing.assert_allclose(used, [SMOOTHING, *expected[:-1]], rtol=1e-5)
    assert min(expected[20:40]) > min(expected) and min(expected) < SMOOTHING / 8


def test_follows_noise_of_the_value_at_the_parameters():
    """Slopes, values that are all noise, slopes again, and curvature."""
    draw = np.random.default_rng(0)
    steps = draw.normal(size=(160, 16))
    steps[60:110] += draw.normal(size=(50, 1))
    steps[140:] += 3.0
    smoothing, _, _ = after(steps)
    np.testing.assert_allclose(smoothing, rule(steps), rtol=1e-5)
    np.testing.assert_allclose(smoothing[:60], SMOOTHING)
    np.testing.assert_allclose(smoothing[109:140], 200 * SMOOTHING)
    assert smoothing[-1] < 10 * SMOOTHING


@pytest.mark.parametrize("count", [1, 2, 3, 4, 10, 32])
def test_slopes_are_seldom_taken_for_noise(count):
    steps = np.random.default_rng(2).normal(size=(1000, count))
    assert after(steps)[0].max() < 3 * SMOOTHING


@pytest.mark.slow
def test_a_run_goes_on_under_noise():
    """The standard deviation of the noise is 1 % of the loss at the start."""

    def noisy(x, key):
        # By the bits of x, so that each point has a noise of its own.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        word = jnp.bitwise_xor.reduce(bits * np.uint32(2654435761))
        drawn = jax.random.normal(jax.random.fold_in(key, word))
        return jnp.mean((x - 1) ** 2) + 1e-2 * drawn

    def run(estimator):
        result = zo.minimize(
            noisy,
            np.zeros(50, np.float32),
            optax.sgd(1.0),
            estimator(zo.orthonormal()),
            zo.search.parabolic(),
            num_steps=1500,
            key=0,
            sample=lambda key: key,
            progress=False,
        )
        return float(np.mean((result.params - 1) ** 2))

    assert run(zo.adaptive_difference) < 0.3 * run(zo.forward_difference)


def test_noise_and_rounding_do_not_shorten_it():
    draw = np.random.default_rng(1)
    noise = draw.normal(size=(400, SIZE)) + draw.normal(size=(400, 1))
    assert np.median(after(noise)[0]) > SMOOTHING / 2
    # Differences of one sign, of ten units of rounding of the values.
    rounding = np.full((50, SIZE), 10 * 2.0**-23)
    np.testing.assert_allclose(after(rounding, base=1.0)[0], SMOOTHING)


def test_a_point_that_failed_says_nothing():
    steps = np.ones((30, SIZE))
    steps[:, 1] = np.nan
    smoothing, used, slopes = after(steps)
    assert smoothing[-1] < SMOOTHING / 4
    np.testing.assert_allclose(slopes, 1 / used**2, rtol=1e-5)
    np.testing.assert_allclose(smoothing, after(steps[:, :1])[0], rtol=1e-5)


@pytest.mark.slow
def test_the_floor_of_the_distance_goes():
    """It passes the floor of a constant distance, about c/8 μ² trace(H)²/d."""
    dimension = 20
    scales = np.linspace(1, 2, dimension, dtype=np.float32)

    def last_loss(estimator):
        result = zo.minimize(
            lambda x: jnp.sum(scales * x**2) / 2,
            np.ones(dimension, np.float32),
            optax.sgd(1.0),
            estimator(zo.orthonormal(), smoothing=SMOOTHING),
            zo.search.parabolic(),
            num_steps=400,
            key=0,
            progress=False,
        )
        return result.values[-1]

    assert last_loss(zo.adaptive_difference) < 1e-3 * last_loss(zo.forward_difference)


@pytest.mark.slow
def test_the_distance_is_halved_if_nothing_has_a_value():
    estimator = zo.adaptive_difference(zo.orthonormal(), 4, 1e-2)
    params = jnp.ones(8)
    state = estimator.init(params)
    for halvings in range(1, 4):
        _, state = zo.estimators.estimate(
            estimator, lambda x: jnp.nan * jnp.sum(x), 0, params, state
        )
        chex.assert_trees_all_close(state.smoothing, jnp.float32(1e-2 / 2**halvings))
