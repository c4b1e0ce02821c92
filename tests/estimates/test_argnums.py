"""Gradients with respect to other arguments than the first."""

import chex
import jax
import jax.numpy as jnp
import pytest

import radazo_jax as zo

ESTIMATOR = zo.forward_difference(zo.rademacher(), num_directions=3)
KEY = jax.random.key(0)
X, Y = jnp.arange(3.0), jnp.ones(3)


def loss(x, y, *, scale=1.0):
    return scale * jnp.sum(jnp.sin(x) * y)


@pytest.mark.parametrize("argnums", [1, -1])
def test_the_gradient_is_with_respect_to_the_argument_at_a_position(argnums):
    found = zo.value_and_grad(loss, ESTIMATOR, argnums)(KEY, X, Y, scale=2.0)
    swapped = zo.value_and_grad(lambda y, x, scale: loss(x, y, scale=scale), ESTIMATOR)
    chex.assert_trees_all_equal(found, swapped(KEY, Y, X, scale=2.0))


@pytest.mark.parametrize("argnums", [(0, 1), (1, 0), [1]])
def test_several_arguments_have_a_tuple_of_gradients(argnums):
    """Like a tree of parameters; each argument keeps its place."""

    def of_tuple(params):
        x, y = X, Y
        for i, value in zip(argnums, params, strict=True):
            x, y = (value, y) if i == 0 else (x, value)
        return loss(x, y)

    found = zo.value_and_grad(loss, ESTIMATOR, argnums)(KEY, X, Y)
    params = tuple((X, Y)[i] for i in argnums)
    chex.assert_trees_all_equal(
        found, zo.value_and_grad(of_tuple, ESTIMATOR)(KEY, params)
    )


def test_bad_positions_are_named():
    for argnums in ("0", 0.0, (), zo.vectorized()):
        with pytest.raises(TypeError, match="argnums must be the position"):
            zo.value_and_grad(loss, ESTIMATOR, argnums)
    with pytest.raises(ValueError, match="argnums must be positions of the 2 argum"):
        zo.value_and_grad(loss, ESTIMATOR, 2)(KEY, X, Y)
