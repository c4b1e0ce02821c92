"""Directions without replacement: the basis, and their numbers through a run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.directions import generator
from tests.helpers.compare import sequence
from tests.helpers.tables import ESTIMATORS, every, jit, slow

DISTRIBUTION = zo.orthonormal()
# Powers of two, and dimensions with more directions than coordinates.
DIMENSIONS = every([1, 16, 21], 21)


@functools.cache
def rows(dimension, cycles=2, seed=0):
    """The directions of the first cycles under a key, float64 [cycles, n, d]."""
    size = 2 ** max(dimension - 1, 0).bit_length()
    params = jnp.zeros(dimension)

    @jit
    def drawn(key):
        return sequence(DISTRIBUTION, key, cycles * size, params)

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
    signs = np.sign(jit(jax.vmap(lambda i: DISTRIBUTION.draw(key, i, at)))(numbers))
    at_zero, first, second, both = (signs * signs[0]).T
    assert (at_zero == 1).all()
    np.testing.assert_array_equal(first * second, both)
    for row in (first, second, both):
        assert abs(row.sum()) < 4.5 * 40**0.5


@pytest.mark.parametrize("name", every(ESTIMATORS, "forward"))
def test_directions_are_numbered_through_the_run(name):
    """Steps of 3 directions in 8 dimensions: a new basis within the third."""
    estimator = ESTIMATORS[name](DISTRIBUTION, num_directions=3, smoothing=0.1)
    params, run_key = jnp.zeros(8), jax.random.key(5)
    expected = jit(lambda key: sequence(DISTRIBUTION, key, 24, params))(run_key)

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
    u = jit(lambda: DISTRIBUTION.materialize(DISTRIBUTION.sample(0, params), params))()
    assert u["h"].dtype == jnp.bfloat16 and u["e"].shape == (0, 3)
    np.testing.assert_allclose(abs(u["h"].astype(jnp.float32)), 6**-0.5, rtol=2**-8)
    np.testing.assert_allclose(abs(u["s"]), 6**-0.5, rtol=1e-6)
