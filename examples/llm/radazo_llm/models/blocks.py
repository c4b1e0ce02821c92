"""Matrices in the blocks of a GGUF file: bytes, dequantized at each use.

    y = product(x, rows, functools.partial(dequantized, "Q4_K"))

A row of a matrix is a row of blocks, which hold integers of few bits and the scales and
minima of groups of them: value = scale · integer + minimum. llama.cpp defines the
layouts in `ggml-common.h`. Values are float32, and bitwise what the package `gguf`
computes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Values of a matrix that are dequantized at once, unless a row has more.
_PIECE = 1 << 23


class Parts(NamedTuple):
    """The contents of blocks.

    Attributes:
      steps: Integers, int8 or uint8 [..., groups of a block, values of a group].
      scale: float32 [..., groups of a block].
      minimum: As `scale`, or None if it is zero.
    """

    steps: jax.Array
    scale: jax.Array
    minimum: jax.Array | None = None


class Layout(NamedTuple):
    """A kind of blocks.

    Attributes:
      values: Number of values in a block.
      num_bytes: Size of a block.
      group: Number of values that share a scale.
      parts: Returns the contents of blocks uint8 [..., num_bytes].
    """

    values: int
    num_bytes: int
    group: int
    parts: Callable[[jax.Array], Parts]


def row_bytes(kind: str, inputs: int) -> int:
    """Returns the bytes of a row of so many values."""
    return inputs // LAYOUTS[kind].values * LAYOUTS[kind].num_bytes


def dequantized(kind: str, rows: jax.Array, *, inputs: int) -> jax.Array:
    """Returns the values in rows of bytes, float32 [rows, inputs].

    Args:
      kind: A key of `LAYOUTS`.
      rows: uint8 [rows, bytes], of which the first are the blocks.
      inputs: The number of values of a row.
    """
    steps, scale, minimum = _parts(kind, rows, inputs)
    # Otherwise XLA would unpack the scale of a group for each of its values.
    scale, minimum = lax.optimization_barrier((scale, minimum))
    shape = len(rows), -1, LAYOUTS[kind].group
    values = steps.astype(jnp.float32).reshape(shape)
    values = values * scale.reshape(*shape[:2], 1)
    if minimum is not None:
        values = values + minimum.reshape(*shape[:2], 1)
    return values.reshape(len(rows), inputs)


def product(
    x: jax.Array, rows: Any, dequantize: Callable[[Any], jax.Array], dtype: Any
) -> jax.Array:
    """Returns the products of inputs and a matrix, of which little is dequantized.

    Args:
      x: [..., inputs].
      rows: The rows of the matrix: a tree of arrays [outputs, ...].
      dequantize: Returns the values of some rows, [rows, inputs].
      dtype: The dtype of the result.

    Returns:
      [..., outputs].
    """
    dimensions = ((x.ndim - 1,), (1,)), ((), ())

    def of(part: Any) -> jax.Array:
        matrix = dequantize(part).astype(x.dtype)
        return lax.dot_general(x, matrix, dimensions, preferred_element_type=dtype)

    def at(start: jax.Array) -> jax.Array:
        return of(
            jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size), rows)
        )

    outputs = len(jax.tree.leaves(rows)[0])
    size = max(1, _PIECE // x.shape[-1])
    if outputs <= size:
        return of(rows)
    whole = outputs // size
    starts = size * np.arange(whole, dtype=np.int32)
    found = jnp.moveaxis(lax.map(at, starts), 0, -2)
    found = found.reshape(*x.shape[:-1], whole * size)
    if whole * size == outputs:
        return found
    rest = jax.tree.map(lambda a: a[whole * size :], rows)
    return jnp.concatenate([found, of(rest)], axis=-1)


def _parts(kind: str, rows: jax.Array, inputs: int) -> Parts:
    used = rows[:, : row_bytes(kind, inputs)]
    return LAYOUTS[kind].parts(used.reshape(len(rows), -1, LAYOUTS[kind].num_bytes))


# --- Layouts ----------------------------------------------------------------------


def _floats(raw: jax.Array) -> jax.Array:
    """The float16 numbers in bytes [..., 2 n], float32 [..., n]."""
    pairs = raw.reshape(*raw.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)


def _bits(packed: jax.Array, width: int, groups: int = 1) -> jax.Array:
    """Integers of some bits, uint8 [..., values], from bytes [..., n].

    Each of the groups of bytes has the lowest bits of its values first, then the next.
    """
    parts = packed.reshape(*packed.shape[:-1], groups, 1, -1)
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    shifts = shifts.reshape((1,) * (parts.ndim - 2) + (-1, 1))
    found = (parts >> shifts) & np.uint8((1 << width) - 1)
    return found.reshape(*packed.shape[:-1], -1)


def _fifth_bits(raw: jax.Array) -> jax.Array:
    """The bits of bytes [..., n], from the lowest of the first, times 16."""
    shifts = np.arange(8, dtype=np.uint8).reshape((1,) * raw.ndim + (-1,))
    bits = (raw[..., None] >> shifts) & np.uint8(1)
    return bits.reshape(*raw.shape[:-1], -1) << np.uint8(4)


def _signed(steps: jax.Array, zero: int) -> jax.Array:
    return steps.astype(jnp.int8) - np.int8(zero)


def _small(bits: int, with_minimum: bool) -> Layout:
    """Q4_0, Q4_1, Q5_0 and Q5_1: one group of 32 values."""
    head = 4 if with_minimum else 2
    low = head + (4 if bits == 5 else 0)

    def parts(b: jax.Array) -> Parts:
        floats, steps = _floats(b[..., :head]), _bits(b[..., low:], 4)
        if bits == 5:
            steps = steps | _fifth_bits(b[..., head:low])
        if not with_minimum:
            steps = _signed(steps, 1 << (bits - 1))
        minimum = floats[..., 1:] if with_minimum else None
        return Parts(steps[..., None, :], floats[..., :1], minimum)

    return Layout(32, low + 16, 32, parts)


def _q8_0(b: jax.Array) -> Parts:
    steps = lax.bitcast_convert_type(b[..., 2:], jnp.int8)
    return Parts(steps[..., None, :], _floats(b[..., :2]))


def _six_bits(raw: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The scales and the minima of 8 groups, integers below 64, in 12 bytes."""
    first, second, third = (raw[..., i : i + 4] for i in (0, 4, 8))
    low, high, top = np.uint8(63), np.uint8(4), np.uint8(6)
    half = np.uint8(15)

    def joined(early: jax.Array, late: jax.Array) -> jax.Array:
        late = late | ((early >> top) << high)
        found = jnp.concatenate([early & low, late], axis=-1)
        return found.astype(jnp.float32)

    return joined(first, third & half), joined(second, third >> high)


def _k(bits: int) -> Layout:
    """Q4_K and Q5_K: 8 groups of 32 values, whose scales have scales."""
    low = 16 + (32 if bits == 5 else 0)

    def parts(b: jax.Array) -> Parts:
        floats, steps = _floats(b[..., :4]), _bits(b[..., low:], 4, groups=4)
        if bits == 5:
            steps = steps | (_bits(b[..., 16:low], 1) << np.uint8(4))
        scale, minimum = _six_bits(b[..., 4:16])
        steps = steps.reshape(*b.shape[:-1], 8, 32)
        return Parts(steps, floats[..., :1] * scale, -(floats[..., 1:] * minimum))

    return Layout(256, low + 128, 32, parts)


def _q6_k(b: jax.Array) -> Parts:
    low, high = _bits(b[..., :128], 4, groups=2), _bits(b[..., 128:192], 2, groups=2)
    steps = _signed(low | (high << np.uint8(4)), 32)
    scale = lax.bitcast_convert_type(b[..., 192:208], jnp.int8).astype(jnp.float32)
    steps = steps.reshape(*b.shape[:-1], 16, 16)
    return Parts(steps, _floats(b[..., 208:]) * scale)


LAYOUTS = {
    "Q4_0": _small(4, with_minimum=False),
    "Q4_1": _small(4, with_minimum=True),
    "Q5_0": _small(5, with_minimum=False),
    "Q5_1": _small(5, with_minimum=True),
    "Q8_0": Layout(32, 34, 32, _q8_0),
    "Q4_K": _k(4),
    "Q5_K": _k(5),
    "Q6_K": Layout(256, 210, 16, _q6_k),
}
