"""Leaves on GPUs: products in blocks, and signs that are drawn 32 together.

The texts of lowered programs hold for JAX 0.10.2.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import radazo_jax as zo
from radazo_jax._src.base import xla
from radazo_jax._src.perturb import products
from tests.helpers import jaxprs
from tests.helpers.compare import (
    DISTRIBUTIONS,
    Hashed,
    assert_program_is_at_the_perturbed_points,
    perturb_as_large,
)
from tests.helpers.tables import slow
from tests.perturb.zoo import PROGRAMS

# Each has products with a matrix of another shape, dtype or place.
WITH_PRODUCTS = (
    *("einsums", "derivatives_inside", "branches", "while_loops", "scans"),
    *("bfloat16_leaves", "references", "decoder", "ensemble_under_vmap"),
)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of which most matrices of the zoo are no multiple."""
    monkeypatch.setattr(products, "_MAX_BUILT", 6)
    monkeypatch.setattr(products, "_BLOCK", 7)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", WITH_PRODUCTS)
def test_programs_in_blocks_are_at_the_perturbed_point(name, monkeypatch):
    taken = []

    def on_one_gpu(fun, otherwise):
        del otherwise
        taken.append(fun)
        return fun()

    monkeypatch.setattr(xla, "on_one_gpu", on_one_gpu)
    assert_program_is_at_the_perturbed_points(DISTRIBUTIONS["hashed"], PROGRAMS[name])
    assert taken


def logits(embedding, direction, x):
    return perturb_as_large(lambda e: x @ e.T)(embedding, direction, 0.5)


def lowered(platform, num_devices=1):
    """The program of logits of a large embedding, for devices that need not exist."""
    devices = np.array(jax.devices()[:num_devices])
    rows = NamedSharding(Mesh(devices, ("rows",)), P("rows"))
    embedding = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=rows)
    direction = jax.eval_shape(Hashed().sample, jax.random.key(0), embedding)
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    traced = jax.jit(logits).trace(embedding, direction, x)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_only_gpus_take_blocks(platform):
    in_blocks = platform in ("cuda", "rocm")
    assert ("while" in lowered(platform)) == in_blocks


@pytest.mark.usefixtures("small_blocks")
def test_several_gpus_read_no_blocks_of_what_may_be_sharded():
    alone, several = lowered("cuda"), lowered("cuda", num_devices=2)
    assert "dense<true>" in alone
    assert "dense<true>" not in several
    assert "dense<false>" in several


# --- Signs of whole leaves ------------------------------------------------------


# Each reads its leaves in other ways.
READS = (
    *("einsums", "trees", "scans", "bfloat16_leaves", "look_ups", "convolutions"),
    *("ensemble_under_vmap", "linear_algebra", "structure"),
)
# No leaf begins at a multiple of 32, and no slice of "w" is one long.
OF_WORDS = {"a": jnp.zeros(7), "t": jnp.zeros((9, 13)), "w": jnp.zeros((3, 5, 33))}


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(xla, "on_one_gpu", lambda fun, otherwise: fun())


def read(params):
    """The elements of all leaves, read in the ways that keep neighbors together."""
    slices = lax.scan(lambda _, w: ((), w.T), (), params["w"])[1]
    return params["a"] + 0, params["t"].T + 0, slices.transpose(0, 2, 1)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("name", ["rademacher", slow("orthonormal")])
def test_signs_of_whole_leaves_are_drawn_32_together(name, monkeypatch):
    # Small leaves would be drawn before the program reads them.
    monkeypatch.setattr("radazo_jax._src.perturb.views._MAX_DRAWN_TOGETHER", 0)
    distribution = DISTRIBUTIONS[name]
    direction = distribution.sample(jax.random.key(3), OF_WORDS)

    def run(direction):
        return zo.perturb(read)(OF_WORDS, direction, 1.0)

    u = distribution.materialize(direction, OF_WORDS)
    expected = u["a"], u["t"].T, u["w"]
    for got, wanted in zip(jax.jit(run)(direction), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    # The largest slice has 165 elements, whose signs lie in 7 words at most. The order
    # of the rows of a basis is drawn from 8 words.
    equations = jaxprs.equations(jax.make_jaxpr(run)(direction).jaxpr)
    mixed = [e.outvars[0].aval.size for e in equations if e.primitive.name == "xor"]
    assert mixed and max(mixed) <= 8


@pytest.mark.slow
@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("name", READS)
def test_programs_with_words_are_at_the_perturbed_point(name):
    assert_program_is_at_the_perturbed_points(
        DISTRIBUTIONS["rademacher"], PROGRAMS[name]
    )
