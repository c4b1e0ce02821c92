"""Losses that return auxiliary values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import METHOD, START, fails, traced, traced_square


def stepped(fun, **options):
    init, step = zo.solver(fun, *METHOD, **options)
    state, info = jax.jit(step)(init(START, jax.random.key(0)))
    return state.params, info.value


def minimized(fun, **options):
    result = traced(fun, **options)
    return result.params, result.values


@fails(TypeError, "has_aux is not an argument")
@pytest.mark.parametrize("call", [stepped, minimized])
def test_an_auxiliary_value_changes_no_step(call):
    found = call(lambda p: (traced_square(p), {"largest": jnp.max(p)}), has_aux=True)
    for x, expected in zip(found, call(traced_square), strict=True):
        np.testing.assert_array_equal(x, expected)
