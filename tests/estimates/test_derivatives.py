"""Derivatives of estimates, by what the loss reads besides its parameters."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.tables import (
    DISTRIBUTIONS,
    ESTIMATORS,
    KINDS,
    each_distribution,
    jit,
)

PARAMS = {"w": jnp.ones((4, 3)) / 3, "b": jnp.arange(3.0) / 5}
X = jnp.linspace(-1, 1, 8).reshape(2, 4)
H = jnp.float32(0.7)


def summary(name, estimator, batch_size, params, h):
    """A number that depends on the value and on all elements of the gradient."""
    estimator = ESTIMATORS[estimator](DISTRIBUTIONS[name], 2, smoothing=0.1)

    def loss(params, h):
        y = jnp.tanh(h * (X @ params["w"]) + params["b"][None])
        return h * jnp.mean(y**2)

    evaluator = zo.vectorized(batch_size)
    value, gradient = zo.value_and_grad(loss, estimator, evaluator=evaluator)(
        0, params, h
    )
    return value + sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("name", "estimator", "batch_size"),
    each_distribution(("forward", "central"), (None, 1, 2), fast=(), among=KINDS),
)
def test_are_those_of_differences(name, estimator, batch_size):
    """They were zero: values were rounded by way of their bits."""

    @jit
    def both(h):
        def of(params, h):
            return summary(name, estimator, batch_size, params, h)

        eps = jnp.float32(1e-2)
        direction = jax.tree.map(lambda p: jnp.cos(3 * p), PARAMS)

        def moved(s):
            return jax.tree.map(lambda p, d: p + s * d, PARAMS, direction)

        by_params, by_h = jax.grad(of, argnums=(0, 1))(PARAMS, h)
        along = sum(
            jnp.vdot(g, d)
            for g, d in zip(
                jax.tree.leaves(by_params), jax.tree.leaves(direction), strict=True
            )
        )
        one = jnp.ones((), jnp.float32)
        got = {
            "grad": by_h,
            "jvp": jax.jvp(lambda h: of(PARAMS, h), (h,), (one,))[1],
            "linearize": jax.linearize(lambda h: of(PARAMS, h), h)[1](one),
            "params": along,
        }
        by_h = (of(PARAMS, h + eps) - of(PARAMS, h - eps)) / (2 * eps)
        by_params = (of(moved(eps), h) - of(moved(-eps), h)) / (2 * eps)
        expected = {name: by_h for name in got} | {"params": by_params}
        return got, expected

    got, expected = both(H)
    # Differences of float32 values of about 3, at a distance of 0.02.
    chex.assert_trees_all_close(got, expected, rtol=1e-3, atol=2e-3)
    assert abs(float(got["grad"])) > 0.1


def test_of_a_hyperparameter_in_a_hybrid_loss():
    """A weight decay inside of the loss: d/dλ of ∂f/∂θ is known in closed form."""

    def loss(params, decay):
        return jnp.sum(params**2) + decay * jnp.sum(params**2)

    estimator = zo.forward_difference(zo.coordinate(replace=False), 3, smoothing=1e-2)

    def first(decay):
        params = jnp.array([1.0, -2.0, 0.5])
        return zo.value_and_grad(loss, estimator)(0, params, decay)[1]

    got = jit(jax.jacfwd(first))(jnp.float32(0.3))
    # A forward difference of λ‖θ‖² is λ (2 θᵢ ± μ).
    np.testing.assert_allclose(got, [2.0, -4.0, 1.0], atol=1.1e-2)


def test_of_a_gaussian_process_are_finite():
    """A query is at distance 0 from itself, and the square root has no slope at 0."""
    estimator = zo.contrib.gaussian_process(num_directions=2, memory_size=4)
    params = jnp.arange(3.0)
    state = estimator.init(params)

    @jit
    def derivative(h):
        def of(h):
            (value, gradient), _ = zo.estimators.estimate(
                estimator, lambda x: h * jnp.sum(x**2), 0, params, state
            )
            return value + jnp.sum(gradient)

        return jax.grad(of)(h)

    assert np.isfinite(derivative(H))
