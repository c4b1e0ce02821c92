"""The positions of the leaves of a tree among all of its coordinates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.numbers import counter
from radazo_jax._src.numbers.counter import Positions


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
        """The positions of its numbers, or of the numbers at some indices."""
        return counter.positions(self.shape, indices, self.offset, dimension)

    def indices(self, of_leaf: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The indices in this array of some elements of a leaf.

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
        return (*along, counter.block((*ones[1:], rank))[-1])


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
        """The layout with the axes of some leaves, by their paths."""
        leaves = (
            leaf._replace(axes=axes.get(leaf.path, leaf.axes)) for leaf in self.leaves
        )
        return self._replace(leaves=tuple(leaves))


def matrix_axes(remaining: Sequence[int]) -> MatrixAxes | None:
    """The last two of the remaining axes of a leaf; `None` if there are fewer."""
    if len(remaining) < 2:
        return None
    return MatrixAxes((remaining[-2],), (remaining[-1],))


def layout_of(params: optax.Params) -> Layout:
    """The layout of a tree of arrays."""
    leaves, offset = [], 0
    found, treedef = jax.tree_util.tree_flatten_with_path(params)
    for path, array in found:
        shape = tuple(jnp.shape(array))
        axes = matrix_axes(range(len(shape)))
        leaves.append(Leaf(shape, offset, jax.tree_util.keystr(path), axes))
        offset += leaves[-1].size
    return Layout(tuple(leaves), treedef)
