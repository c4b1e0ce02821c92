"""Momentum over random subspaces and pattern moves, against the recursion in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import Hashed
from tables import jit

import radazo_jax as zo

DIMENSION, DIRECTIONS = 12, 3
CURVATURES = np.logspace(0, 2, DIMENSION)


def loss(x):
    return jnp.sum(jnp.asarray(CURVATURES, x.dtype) * x**2) / 2


class Given:
    """A step of a given size from the point ahead, as `parabolic_sgd` takes it."""

    def __init__(self, size):
        self.size = size

    def init(self, params):
        return ()

    def update(self, updates, state, params=None, *, ahead, **extra_args):
        return jax.tree.map(lambda g, w: w - self.size * g, updates, ahead), state


def run(steps, size, dtype="float64"):
    """Parameters before each step, estimates, and the estimator's states."""
    estimator = zo.accelerated(zo.forward_difference(Hashed(), DIRECTIONS, 1e-4))
    params = jnp.linspace(-1.0, 2.0, DIMENSION, dtype=dtype)
    state, found = estimator.init(params), []

    @jit
    def step(key, params, state):
        points = estimator.points(key, params, state)
        at = zo.estimators.candidates(points, params)
        values = jax.vmap(loss)(at)
        return at, values, *estimator.reduce(points, values, params, state)

    for t in range(steps):
        at, values, estimate, state = step(jax.random.key(t), params, state)
        found.append((params, at, values, estimate))
        updates, _ = Given(size).update(
            estimate.gradient, (), params, ahead=estimate.ahead
        )
        params = params + updates
    return found


@pytest.mark.parametrize(("size", "smooth"), [(1e-4, True), (3e-2, False)])
def test_is_the_recursion_of_fercoq_and_richtarik(size, smooth):
    """Algorithm 1 with τ = K of n = d, both restarts and pattern moves, in NumPy."""
    first = share = DIRECTIONS / DIMENSION
    momentum = base = None
    before, since, lower = np.inf, 0, False
    dropped = moved = refused = 0
    with jax.enable_x64(True):
        found = run(25, size)
        for t, (params, at, values, estimate) in enumerate(found[:-1]):
            params, at, values = (np.asarray(x) for x in (params, at, values))
            if t == 0:
                momentum = base = params
            tries = not lower and since * DIRECTIONS >= DIMENSION
            beyond = 2 * params - base
            if lower:
                start = beyond
            else:
                start = params if tries else params + share * (momentum - params)
            np.testing.assert_allclose(at[0], params, rtol=1e-15)
            away = beyond if tries else start
            np.testing.assert_allclose(at[1], away, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(abs(at[2:] - start).max(), 1e-4, rtol=0.5)
            spoiled = lower and values[1] >= before
            if spoiled:
                start = params
                assert not estimate.gradient.any() and estimate.slope == 0
            np.testing.assert_allclose(params + estimate.ahead, start, rtol=1e-12)
            assert estimate.value == values[0]
            assert estimate.value_ahead == values[0 if tries or spoiled else 1]
            assert estimate.num_values == DIRECTIONS + 2
            following = np.asarray(found[t + 1][0])
            step = following - start
            drop = estimate.value_ahead > values[0] and estimate.value_ahead > before
            before = float(estimate.value_ahead)
            against = not (tries or lower) and step @ (following - params) <= 0
            against |= spoiled
            if t * DIRECTIONS < DIMENSION:  # The first pass is without momentum.
                momentum, share = following, first
            elif drop or against:
                momentum, share, dropped = following, first, dropped + 1
            else:
                momentum = momentum + first / share * step
                momentum += (beyond - params) * lower
                share = (np.sqrt(share**4 + 4 * share**2) - share**2) / 2
            moved += lower and not spoiled
            refused += spoiled
            lower = tries and values[1] < values[0]
            since += 1
            if (tries and not lower) or spoiled:
                base, since = params, 0
    # Short steps go the same way for long, long ones neither on nor along a line.
    assert [n > 0 for n in (moved, dropped, refused)] == [smooth, *2 * [not smooth]]


def test_the_gradient_is_that_of_the_estimator_ahead():
    found = run(4, 1e-3, "float32")
    plain = zo.forward_difference(Hashed(), DIRECTIONS, 1e-4)
    estimate_there = jit(functools.partial(plain.estimate, loss))
    for t, (params, _, _, estimate) in enumerate(found):
        (value, gradient), _ = estimate_there(
            jax.random.key(t), params + estimate.ahead, ()
        )
        np.testing.assert_allclose(estimate.value_ahead, value, rtol=1e-6)
        np.testing.assert_allclose(estimate.gradient, gradient, rtol=2e-2, atol=1e-3)


def test_curvatures_that_differ_take_fewer_evaluations():
    scales = jnp.logspace(0, 4, 100)

    def last(estimator, steps):
        result = zo.minimize(
            lambda x: jnp.sum(scales * x**2),
            jnp.ones(100),
            zo.parabolic_sgd(),
            estimator,
            steps,
            key=0,
            progress=False,
        )
        return result.values[-1] / result.values[0]

    plain = zo.adaptive_difference(zo.orthonormal())
    evaluations = 30 * 101
    accelerated = last(zo.accelerated(plain), evaluations // 12)
    assert accelerated < last(plain, evaluations // 11) / 2


def test_the_momentum_is_dropped_where_there_is_no_loss_ahead():
    scales = jnp.logspace(0, 2, 30)

    def fun(x):
        return jnp.where(jnp.any(x < -0.1), jnp.nan, jnp.sum(scales * x**2))

    estimator = zo.accelerated(zo.adaptive_difference(zo.orthonormal()))
    result = zo.minimize(
        fun, jnp.ones(30), zo.parabolic_sgd(), estimator, 400, key=2, progress=False
    )
    assert result.state.failures.evaluations > 0
    assert result.values[-1] < 1e-6 * result.values[0]


def test_a_step_from_ahead_is_measured_and_taken_back_from_there():
    tx = zo.parabolic_sgd(initial_step_size=0.5)
    params, gradient = jnp.zeros(2), jnp.array([2.0, 0.0])
    ahead = jnp.array([0.0, 3.0])
    state = tx.init(params)
    given = {"slope": 4.0, "ahead": ahead}
    updates, state = tx.update(
        gradient, state, params, value=1.0, value_ahead=5.0, **given
    )
    size = float(optax.tree_utils.tree_get(state, "step_size"))
    np.testing.assert_allclose(updates, ahead - size * gradient)
    # From 5 down to 5 − 4η/2: half of the fall by the slope, so that η is right.
    value = 5.0 - 2.0 * size
    _, after = tx.update(
        gradient, state, params, value=value, value_ahead=value, **given
    )
    np.testing.assert_allclose(
        optax.tree_utils.tree_get(after, "step_size"), size, rtol=1e-5
    )
    updates, _ = tx.update(
        gradient, state, params, value=np.nan, value_ahead=5.0, **given
    )
    np.testing.assert_allclose(updates, size * gradient)


def test_no_step_begins_ahead_where_the_loss_is_above_that_at_the_start():
    tx = zo.parabolic_sgd(initial_step_size=0.5)
    params, gradient = jnp.zeros(2), jnp.array([2.0, 0.0])
    state = tx.init(params)
    given = {"slope": 4.0, "ahead": jnp.array([0.0, 3.0])}
    _, state = tx.update(gradient, state, params, value=10.0, value_ahead=10.0, **given)
    # Down by 1, half of the fall by the slope: a good step, but not so what is ahead.
    updates, state = tx.update(
        gradient, state, params, value=9.0, value_ahead=11.0, **given
    )
    np.testing.assert_array_equal(updates, 0)
    updates, state = tx.update(
        gradient, state, params, value=9.0, value_ahead=9.5, **given
    )
    # The values were of the same parameters, and alike.
    assert optax.tree_utils.tree_get(state, "noise") == 0
    size = optax.tree_utils.tree_get(state, "step_size")
    np.testing.assert_allclose(updates, given["ahead"] - size * gradient)


def test_other_points_are_refused():
    with pytest.raises(TypeError, match="estimator must be a GradientEstimator"):
        zo.accelerated(zo.sphere())
    message = "estimator must evaluate the parameters and a point along each direction"
    for other in (zo.central_difference(), zo.accelerated(zo.forward_difference())):
        estimator = zo.accelerated(other)
        with pytest.raises(ValueError, match=message):
            estimator.points(
                jax.random.key(0), jnp.zeros(3), estimator.init(jnp.zeros(3))
            )
