"""Momentum over random subspaces and pattern moves, against the recursion in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.tables import jit

DIMENSION, DIRECTIONS = 12, 3
CURVATURES = np.logspace(0, 2, DIMENSION)


def loss(x):
    return jnp.sum(jnp.asarray(CURVATURES, x.dtype) * x**2) / 2


class Given:
    """A step of a given size from the lookahead point, like one of `parabolic_sgd`."""

    def __init__(self, size):
        self.size = size

    def init(self, params):
        return ()

    def update(self, updates, state, params=None, *, lookahead, **extra_args):
        return jax.tree.map(lambda g, w: w - self.size * g, updates, lookahead), state


def run(steps, size, dtype="float64"):
    """Parameters before each step, points, values, estimates, and their gradients."""
    estimator = zo.accelerated(zo.forward_difference(Hashed(), DIRECTIONS, 1e-4))
    params = jnp.linspace(-1.0, 2.0, DIMENSION, dtype=dtype)
    state, found = estimator.init(params), []

    @jit
    def step(key, params, state):
        draw = zo.estimators.Draw.once(key)
        points, state = estimator.points(draw, params, state)
        at = zo.estimators.candidates(points, params)
        values = jax.vmap(loss)(at)
        given = points.split(values)
        estimate, state = estimator.reduce(points, given, params, state)
        return at, values, estimate, estimate.gradient.materialize(params), state

    for t in range(steps):
        *made, state = step(jax.random.key(t), params, state)
        found.append((params, *made))
        _, _, estimate, gradient = made
        updates, _ = Given(size).update(gradient, (), params, **estimate.extra_args)
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
        for t, (params, at, values, estimate, gradient) in enumerate(found[:-1]):
            lookahead = estimate.extra_args["lookahead"]
            lookahead_value = estimate.extra_args["lookahead_value"]
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
            undone = lower and values[1] >= before
            if undone:
                start = params
                assert not gradient.any() and estimate.slope == 0
            np.testing.assert_allclose(params + lookahead, start, rtol=1e-12)
            assert estimate.value == values[0]
            assert lookahead_value == values[0 if tries or undone else 1]
            assert estimate.num_values == DIRECTIONS + 2
            following = np.asarray(found[t + 1][0])
            step = following - start
            drop = lookahead_value > values[0] and lookahead_value > before
            before = float(lookahead_value)
            against = not (tries or lower) and step @ (following - params) <= 0
            against |= undone
            if t * DIRECTIONS < DIMENSION:  # The first pass is without momentum.
                momentum, share = following, first
            elif drop or against:
                momentum, share, dropped = following, first, dropped + 1
            else:
                momentum = momentum + first / share * step
                momentum += (beyond - params) * lower
                share = (np.sqrt(share**4 + 4 * share**2) - share**2) / 2
            moved += lower and not undone
            refused += undone
            lower = tries and values[1] < values[0]
            since += 1
            if (tries and not lower) or undone:
                base, since = params, 0
    # Short steps go the same way for long, long ones neither on nor along a line.
    assert [n > 0 for n in (moved, dropped, refused)] == [smooth, *2 * [not smooth]]


def test_the_gradient_is_the_one_at_the_lookahead_point():
    found = run(4, 1e-3, "float32")
    plain = zo.forward_difference(Hashed(), DIRECTIONS, 1e-4)
    estimate_there = jit(functools.partial(zo.estimators.estimate, plain, loss))
    for t, (params, _, _, estimate, gradient) in enumerate(found):
        there = params + estimate.extra_args["lookahead"]
        (value, expected), _ = estimate_there(jax.random.key(t), there, ())
        lookahead_value = estimate.extra_args["lookahead_value"]
        np.testing.assert_allclose(lookahead_value, value, rtol=1e-6)
        np.testing.assert_allclose(gradient, expected, rtol=2e-2, atol=1e-3)


def test_the_momentum_is_reset_if_the_loss_at_the_lookahead_point_is_not_finite():
    scales = jnp.logspace(0, 2, 30)

    def fun(x):
        return jnp.where(jnp.any(x < -0.1), jnp.nan, jnp.sum(scales * x**2))

    estimator = zo.accelerated(zo.adaptive_difference(zo.orthonormal()))
    result = zo.minimize(
        fun,
        jnp.ones(30),
        zo.parabolic_sgd(),
        estimator,
        num_steps=400,
        key=2,
        progress=False,
    )
    assert result.state.failures.evaluations > 0
    assert result.values[-1] < 1e-6 * result.values[0]


def test_a_step_from_the_lookahead_point_is_measured_from_there():
    """If it is reverted, the run returns to the parameters before it."""
    tx = zo.parabolic_sgd(initial_step_size=0.5)
    params, gradient = jnp.zeros(2), jnp.array([2.0, 0.0])
    lookahead = jnp.array([0.0, 3.0])
    state = tx.init(params)
    given = {"slope": 4.0, "lookahead": lookahead}
    updates, state = tx.update(
        gradient, state, params, value=1.0, lookahead_value=5.0, **given
    )
    size = float(optax.tree.get(state, "step_size"))
    np.testing.assert_allclose(updates, lookahead - size * gradient)
    moved, given["latest_step"] = params + updates, -size * gradient
    # The loss falls from 5 to 5 − 4η/2, half of the fall by the slope, so η is right.
    value = 5.0 - 2.0 * size
    _, after = tx.update(
        gradient, state, moved, value=value, lookahead_value=value, **given
    )
    np.testing.assert_allclose(optax.tree.get(after, "step_size"), size, rtol=1e-5)
    updates, after = tx.update(
        gradient, state, moved, value=np.nan, lookahead_value=5.0, **given
    )
    np.testing.assert_allclose(moved + updates, params, atol=1e-6)
    assert optax.tree.get(after, "reverted")
    np.testing.assert_array_equal(after[-1].revert.params, params)


def test_no_step_starts_at_a_lookahead_point_above_the_first_loss():
    tx = zo.parabolic_sgd(initial_step_size=0.5)
    params, gradient = jnp.zeros(2), jnp.array([2.0, 0.0])
    state = tx.init(params)
    given = {"slope": 4.0, "lookahead": jnp.array([0.0, 3.0])}
    updates, state = tx.update(
        gradient, state, params, value=10.0, lookahead_value=10.0, **given
    )
    params = params + updates
    # Down by 1, half of the fall by the slope: a good step, but the lookahead point
    # is above the first loss.
    latest = updates - given["lookahead"]
    updates, state = tx.update(
        gradient,
        state,
        params,
        value=9.0,
        lookahead_value=11.0,
        latest_step=latest,
        **given,
    )
    np.testing.assert_array_equal(updates, 0)
    updates, state = tx.update(
        gradient, state, params, value=9.0, lookahead_value=9.5, **given
    )
    # The two values belong to the same parameters, and are equal.
    assert optax.tree.get(state, "noise") == 0
    size = optax.tree.get(state, "step_size")
    np.testing.assert_allclose(updates, given["lookahead"] - size * gradient)


def test_other_points_are_refused():
    with pytest.raises(TypeError, match="estimator must be a GradientEstimator"):
        zo.accelerated(zo.sphere())
    message = "estimator must evaluate the parameters and a point along each direction"
    for other in (zo.central_difference(), zo.accelerated(zo.forward_difference())):
        estimator = zo.accelerated(other)
        with pytest.raises(ValueError, match=message):
            draw, x = zo.estimators.Draw.once(0), jnp.zeros(3)
            jax.eval_shape(estimator.points, draw, x, jax.eval_shape(estimator.init, x))
