"""Where the leaves of a tree lie among all of its coordinates."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Leaf(NamedTuple):
    """Where a leaf of the parameters lies among all coordinates.

    Attributes:
      shape: The leaf's shape.
      offset: How many coordinates the leaves before it have.
      path: Its path in the tree, as `jax.tree_util.keystr` writes it.
    """

    shape: tuple[int, ...]
    offset: int
    path: str

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


def layout_of(params: Any) -> Layout:
    """The layout of a tree of arrays."""
    leaves, offset = [], 0
    found, treedef = jax.tree_util.tree_flatten_with_path(params)
    for path, array in found:
        shape = tuple(jnp.shape(array))
        leaves.append(Leaf(shape, offset, jax.tree_util.keystr(path)))
        offset += leaves[-1].size
    return Layout(tuple(leaves), treedef)
