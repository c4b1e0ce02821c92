"""Positions of elements, as 64-bit counters in two 32-bit words."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src.names import checks_names
from radazo_jax._src.trees import STATIC

_WORD = 2**32


class Counter(NamedTuple):
    """64-bit integers in two 32-bit words.

    Attributes:
      hi: The high words: uint32, any shape.
      lo: The low words: uint32, the same shape.
    """

    hi: jax.Array
    lo: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Positions:
    """Positions of elements among all coordinates, which are numbered from 0.

    Attributes:
      hi: The high words of 64-bit numbers: uint32, any shape.
      lo: The low words: uint32, the same shape.
      dimension: d, how many coordinates there are: a Python integer.
    """

    hi: jax.Array
    lo: jax.Array
    dimension: int = dataclasses.field(metadata=STATIC)


@checks_names
def positions(
    shape: Sequence[int],
    indices: Sequence[jax.Array] | None = None,
    offset: int = 0,
    dimension: int | None = None,
) -> Positions:
    """Row-major flat positions of the elements of an array.

    Args:
      shape: The shape of the whole array.
      indices: The elements to compute, as a uint32 array per axis that broadcast
        together. `None` asks for all of them.
      offset: The position of the array's first element, a non-negative integer.
      dimension: d, how many coordinates there are; by default, those up to the
        array's last element.

    Returns:
      The positions, in the broadcast shape of `indices`.

    Examples:
      >>> from radazo_jax import random
      >>> random.positions((2, 3)).lo
      Array([[0, 1, 2],
             [3, 4, 5]], dtype=uint32)
    """
    shape = tuple(shape)
    if indices is None:
        indices = block(shape)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    out_shape = jnp.broadcast_shapes(*(index.shape for index in indices))
    # Arrays that end below 2^32 need no carries, and no high words.
    small = math.prod(shape) <= _WORD
    local = zero()
    for index, stride in zip(indices, strides, strict=True):
        if small:
            term = index * np.uint32(stride % _WORD)
            local = Counter(local.hi, local.lo + term)
        else:
            local = add(local, _multiply(index, stride))
    high, low = np.uint32(offset // _WORD), np.uint32(offset % _WORD)
    if small and int(low) + math.prod(shape) <= _WORD:
        result = Counter(local.hi + high, local.lo + low)
    else:
        result = add(local, Counter(jnp.asarray(high), jnp.asarray(low)))
    if dimension is None:
        dimension = offset + math.prod(shape)
    hi, lo = (jnp.broadcast_to(word, out_shape) for word in result)
    return Positions(hi, lo, dimension)


def block(
    sizes: Sequence[int], starts: Sequence[jax.typing.ArrayLike] | None = None
) -> list[jax.Array]:
    """Indices of a rectangular block, one broadcastable uint32 array per axis.

    Args:
      sizes: The block's shape.
      starts: Its first element, static or traced integers; `None` is the origin.

    Returns:
      `len(sizes)` arrays, each of rank `len(sizes)`.
    """
    rank = len(sizes)
    indices = [
        lax.broadcasted_iota(
            jnp.uint32, tuple(size if i == axis else 1 for i in range(rank)), axis
        )
        for axis, size in enumerate(sizes)
    ]
    if starts is None:
        return indices
    return [
        index + jnp.asarray(start).astype(jnp.uint32)
        for index, start in zip(indices, starts, strict=True)
    ]


def zero() -> Counter:
    """0, shape ()."""
    return Counter(jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32))


def add(a: Counter, b: Counter) -> Counter:
    """The sum modulo 2^64."""
    lo = a.lo + b.lo
    return Counter(a.hi + b.hi + (lo < b.lo).astype(jnp.uint32), lo)


def shift_left(word: jax.Array, distance: int) -> Counter:
    """A 32-bit word times 2^distance, modulo 2^64; `distance` is below 64."""
    if distance >= 32:
        return Counter(word << np.uint32(distance - 32), jnp.zeros_like(word))
    # By two shifts, because a shift by 32 is not defined.
    hi = word >> np.uint32(31 - distance) >> np.uint32(1)
    return Counter(hi, word << np.uint32(distance))


def shift_right(at: Counter | Positions, distance: int) -> Counter:
    """64-bit integers divided by 2^distance, which is from 1 to 31, rounded down."""
    down, up = np.uint32(distance), np.uint32(32 - distance)
    return Counter(at.hi >> down, (at.lo >> down) | (at.hi << up))


def concatenate(parts: Sequence[Positions]) -> Positions:
    """All positions as one, to be drawn together; `split` takes them apart.

    A part that is alone keeps its shape. Several become one axis.
    """
    if len(parts) == 1:
        return parts[0]
    return Positions(
        jnp.concatenate([jnp.ravel(part.hi) for part in parts]),
        jnp.concatenate([jnp.ravel(part.lo) for part in parts]),
        parts[0].dimension,
    )


def split(drawn: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Splits a draw into parts of these shapes."""
    if len(shapes) == 1:
        return [drawn]
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    parts = jnp.split(drawn, ends)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def low(word: jax.Array) -> Counter:
    """A 32-bit word as a 64-bit integer."""
    return Counter(jnp.zeros_like(word), word)


def _multiply(index: jax.Array, stride: int) -> Counter:
    """`index * stride` modulo 2^64."""
    product = wide_product(index, np.uint32(stride % _WORD))
    return Counter(product.hi + index * np.uint32(stride // _WORD % _WORD), product.lo)


def wide_product(a: jax.Array, b: np.uint32) -> Counter:
    """The 64 bits of a product of 32-bit words, by its 16-bit halves."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a_hi, a_lo, b_hi, b_lo = a >> half, a & mask, b >> half, b & mask
    lowest = a_lo * b_lo
    middle = a_hi * b_lo + (lowest >> half)
    other = a_lo * b_hi + (middle & mask)
    return Counter(a_hi * b_hi + (middle >> half) + (other >> half), a * b)
