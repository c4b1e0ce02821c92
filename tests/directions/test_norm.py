"""The exact norm of a direction: the same bits however it is computed."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from radazo_jax._src.directions import norm
from radazo_jax._src.directions.layout import layout_of
from tests.helpers.tables import jit

PARAMS = {"w": jnp.zeros((30, 20)), "b": jnp.zeros(101)}


def test_pieces_do_not_change_a_bit(monkeypatch):
    """CPUs draw small pieces, GPUs large ones, TPUs the whole."""
    layout = layout_of(PARAMS)

    @jit
    def inverse_norms(key):
        def in_pieces(size):
            monkeypatch.setattr(norm, "_PIECE_ON_CPU", size)
            return norm.inverse_norm(zo.sphere(), key, jnp.uint32(0), layout)

        d = layout.dimension
        return jnp.stack([in_pieces(size) for size in (d, 64, 256, d - 1)])

    whole, *in_pieces = inverse_norms(jax.random.key(0))
    assert np.isfinite(whole)
    np.testing.assert_array_equal(in_pieces, [whole] * 3)


def test_only_tpus_draw_all_at_once(monkeypatch):
    """Other compilers would store the numbers of whole leaves to sum their squares."""
    monkeypatch.setattr(norm, "_PIECE_ON_CPU", 64)
    monkeypatch.setattr(norm, "_PIECE", 256)

    def largest(platform):
        exported = jax.export.export(
            jax.jit(lambda key: zo.sphere().sample(key, PARAMS).scale),
            platforms=[platform],
        )(jax.random.key(0))
        shapes = re.findall(r"tensor<([\dx]+)xf32>", exported.mlir_module())
        return max(math.prod(map(int, shape.split("x"))) for shape in shapes)

    assert [largest(p) for p in ("cpu", "cuda", "rocm", "tpu")] == [64, 256, 256, 600]
