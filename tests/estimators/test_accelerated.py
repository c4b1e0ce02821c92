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


def loss(x, center=0.0):
    return jnp.sum(jnp.asarray(CURVATURES, x.dtype) * (x - center) ** 2) / 2


def run(steps, size, dtype="float64", bounds=(-np.inf, np.inf), center=0.0):
    """Parameters before each step, points, values, estimates, and their gradients.

    The steps have a given size, and start at the lookahead point.
    """
    estimator = zo.accelerated(zo.forward_difference(Hashed(), DIRECTIONS, 1e-4))
    params = jnp.linspace(-1.0, 2.0, DIMENSION, dtype=dtype)
    state, found = estimator.init(params), []
    box = None
    if np.isfinite(bounds).any():
        box = tuple(jnp.full_like(params, bound) for bound in bounds)

    @jit
    def step(key, params, state):
        draw = zo.estimators.Draw.once(key)._replace(bounds=box)
        points, state = estimator.points(draw, params, state)
        at = jnp.clip(zo.estimators.candidates(points, params), *bounds)
        values = jax.vmap(lambda x: loss(x, center))(at)
        given = points.split(values)
        estimate, state = estimator.reduce(points, given, params, state)
        return at, values, estimate, estimate.gradient.materialize(params), state

    for t in range(steps):
        *made, state = step(jax.random.key(t), params, state)
        found.append((params, *made))
        _, _, estimate, gradient = made
        moved = estimate.lookahead.displacement - size * gradient
        params = jnp.clip(params + moved, *bounds)
    return found


@pytest.mark.parametrize(
    ("size", "bounds"),
    [(1e-4, (-np.inf, np.inf)), (3e-2, (-np.inf, np.inf)), (1e-4, (-1.0, 2.05))],
)
def test_is_the_recursion_of_fercoq_and_richtarik(size, bounds):
    """Algorithm 1 with τ = K of n = d, both restarts and pattern moves, in NumPy.

    Under bounds, the point at which a step starts is moved into the box. What is cut
    off is no momentum, and a step from the end of a move that was cut is no way back.
    """
    center = 3.0 if np.isfinite(bounds).all() else 0.0
    smooth = size < 1e-2
    first = share = DIRECTIONS / DIMENSION
    momentum = base = None
    before, since, lower = np.inf, 0, False
    dropped = moved = refused = cut = 0
    with jax.enable_x64(True):
        found = run(25, size, bounds=bounds, center=center)
        for t, (params, at, values, estimate, gradient) in enumerate(found[:-1]):
            lookahead, lookahead_value = estimate.lookahead
            params, at, values = (np.asarray(x) for x in (params, at, values))
            if t == 0:
                momentum = base = params
            tries = not lower and since * DIRECTIONS >= DIMENSION
            beyond = np.clip(2 * params - base, *bounds)
            if lower:
                start = free = beyond
                cut += (beyond != 2 * params - base).any()
            else:
                free = params if tries else params + share * (momentum - params)
                start = np.clip(free, *bounds)
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
                momentum = momentum + first / share * step + (start - free)
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
    assert bool(cut) == (center != 0)


def test_the_gradient_is_the_one_at_the_lookahead_point():
    found = run(4, 1e-3, "float32")
    plain = zo.forward_difference(Hashed(), DIRECTIONS, 1e-4)
    estimate_there = jit(functools.partial(zo.estimators.estimate, plain, loss))
    for t, (params, _, _, estimate, gradient) in enumerate(found):
        lookahead, lookahead_value = estimate.lookahead
        there = params + lookahead
        (value, expected), _ = estimate_there(jax.random.key(t), there, ())
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
        optax.sgd(1.0),
        estimator,
        zo.search.parabolic(),
        num_steps=400,
        key=2,
        progress=False,
    )
    assert result.state.failures.evaluations > 0
    assert result.values[-1] < 1e-6 * result.values[0]


def test_other_points_are_refused():
    with pytest.raises(TypeError, match="estimator must be a GradientEstimator"):
        zo.accelerated(zo.sphere())
    message = "estimator must evaluate the parameters and a point along each direction"
    for other in (zo.central_difference(), zo.accelerated(zo.forward_difference())):
        estimator = zo.accelerated(other)
        with pytest.raises(ValueError, match=message):
            draw, x = zo.estimators.Draw.once(0), jnp.zeros(3)
            jax.eval_shape(estimator.points, draw, x, jax.eval_shape(estimator.init, x))
