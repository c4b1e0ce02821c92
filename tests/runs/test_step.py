"""The whole step: one program, the paper's algorithms, Optax's compositions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.tables import DISTRIBUTIONS, each_distribution, every, jit

DIMENSION = 12
CURVATURES = np.linspace(0.5, 3.0, DIMENSION)
OPTIMIZERS = {
    "radazo": zo.radazo,
    "zo_adamm": zo.zo_adamm,
    "zo_rmsprop": zo.zo_rmsprop,
    "zo_sgd": zo.zo_sgd,
    "zo_signsgd": zo.zo_signsgd,
}


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


@pytest.mark.parametrize(("distribution", "batch_size"), each_distribution((None, 1)))
def test_one_program(distribution, batch_size):
    """The step compiles once, and its program never calls the host."""
    optimizer = zo.radazo(lambda t: 1e-2 / (1 + t.astype(jnp.float32)))
    estimator = zo.forward_difference(DISTRIBUTIONS[distribution], 4)
    traces = []

    def loss(x, target):
        traces.append(None)
        return jnp.sum((x - target) ** 2)

    value_and_grad = zo.value_and_grad(loss, estimator, zo.vectorized(batch_size))

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


@pytest.mark.parametrize("name", every(OPTIMIZERS, "radazo", "zo_sgd"))
def test_every_optimizer_descends(name):
    optimizer = OPTIMIZERS[name](1e-2)
    result = zo.minimize(
        quadratic,
        jnp.ones(DIMENSION),
        optimizer,
        zo.forward_difference(zo.rademacher(), 8),
        200,
        0,
        progress=False,
    )
    assert result.values[-1] < 0.6 * result.values[0]


def test_gradient_accumulation_and_masks():
    params = {"w": jnp.ones(4), "frozen": jnp.ones(3)}
    value_and_grad = zo.value_and_grad(
        lambda p: jnp.sum(p["w"] ** 2) + jnp.sum(p["frozen"] ** 2),
        zo.forward_difference(zo.rademacher()),
    )
    labels = {"w": "train", "frozen": "freeze"}
    inner = optax.multi_transform(
        {"train": zo.radazo(1e-2), "freeze": optax.set_to_zero()}, labels
    )
    optimizer = optax.MultiSteps(inner, every_k_schedule=2)

    @jit
    def step(key, params, state):
        _, gradient = value_and_grad(key, params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    new, state = params, optimizer.init(params)
    for t in range(4):
        with jax.numpy_dtype_promotion("standard"):
            new, state = step(jax.random.key(t), new, state)
    np.testing.assert_array_equal(new["frozen"], params["frozen"])
    assert (new["w"] < params["w"]).any()


def test_the_first_state_of_a_solver_can_be_donated():
    solver = zo.solver(quadratic, zo.zo_sgd(1e-2), zo.forward_difference())
    state = solver.init(jnp.ones(DIMENSION), jax.random.key(0))
    step = jax.jit(solver.step, donate_argnums=0)
    for _ in range(2):
        state, info = step(state)
    assert int(state.step) == 2 and np.isfinite(info.value)
