"""Products with a perturbed matrix that is built block by block, as on a GPU.

The texts of lowered programs hold for JAX 0.10.2.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from radazo_jax._src.base import xla
from radazo_jax._src.perturb import products
from tests.helpers.compare import (
    DISTRIBUTIONS,
    Hashed,
    assert_program_is_at_the_perturbed_points,
    perturb_as_large,
)
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
