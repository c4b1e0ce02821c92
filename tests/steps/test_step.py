"""The whole step: one program, the paper's algorithms, Optax's compositions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.tables import DISTRIBUTIONS, KINDS, each_distribution

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


@pytest.mark.parametrize(
    ("distribution", "batch_size"), each_distribution((None, 1), among=KINDS)
)
def test_one_program(distribution, batch_size):
    """The step compiles once, and its program never calls the host."""
    optimizer = zo.radazo(lambda t: 1e-2 / (1 + t.astype(jnp.float32)))
    estimator = zo.forward_difference(DISTRIBUTIONS[distribution], 4)
    traces = []

    def loss(x, target):
        traces.append(None)
        return jnp.sum((x - target) ** 2)

    value_and_grad = zo.value_and_grad(
        loss, estimator, evaluator=zo.vectorized(batch_size)
    )

    @jax.jit
    def step(key, x, state, target):
        value, gradient = value_and_grad(key, x, target)
        updates, state = optimizer.update(gradient, state, x)
        return optax.apply_updates(x, updates), state, value

    x, target = jnp.zeros(50), jnp.ones(50)
    state = optimizer.init(x)
    program = step.lower(jax.random.key(0), x, state, target).compile().as_text()
    for word in ("callback", "infeed", "outfeed", " send(", " recv("):
        assert word not in program.lower()
    traces.clear()
    keys = jax.random.split(jax.random.key(0), 100)
    for key in keys:
        x, state, _ = step(key, x, state, target)
    assert step._cache_size() == 1
    assert len(traces) <= 2
    assert len(program.split("ENTRY ")) == 2
