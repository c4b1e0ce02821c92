"""Coordinates without replacement, and gradients from differences along all of them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.compare import sequence
from tests.helpers.tables import jit, slow

DISTRIBUTION = zo.coordinate(replace=False)


@pytest.mark.parametrize("dimension", [slow(1), 7, slow(64)])
def test_each_cycle_has_every_coordinate_once(dimension):
    params, cycles = jnp.zeros(dimension), 3

    @jit
    def drawn(key):
        return sequence(DISTRIBUTION, key, cycles * dimension, params)

    u = np.asarray(drawn(jax.random.key(1)))
    assert (np.sort(abs(u)) == np.eye(dimension)[-1]).all()
    chosen = abs(u).argmax(axis=1).reshape(cycles, dimension)
    assert (np.sort(chosen) == np.arange(dimension)).all()
    if dimension > 1:
        assert (chosen[0] != chosen[1]).any() and set(u.sum(axis=1)) == {-1.0, 1.0}


def test_all_orders_and_signs_are_equally_likely():
    dimension, num = 4, 4800

    @jit
    @jax.vmap
    def drawn(key):
        return sequence(DISTRIBUTION, key, dimension, jnp.zeros(dimension))

    u = np.asarray(drawn(jax.random.split(jax.random.key(0), num)))
    orders = abs(u).argmax(axis=2).tolist()
    for permutation in itertools.permutations(range(dimension)):
        # Binomial(4800, 1/24) has standard deviation 13.8.
        assert abs(orders.count(list(permutation)) - num / 24) < 4.5 * 13.8
    # Sums of 4800 signs have standard deviation 69.
    assert abs(u.sum(axis=2).sum(axis=0)).max() < 4.5 * 69


def test_full_differences_are_those_along_each_coordinate():
    smoothing, x = 1e-2, np.linspace(-1, 2, 6)

    def loss(x):
        return (x**3).sum() + x[0] * x[-1]

    estimator = zo.central_difference(DISTRIBUTION, x.size, smoothing)
    with jax.enable_x64():
        _, gradient = jit(zo.value_and_grad(loss, estimator))(jax.random.key(0), x)
    rows = smoothing * np.eye(x.size)
    expected = [(loss(x + e) - loss(x - e)) / (2 * smoothing) for e in rows]
    # The directions are float32: so is μ uₖ.
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_too_many_coordinates_are_refused():
    params = jax.ShapeDtypeStruct((2**16, 2**16), "float32")
    with pytest.raises(ValueError, match=r"fewer than 2\^32 coordinates .*; got"):
        jax.eval_shape(
            lambda p: DISTRIBUTION.materialize(DISTRIBUTION.sample(0, p), p), params
        )
