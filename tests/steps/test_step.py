"""The whole step: one program, the paper's algorithms, Optax's compositions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo

DIMENSION = 12
CURVATURES = np.linspace(0.5, 3.0, DIMENSION)


def quadratic(x):
    return 0.5 * jnp.sum(CURVATURES.astype(x.dtype) * x**2)


def quadratic64(x):
    return 0.5 * np.sum(CURVATURES * x**2)


@pytest.mark.parametrize("refined", [True, False], ids=["algorithm 2", "algorithm 1"])
def test_the_papers_algorithms_end_to_end(refined):
    """Algorithms 1 and 2 with eq. (2), transcribed in float64."""
    b1, b2, zeta, eta, mu, num = 0.9, 0.99, 1e-8, 1e-2, 0.1, 4
    distribution = zo.sphere()
    optimizer = (zo.radazo if refined else zo.zo_adamm)(eta, b1, b2, zeta)
    value_and_grad = zo.value_and_grad(
        quadratic, zo.forward_difference(distribution, num, mu)
    )
    key = jax.random.key(0)

    @jax.jit
    def step(x, state, t):
        _, gradient = value_and_grad(jax.random.fold_in(key, t), x)
        updates, state = optimizer.update(gradient, state, x)
        return optax.apply_updates(x, updates), state

    @jax.jit
    def directions(t):
        keys = [jax.random.fold_in(jax.random.fold_in(key, t), k) for k in range(num)]
        like = jnp.zeros(DIMENSION)
        return [
            distribution.materialize(distribution.sample(k, like), like) for k in keys
        ]

    x = jnp.ones(DIMENSION)
    state = optimizer.init(x)
    theta = np.ones(DIMENSION)
    m, v = np.zeros(DIMENSION), np.zeros(DIMENSION)
    for t in range(30):
        us = [np.asarray(u, np.float64) for u in directions(t)]
        base = quadratic64(theta)
        g = (
            DIMENSION
            / num
            * sum((quadratic64(theta + mu * u) - base) / mu * u for u in us)
        )
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (m if refined else g) ** 2
        theta = theta - eta * m / np.sqrt(v + zeta)
        x, state = step(x, state, t)
        # float32 rounding of the differences, amplified by 1/μ, is what remains.
        np.testing.assert_allclose(x, theta, atol=5e-4)
    assert quadratic64(theta) < 0.6 * quadratic64(np.ones(DIMENSION))
