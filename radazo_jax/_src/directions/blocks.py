"""Blocks of a leaf, and weighted sums of many directions on one block.

What is computed of a block needs the memory of that block, and not of the leaf.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from radazo_jax._src.directions.distribution import Direction
from radazo_jax._src.directions.elements import (
    DenseElements,
    Elements,
    LowRankFactors,
)
from radazo_jax._src.directions.layout import Leaf
from radazo_jax._src.numbers import counter

# Number of elements in a block: 64 MiB of float32.
MAX_ELEMENTS = 2**24

# Directions are drawn together up to this many random numbers, or as many as the block
# has elements; beyond, in turn.
_TOGETHER = 2**20


class Block(NamedTuple):
    """A part of a leaf whose elements are neighbors in row-major order.

    Attributes:
      starts: The first index along each axis: integers, which may be traced.
      sizes: The number of indices along each axis.
    """

    starts: Sequence[jax.typing.ArrayLike]
    sizes: tuple[int, ...]

    @property
    def indices(self) -> list[jax.Array]:
        """The indices of the elements, as `counter.block` returns them."""
        return counter.block(self.sizes, self.starts)

    def read(self, array: jax.Array) -> jax.Array:
        """The block of an array like the leaf, of which some axes may have size 1."""
        sizes = [min(pair) for pair in zip(self.sizes, array.shape, strict=True)]
        return lax.dynamic_slice(array, self._starts_in(array), sizes)

    def write(self, array: jax.Array, part: jax.Array) -> jax.Array:
        """The array with this part in the place of the block."""
        return lax.dynamic_update_slice(array, part, self._starts_in(array))

    def _starts_in(self, array: jax.Array) -> list[jax.Array]:
        return [
            jnp.int32(0) if size == 1 else jnp.asarray(start, jnp.int32)
            for start, size in zip(self.starts, array.shape, strict=True)
        ]


def cuts(shape: tuple[int, ...], axes: Sequence[int]) -> bool:
    """Whether the blocks of an array are shorter than it along any of these axes."""
    return min(axes) <= _cut_axis(shape)


def _cut_axis(shape: tuple[int, ...]) -> int:
    """The axis along which an array is cut into blocks; -1 if it is one block.

    A block has one index along the axes before it, and all along the axes after it.
    """
    sizes = [math.prod(shape[axis:]) for axis in range(len(shape))]
    return max((i for i, n in enumerate(sizes) if n > MAX_ELEMENTS), default=-1)


def for_each(
    shape: tuple[int, ...], body: Callable[[Block, Any], Any], carry: Any
) -> Any:
    """Calls `carry = body(block, carry)` for each block of an array, in a loop.

    Args:
      shape: The shape of the array.
      body: A function of a block and a tree of arrays, to a tree of the same arrays.
      carry: The tree before the first block.

    Returns:
      The tree after the last block.
    """
    axis = _cut_axis(shape)
    if axis < 0:
        return body(Block((0,) * len(shape), shape), carry)
    before, after = shape[:axis], shape[axis + 1 :]
    size = max(MAX_ELEMENTS // math.prod(after), 1)
    count, rest = divmod(shape[axis], size)

    def of_size(size: int, count: int, first: int, carry: Any) -> Any:
        grid = (*before, count)

        def one(i: jax.Array, carry: Any) -> Any:
            *at, j = jnp.unravel_index(i, grid)
            starts: list[Any] = [*at, first + j * size, *(0 for _ in after)]
            return body(Block(starts, (*(1 for _ in before), size, *after)), carry)

        return lax.fori_loop(0, math.prod(grid), one, carry)

    carry = of_size(size, count, 0, carry)
    return of_size(rest, 1, count * size, carry) if rest else carry


def combine(
    coefficients: jax.Array,
    directions: Direction,
    starts: Sequence[jax.typing.ArrayLike],
    *,
    sizes: tuple[int, ...],
    leaf: Leaf,
    dimension: int,
) -> jax.Array:
    """Σᵢ coefficientsᵢ uᵢ on a block of a leaf.

    The time to compile does not grow with the number of directions.

    Args:
      coefficients: Real, [n], of the dtype in which the sum is taken.
      directions: Directions, stacked: [n], which are drawn here.
      starts: The starts of the block.
      sizes: The sizes of the block.
      leaf: The leaf.
      dimension: d, the number of coordinates of all leaves.

    Returns:
      The sum, of the sizes of the block.
    """
    dtype, block = coefficients.dtype, Block(starts, sizes)
    distribution = directions.distribution
    weights = coefficients * directions.scale.astype(dtype)

    def draw(key: jax.Array, number: jax.Array) -> Elements:
        drawn = distribution._storage.block(
            distribution, key, number, leaf, dimension, block.indices
        )
        if not isinstance(drawn, LowRankFactors):
            drawn = DenseElements(drawn.values())
        return jax.tree.map(lambda x: x.astype(dtype), drawn)

    def add(total: jax.Array, some: Any) -> tuple[jax.Array, None]:
        weights, keys, numbers = some
        return total + jax.vmap(draw)(keys, numbers).weighted_sum(weights), None

    terms = (weights, directions.key, directions.number)
    drawn = jax.eval_shape(draw, directions.key[0], directions.number[0])
    each = max(sum(x.size for x in jax.tree.leaves(drawn)), 1)
    together = max(_TOGETHER, math.prod(sizes)) // each
    count = len(weights)
    if together >= count:
        return add(jnp.zeros(sizes, dtype), terms)[0]
    together = max(together, 1)
    # Directions of weight zero fill the last turn.
    turns = -(-count // together)
    rest = turns * together - count
    padded = [
        jnp.concatenate([x, jnp.broadcast_to(fill, (rest,))]).reshape(turns, together)
        for x, fill in zip(
            terms, (jnp.zeros((), dtype), terms[1][0], terms[2][0]), strict=True
        )
    ]
    return lax.scan(add, jnp.zeros(sizes, dtype), tuple(padded))[0]
