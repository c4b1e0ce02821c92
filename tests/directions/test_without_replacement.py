"""Directions without replacement: coordinates in turn, and an orthonormal basis."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.directions import generator
from tests.helpers.compare import sequence
from tests.helpers.tables import ESTIMATORS, every, jit, slow

IN_TURN = zo.coordinate(replace=False)


def test_all_orders_and_signs_are_equally_likely():
    dimension, num = 4, 4800

    @jit
    @jax.vmap
    def drawn(key):
        return sequence(IN_TURN, key, dimension, jnp.zeros(dimension))

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

    estimator = zo.central_difference(IN_TURN, x.size, smoothing)
    with jax.enable_x64():
        _, gradient = jit(zo.value_and_grad(loss, estimator))(jax.random.key(0), x)
    rows = smoothing * np.eye(x.size)
    expected = [(loss(x + e) - loss(x - e)) / (2 * smoothing) for e in rows]
    # The directions are float32: so is μ uₖ.
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_too_many_coordinates_are_refused():
    params = jax.ShapeDtypeStruct((2**16, 2**16), "float32")
    with pytest.raises(ValueError, match=r"fewer than 2\^32 coordinates .*; got"):
        jax.eval_shape(lambda p: IN_TURN.materialize(IN_TURN.sample(0, p), p), params)


# --- An orthonormal basis -------------------------------------------------------


ORTHONORMAL = zo.orthonormal()
# Powers of two, and dimensions with more directions than coordinates.
DIMENSIONS = every([1, 16, 21], 21)


@functools.cache
def rows(dimension, cycles=2, seed=0):
    """The directions of the first cycles under a key, float64 [cycles, n, d]."""
    size = 2 ** max(dimension - 1, 0).bit_length()
    params = jnp.zeros(dimension)

    @jit
    def drawn(key):
        return sequence(ORTHONORMAL, key, cycles * size, params)

    return np.asarray(drawn(jax.random.key(seed)), np.float64).reshape(
        cycles, size, dimension
    )


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_mean_over_a_cycle_is_exactly_that_of_the_distribution(dimension):
    for basis in rows(dimension):
        mean = basis.T @ basis / len(basis)
        np.testing.assert_allclose(mean, np.eye(dimension) / dimension, atol=1e-7)
        np.testing.assert_allclose(np.linalg.norm(basis, axis=1), 1, rtol=1e-6)
    if dimension == len(basis):
        np.testing.assert_allclose(basis @ basis.T, np.eye(dimension), atol=1e-6)


@pytest.mark.parametrize(
    ("dimension", "one", "other"),
    [slow(2**32, 2**31 - 1, 2**31), (2**32 + 5, 2**32, 3)],
)
def test_of_more_coordinates_than_a_word_counts(dimension, one, other):
    """Relative to one direction, the others are rows of the matrix.

    In a row, the sign at the sum of two positions that share no bit is the product of
    the signs at the two.
    """
    key, places = jax.random.key(1), [0, one, other, one + other]
    at = generator.concatenate([generator.positions((1,), offset=i) for i in places])
    at = generator.Positions(at.hi, at.lo, dimension)
    numbers = jnp.arange(40, dtype=jnp.uint32) * np.uint32(2**27 - 39)
    signs = np.sign(jit(jax.vmap(lambda i: ORTHONORMAL.draw(key, i, at)))(numbers))
    at_zero, first, second, both = (signs * signs[0]).T
    assert (at_zero == 1).all()
    np.testing.assert_array_equal(first * second, both)
    for row in (first, second, both):
        assert abs(row.sum()) < 4.5 * 40**0.5


@pytest.mark.parametrize("name", every(ESTIMATORS, "forward"))
def test_directions_are_numbered_through_the_run(name):
    """Steps of 3 directions in 8 dimensions: a new basis within the third."""
    estimator = ESTIMATORS[name](ORTHONORMAL, num_directions=3, smoothing=0.1)
    params, run_key = jnp.zeros(8), jax.random.key(5)
    expected = jit(lambda key: sequence(ORTHONORMAL, key, 24, params))(run_key)

    @jit
    def directions(key, step):
        # The key of the step does not matter.
        draw = zo.estimators.Draw(key, run_key, step)
        points, state = estimator.points(draw, params, ())
        assert state == ()
        at = zo.estimators.candidates(points, params)
        return at[points.includes_params :].reshape(3, -1, 8)[:, 0] / 0.1

    keys = jax.random.split(jax.random.key(6), 6)
    drawn = [directions(key, jnp.int32(t)) for t, key in enumerate(keys)]
    np.testing.assert_allclose(np.concatenate(drawn), expected[:18], rtol=1e-5)


@pytest.mark.slow
def test_low_precision_and_empty_leaves():
    params = {"h": jnp.ones(5, jnp.bfloat16), "e": jnp.zeros((0, 3)), "s": jnp.ones(())}
    u = jit(lambda: ORTHONORMAL.materialize(ORTHONORMAL.sample(0, params), params))()
    assert u["h"].dtype == jnp.bfloat16 and u["e"].shape == (0, 3)
    np.testing.assert_allclose(abs(u["h"].astype(jnp.float32)), 6**-0.5, rtol=2**-8)
    np.testing.assert_allclose(abs(u["s"]), 6**-0.5, rtol=1e-6)
