"""Losses that return auxiliary values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import METHOD, START, traced, traced_square


def stepped(fun, **options):
    init, step = zo.solver(fun, *METHOD, **options)
    state, info = jax.jit(step)(init(START, jax.random.key(0)))
    return state.params, info.value


def minimized(fun, **options):
    result = traced(fun, **options)
    return result.params, result.values


@pytest.mark.parametrize("call", [stepped, minimized])
def test_an_auxiliary_value_changes_no_step(call):
    found = call(lambda p: (traced_square(p), {"largest": jnp.max(p)}), has_aux=True)
    for x, expected in zip(found, call(traced_square), strict=True):
        np.testing.assert_array_equal(x, expected)


def test_the_auxiliary_value_of_a_step_is_in_its_info():
    """It is the one at the first point, θ."""
    init, step = zo.solver(
        lambda p: (traced_square(p), {"largest": jnp.max(p)}), *METHOD, has_aux=True
    )
    _, info = jax.jit(step)(init(START, jax.random.key(0)))
    assert info.aux["largest"] == np.max(START)


def test_a_function_without_a_pair_is_named():
    for call in (stepped, minimized):
        with pytest.raises(TypeError, match="must return a pair"):
            call(traced_square, has_aux=True)
