"""Evaluations that wait for one another, so that not all are alive together."""

import jax.numpy as jnp
import pytest
from jax import lax

import radazo_jax as zo
from tests.helpers.jaxprs import waits


def test_layers_one_after_another_wait_for_their_inputs():
    # Otherwise all perturbed layers would be alive together.
    params = [jnp.ones((300, 300)), jnp.ones((300, 300))]
    x = jnp.ones((5, 300))
    tied = waits(lambda p, x: jnp.tanh(x @ p[0]) @ p[1], zo.gaussian(), params, x)
    assert sum((5, 300) in shapes for shapes in tied) == 2


@pytest.mark.parametrize("unroll", [1, 2])
def test_a_leaf_used_in_every_step_waits_for_the_step_not_for_its_slice(unroll):
    # Waiting for the slice would copy it out of its stack; waiting for nothing would
    # build the leaf before the loop. Steps unrolled are layers one after another.
    def fun(w, xs):
        return lax.scan(lambda c, x: (c, x @ w), 0, xs, unroll=unroll)[1]

    w, xs = jnp.ones((300, 300)), jnp.ones((4, 5, 300))
    tied = waits(fun, zo.rademacher(), w, xs)
    assert tied
    assert any((5, 300) in shapes for shapes in tied) == (unroll > 1)
