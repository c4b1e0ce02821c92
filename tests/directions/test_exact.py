"""Exact sums of squares, and norms: the same bits in any order."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.directions import generator, norm
from radazo_jax._src.directions.layout import layout_of
from tests.helpers.tables import jit


def normals(*shape):
    def draw(key):
        return generator.fast_normal(key, generator.positions(shape))

    return jit(draw)(jax.random.key(7))


def sum_of_squares(x, fraction):
    """Compiled anew, whatever is patched."""
    total = jit(lambda x: norm.sum_of_squares(x, fraction))(x)
    return total, as_int(total)


def as_int(total):
    return int(total.hi) * 2**32 + int(total.lo)


def units(x, fraction):
    """The squares, rounded as float32 and then to units, summed without rounding."""
    squares = np.square(np.asarray(x)).astype(np.float64).ravel()
    return sum(int(u) for u in np.rint(squares * 2.0**fraction))


@pytest.mark.parametrize(
    "shape", [(0,), (), (2,), (300,), (50, 100), (300, 7, 40)], ids=str
)
def test_is_the_sum_of_integers(shape):
    x = normals(*shape)
    fraction = norm.fraction_bits(x.size)
    total, found = sum_of_squares(x, fraction)
    assert found == units(x, fraction)
    expected = np.sum(np.square(np.asarray(x, np.float64)))
    if x.size:
        np.testing.assert_allclose(norm.as_float(total, fraction), expected, rtol=2e-7)


@pytest.mark.parametrize("shape", [(40, 30, 90), (9000, 3), (20, 1)], ids=str)
def test_leading_axes_are_summed_again(monkeypatch, shape):
    monkeypatch.setattr(norm, "_MAX_AT_ONCE", 1000)
    x = normals(*shape)
    for fraction in (10, 30):
        assert sum_of_squares(x, fraction)[1] == units(x, fraction)


@pytest.mark.parametrize("log", [0, 10, 20, 24, 31, 36])
def test_the_fraction_is_enough(log):
    """The rounding of N squares to units, relative to their sum, N."""
    fraction = norm.fraction_bits(2**log)
    error = 2.0**-fraction / np.sqrt(12) * 2.0 ** (log / 2) / 2**log
    assert error <= 2.0**-25
    assert log + norm._INTEGER_BITS + fraction <= 64


def test_is_the_same_where_integers_are_wider():
    x = normals(500)
    with jax.enable_x64(True):
        total = jax.jit(lambda x: norm.sum_of_squares(x, 30))(x)
    assert total.lo.dtype == jnp.uint32
    assert as_int(total) == units(x, 30)


def test_the_largest_normals_fit():
    x = jnp.full((10,), 7.99, jnp.float32)
    fraction = norm.fraction_bits(x.size)
    assert sum_of_squares(x, fraction)[1] == units(x, fraction)


def test_a_sum_of_nothing_can_be_divided_by():
    total = norm.sum_of_squares(jnp.zeros(3), 48)
    assert as_int(total) == 0
    assert float(norm.as_float(total, 48)) == 2.0**-48


# --- Norms of directions --------------------------------------------------------


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
