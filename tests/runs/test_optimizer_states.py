"""Optimizers whose states change, and derivatives of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo

ESTIMATOR = zo.forward_difference(zo.rademacher(), num_directions=2, smoothing=0.1)
# Their hyperparameters are arrays of float32, which moments in bfloat16 turn to.
CHANGING = ["adam", "adamw", "amsgrad", "lamb", "lion", "nadam", "radam"]


def loss(p):
    return jnp.sum(p["a"].astype(jnp.float32) ** 2) + jnp.sum(p["b"] ** 2)


def run(optimizer):
    params = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones(4, jnp.float32)}
    with jax.numpy_dtype_promotion("standard"):  # As Optax's moments need it.
        return zo.minimize(
            *(loss, params, optimizer, ESTIMATOR), num_steps=2, key=0, progress=False
        )


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="the error is that of lax.while_loop, which names no optimizer",
)
@pytest.mark.parametrize(
    "name",
    [CHANGING[0], *(pytest.param(x, marks=pytest.mark.slow) for x in CHANGING[1:])],
)
def test_states_that_change_their_dtype_run_or_are_named(name):
    optimizer = optax.inject_hyperparams(getattr(optax, name))(learning_rate=1e-3)
    try:
        result = run(optimizer)
    except TypeError as error:
        assert "optimizer must" in str(error) and "while_loop" not in str(error)
    else:
        assert result.params["a"].dtype == jnp.bfloat16
        assert len(result.values) == 2


@pytest.mark.slow
def test_states_that_keep_their_dtype_run():
    assert len(run(optax.adam(1e-3)).values) == 2


@pytest.mark.parametrize(
    "derivative",
    [
        pytest.param(jax.jacfwd, marks=pytest.mark.slow),
        pytest.param(
            jax.grad,
            marks=pytest.mark.xfail(
                strict=True,
                raises=ValueError,
                reason="a step has a loop, which has no reverse mode",
            ),
        ),
    ],
)
def test_a_step_of_zo_sgd_is_differentiable(derivative):
    """By the scale of the start, and by the rate."""

    def final(x):
        scale, rate = x
        init, step = zo.solver(lambda p: jnp.sum(p**2), zo.zo_sgd(rate), ESTIMATOR)
        state, _ = step(init(scale * jnp.ones(3), jax.random.key(0)))
        return jnp.sum(state.params**2)

    with jax.enable_x64(True):
        # Central differences of a quadratic are exact, up to the rounding of the
        # loss to float32, divided by the distances: 2⁻²⁴ / (0.05 · 0.1).
        x, h = jnp.array([1.0, 0.1]), 0.05
        final = jax.jit(final)
        expected = [(final(x + h * d) - final(x - h * d)) / (2 * h) for d in jnp.eye(2)]
        np.testing.assert_allclose(derivative(final)(x), expected, rtol=1e-4)
