"""Positions of the leaves of a tree, and groups of neighbors drawn together."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src.directions import generator
from radazo_jax._src.directions.generator import Counter, Positions


class Part(NamedTuple):
    """An array of random numbers.

    Attributes:
      shape: Its shape.
      offset: The position of its first number.
    """

    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def positions(
        self, dimension: int, indices: Sequence[jax.Array] | None = None
    ) -> Positions:
        """Returns the positions of its numbers, or of the numbers at some indices."""
        return generator.positions(self.shape, indices, self.offset, dimension)

    def indices(self, of_leaf: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Returns the indices in this array of some elements of a leaf.

        A factor has an additional axis, the rank. Along an axis of size 1, it has the
        index 0 for all elements.
        """
        if len(self.shape) == len(of_leaf):
            return tuple(of_leaf)
        *sizes, rank = self.shape
        ones = (1,) * len(self.shape)
        along = [
            jnp.zeros(ones, jnp.uint32) if size == 1 else index[..., None]
            for size, index in zip(sizes, of_leaf, strict=True)
        ]
        return (*along, generator.block((*ones[1:], rank))[-1])


class MatrixAxes(NamedTuple):
    """The axes of a leaf that form matrices.

    Attributes:
      rows: The axes that index the rows.
      columns: The axes that index the columns. All other axes stack matrices.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]


class Leaf(NamedTuple):
    """The place of a leaf among all coordinates.

    Attributes:
      shape: The leaf's shape.
      offset: Number of coordinates in the leaves before it.
      path: Its path in the tree, as `jax.tree_util.keystr` writes it.
      axes: The axes that form matrices, `None` if the leaf is not a matrix. Without
        a function that uses the leaf, the last two axes form matrices.
    """

    shape: tuple[int, ...]
    offset: int
    path: str
    axes: MatrixAxes | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Layout(NamedTuple):
    """A tree of parameters without its arrays. It can be static under `jit`.

    Attributes:
      leaves: The leaves, in the order of `jax.tree.leaves`.
      treedef: The structure of the tree.
    """

    leaves: tuple[Leaf, ...]
    treedef: Any

    @property
    def dimension(self) -> int:
        """d, the number of coordinates of all leaves together."""
        return sum(leaf.size for leaf in self.leaves)

    def with_axes(self, axes: Mapping[str, MatrixAxes | None]) -> "Layout":
        """Returns the layout with the axes of some leaves, by their paths."""
        leaves = (
            leaf._replace(axes=axes.get(leaf.path, leaf.axes)) for leaf in self.leaves
        )
        return self._replace(leaves=tuple(leaves))


def matrix_axes(remaining: Sequence[int]) -> MatrixAxes | None:
    """Returns the last two of the remaining axes of a leaf; `None` if fewer remain."""
    if len(remaining) < 2:
        return None
    return MatrixAxes((remaining[-2],), (remaining[-1],))


def layout_of(params: optax.Params) -> Layout:
    """Returns the layout of a tree of arrays."""
    leaves, offset = [], 0
    found, treedef = jax.tree_util.tree_flatten_with_path(params)
    for path, array in found:
        shape = tuple(jnp.shape(array))
        axes = matrix_axes(range(len(shape)))
        leaves.append(Leaf(shape, offset, jax.tree_util.keystr(path), axes))
        offset += leaves[-1].size
    return Layout(tuple(leaves), treedef)


# So many neighbors, from a multiple of it on, are drawn together.
GROUP = 32


class Packing(NamedTuple):
    """The draw of the numbers of a group of neighbors, as a few units.

    Their absolute values are below 8, so that they fit into the exact norm.

    Attributes:
      per_group: The number of units of a group: a power of two. Units are numbered
        through all groups.
      width: The number of 32-bit words of a unit.
      draw: `draw(key, number, at)` draws the units of these numbers.
      unpack: `unpack(units, start, shape)` returns the elements of an array, of which
        the first is number `start` of the first group. Units may be stacked.
      choose: `choose(size, stored)` returns a function of two functions without
        arguments that calls the first, which draws units, or the second, which draws
        the numbers one by one. `stored` tells whether so many numbers may be stored.
        Otherwise the draw should be fused into whatever reads it.
    """

    per_group: int
    width: int
    draw: Callable[[jax.Array, jax.Array, Positions], jax.Array]
    unpack: Callable[[jax.Array, Any, tuple[int, ...]], Any]
    choose: Callable[[int, bool], Callable[..., Any]]

    def keeps(self, start: jax.typing.ArrayLike | None) -> bool:
        """Returns whether nothing but a rearrangement is left to do with stored units.

        Otherwise XLA's CPU backend would align a unit for each of its elements.
        """
        return self.width > 1 or (isinstance(start, int) and start == 0)

    def num_units(self, start: jax.typing.ArrayLike | None, size: int) -> int:
        """Returns the number of units in which so many neighbors lie."""
        if isinstance(start, int) and self.keeps(start):
            return self.per_group * -(-(start + size) // GROUP)
        # One more, for an unknown start, or to be shifted into the last.
        return self.per_group * (-(-size // GROUP) + 1)

    def first(self, at: Positions) -> Counter:
        """Returns the number of the first unit of the group that has a position."""
        group = Counter(at.hi, at.lo & np.uint32(2**32 - GROUP))
        return generator.shift_right(group, (GROUP // self.per_group).bit_length() - 1)

    def units(self, part: Part) -> Part:
        """Returns the units in which the numbers of an array lie."""
        group, start = divmod(part.offset, GROUP)
        return Part((self.num_units(start, part.size),), self.per_group * group)
