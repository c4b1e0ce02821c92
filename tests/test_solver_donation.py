"""States of `solver` that are donated to the step, so that it works in place."""

import jax
import jax.numpy as jnp
import optax
import pytest

import radazo_jax as zo

PARAMS = jnp.zeros(4)
METHODS = {
    "radazo": (zo.radazo(1e-2), zo.forward_difference()),
    "default": zo.default_method(PARAMS),
    "default for minibatches": zo.default_method(PARAMS, minibatches=True),
    "one more evaluation": (
        optax.chain(
            zo.scale_by_radazo(),
            optax.scale(-1.0),
            zo.scale_by_parabolic_step(extra_evaluations=1),
        ),
        zo.forward_difference(),
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_first_state_can_be_donated(name):
    def loss(params):
        return jnp.sum((params - 1) ** 2)

    init, step = zo.solver(loss, *METHODS[name])
    expected, _ = jax.jit(step)(init(PARAMS, jax.random.key(0)))
    in_place = jax.jit(step, donate_argnums=0)
    state, _ = in_place(init(jnp.copy(PARAMS), jax.random.key(0)))
    assert (state.params == expected.params).all()
