"""Optimizers whose states change, and derivatives of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.short_runs import METHOD, traced
from tests.helpers.tables import slow

# Their hyperparameters are arrays of float32, which moments in bfloat16 turn to.
CHANGING = ["adam", "amsgrad", "lamb", "lion"]


def loss(p):
    return jnp.sum(p["a"].astype(jnp.float32) ** 2) + jnp.sum(p["b"] ** 2)


def of_two_dtypes(optimizer):
    start = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones(4, jnp.float32)}
    estimator = zo.forward_difference(Hashed(), 2, smoothing=0.1)
    with jax.numpy_dtype_promotion("standard"):  # As Optax's moments need it.
        return traced(loss, start, 2, (optimizer, estimator))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGING)
def test_states_that_change_their_dtype_run_or_are_named(name):
    optimizer = optax.inject_hyperparams(getattr(optax, name))(learning_rate=1e-3)
    try:
        result = of_two_dtypes(optimizer)
    except TypeError as error:
        assert "optimizer must" in str(error) and "while_loop" not in str(error)
    else:
        assert result.params["a"].dtype == jnp.bfloat16 and len(result.values) == 2


@pytest.mark.parametrize("derivative", [jax.grad, slow(jax.jacfwd)])
def test_a_step_of_zo_sgd_is_differentiable(derivative):
    """The derivatives by the scale of the start, and by the rate."""

    @jax.jit
    def final(x):
        scale, rate = x
        init, step = zo.solver(lambda p: jnp.sum(p**2), zo.zo_sgd(rate), METHOD[1])
        state, _ = step(init(scale * jnp.ones(3), jax.random.key(0)))
        return jnp.sum(state.params**2)

    with jax.enable_x64(True):
        # Central differences of a quadratic are exact, up to the rounding of the
        # loss to float32, divided by the distances: 2⁻²⁴ / (5e-3 · 0.05) = 2e-4.
        x, h = jnp.array([1.0, 0.1]), 0.05
        expected = [(final(x + h * d) - final(x - h * d)) / (2 * h) for d in jnp.eye(2)]
        np.testing.assert_allclose(derivative(final)(x), expected, rtol=1e-3)
