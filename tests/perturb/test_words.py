"""Leaves whose signs are drawn as words of 32 neighbors, as on a GPU.

The texts of lowered programs hold for JAX 0.10.2.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import radazo_jax as zo
from radazo_jax._src.base import xla
from tests.helpers import jaxprs
from tests.helpers.compare import (
    DISTRIBUTIONS,
    assert_program_is_at_the_perturbed_points,
)
from tests.helpers.tables import slow
from tests.perturb.zoo import PROGRAMS

# Each reads its leaves in other ways.
READS = (
    *("einsums", "trees", "scans", "bfloat16_leaves", "look_ups", "convolutions"),
    *("ensemble_under_vmap", "linear_algebra", "structure"),
)
# No leaf begins at a multiple of 32, and no slice of "w" is one long.
PARAMS = {"a": jnp.zeros(7), "t": jnp.zeros((9, 13)), "w": jnp.zeros((3, 5, 33))}


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    monkeypatch.setattr(xla, "on_one_gpu", lambda fun, otherwise: fun())


def read(params):
    """The elements of all leaves, read in the ways that keep neighbors together."""
    slices = lax.scan(lambda _, w: ((), w.T), (), params["w"])[1]
    return params["a"] + 0, params["t"].T + 0, slices.transpose(0, 2, 1)


@pytest.mark.parametrize("name", ["rademacher", slow("orthonormal")])
def test_signs_of_whole_leaves_are_drawn_32_together(name, monkeypatch):
    # Small leaves would be drawn before the program reads them.
    monkeypatch.setattr("radazo_jax._src.perturb.views._MAX_DRAWN_TOGETHER", 0)
    distribution = DISTRIBUTIONS[name]
    direction = distribution.sample(jax.random.key(3), PARAMS)

    def run(direction):
        return zo.perturb(read)(PARAMS, direction, 1.0)

    u = distribution.materialize(direction, PARAMS)
    expected = u["a"], u["t"].T, u["w"]
    for got, wanted in zip(jax.jit(run)(direction), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    # The largest slice has 165 elements, whose signs lie in 7 words at most. The order
    # of the rows of a basis is drawn from 8 words.
    equations = jaxprs.equations(jax.make_jaxpr(run)(direction).jaxpr)
    mixed = [e.outvars[0].aval.size for e in equations if e.primitive.name == "xor"]
    assert mixed and max(mixed) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("name", READS)
def test_programs_with_words_are_at_the_perturbed_point(name):
    assert_program_is_at_the_perturbed_points(
        DISTRIBUTIONS["rademacher"], PROGRAMS[name]
    )
