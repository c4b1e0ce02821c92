"""A perturbed function and its definition, the function of the displaced leaves."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import radazo_jax as zo
from radazo_jax._src.perturb import views
from tests.helpers import tables
from tests.helpers.tables import jit

SCALE = 0.1


class Hashed(zo.Distribution):
    """Numbers that depend on key and position and cost nothing to compile.

    What `perturb` does is the same for all distributions that draw by position, and
    compiling Threefry takes most of the time of a small program.
    """

    def factor(self, dimension):
        del dimension
        return 1.0

    def draw(self, key, number, at):
        del number
        word = (at.lo + jax.random.key_data(key)[1]) * np.uint32(2654435761)
        return (word >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-23) - 1


DISTRIBUTIONS = tables.DISTRIBUTIONS | {"hashed": Hashed()}


def displaced(distribution, params, direction):
    """The definition: a leaf at a time, from the materialized direction."""
    u = distribution.materialize(direction, params)
    return jax.tree.map(lambda p, v: p + SCALE * v, params, u)


def arrays(tree):
    """The parts of an output that can leave a compiled function, and be compared."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    ]


def sample(distribution, params, key=None):
    key = jax.random.key(0) if key is None else key
    return jit(lambda key: distribution.sample(key, params))(key)


def samples(distribution, params, num=3):
    keys = jax.random.split(jax.random.key(0), num)
    return jit(jax.vmap(lambda key: distribution.sample(key, params)))(keys)


def perturb_as_large(fun):
    """`zo.perturb(fun)`, which treats leaves of any size as large ones.

    Small leaves are drawn before the program, so that nothing is left to rearrange.
    """

    def perturbed(*args):
        with mock.patch.object(views, "_MAX_DRAWN_TOGETHER", -1):
            return zo.perturb(fun)(*args)

    return perturbed


def sequence(distribution, key, num, params):
    """The first directions of a run with this key, stacked: trees of [num, …]."""
    draw = zo.estimators.Draw.once(key)
    points = zo.estimators.sample_points(distribution, draw, num, [1.0], params)
    return zo.estimators.candidates(points, jax.tree.map(jnp.zeros_like, params))


def both(fun, distribution, params, *args):
    """The perturbed function and its definition, of a direction."""
    return (
        lambda u: arrays(perturb_as_large(fun)(params, u, SCALE, *args)),
        lambda u: arrays(fun(displaced(distribution, params, u), *args)),
    )


def assert_equal(got, expected, tolerance):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        wide = np.float64 if jnp.issubdtype(b.dtype, jnp.floating) else b.dtype
        a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
        finite = np.abs(b[np.isfinite(b)]) if b.size else np.ones(1)
        largest = max(1.0, float(np.max(finite, initial=0)))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * largest)


def assert_program_is_at_the_perturbed_points(distribution, program):
    """A program of the zoo under `vmap`, and its definition point by point."""
    with program.context():
        fun, params, *args = program.build()
        perturbed, definition = both(fun, distribution, params, *args)

        @jit
        def run(us):
            return jax.vmap(perturbed)(us), lax.map(definition, us)

        got, expected = run(samples(distribution, params, 2))
        assert_equal(got, expected, program.tolerance)
