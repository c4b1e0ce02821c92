"""Losses that return auxiliary values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo

START = np.ones(3, np.float32)
METHOD = zo.zo_sgd(1e-2), zo.forward_difference(zo.rademacher(), num_directions=2)


def loss(p):
    return jnp.sum(p**2)


def with_aux(p):
    return loss(p), {"largest": jnp.max(p)}


NO_AUX = pytest.mark.xfail(
    strict=True, raises=TypeError, reason="has_aux is not an argument"
)


def stepped(fun, **options):
    init, step = zo.solver(fun, *METHOD, **options)
    state, info = jax.jit(step)(init(START, jax.random.key(0)))
    return state.params, info.value


def minimized(fun, **options):
    result = zo.minimize(
        *(fun, START, *METHOD), num_steps=2, key=0, progress=False, **options
    )
    return result.params, result.values


@NO_AUX
@pytest.mark.parametrize("call", [stepped, minimized])
def test_an_auxiliary_value_changes_no_step(call):
    found = call(with_aux, has_aux=True)
    for x, expected in zip(found, call(loss), strict=True):
        np.testing.assert_array_equal(x, expected)
