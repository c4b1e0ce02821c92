"""What a law of random directions is, and the lazy directions that laws sample.

A direction is a key and a law, not an array: its elements are computed where they are
needed, from their positions. Positions run through the whole tree of parameters, leaf
after leaf, so that a direction does not depend on how the same coordinates are cut
into leaves, and no two leaves share their numbers.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src import counter


class Leaf(NamedTuple):
    """Where a leaf of the parameters lies among all coordinates.

    Attributes:
      shape: The leaf's shape.
      offset: How many coordinates the leaves before it have.
      path: Its path in the tree, as `jax.tree_util` gives it.
    """

    shape: tuple[int, ...]
    offset: int
    path: tuple[Any, ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "scale"],
    meta_fields=["law"],
)
@dataclasses.dataclass(frozen=True)
class Direction:
    """A random direction u, stored as the key from which its elements are computed.

    A pytree of two scalars, whatever the size of the parameters. It can be mapped by
    `vmap`, scanned, sharded and stored.

    Attributes:
      key: The typed key of the draw, shape ().
      scale: The factor of all elements, float32, shape ().
      law: The law that sampled it; static.
    """

    key: jax.Array
    scale: jax.Array
    law: "Law"


class Factors(NamedTuple):
    """A matrix of low rank, u = Σ_ρ a[…, ρ] b[…, ρ], by its two factors.

    Attributes:
      a: float32, of the rank of the leaf and one axis more, of size r; it has size 1
        along the axes of the columns.
      b: Likewise, with size 1 along the axes of the rows.
    """

    a: jax.Array
    b: jax.Array

    def product(self) -> jax.Array:
        return jnp.sum(self.a * self.b, axis=-1)


class Signs(NamedTuple):
    """Random signs of a leaf, 32 to a word.

    Attributes:
      words: uint32, [⌈size / 32⌉]: element i, in row-major order, is -1 where bit
        i mod 32 of word ⌊i / 32⌋ is set, else 1.
    """

    words: jax.Array

    def elements(self, shape: tuple[int, ...]) -> jax.Array:
        """The signs of a leaf of this shape, float32."""
        bits = self.words[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None, :]
        return sign(bits).reshape(-1)[: math.prod(shape)].reshape(shape)


def sign(word: jax.Array) -> jax.Array:
    """-1 where the lowest bit is set, else 1: the bit becomes the sign bit of 1."""
    return lax.bitcast_convert_type(
        (word << np.uint32(31)) | np.uint32(0x3F800000), jnp.float32
    )


# What is stored of a leaf's elements: themselves, or what makes them.
Draw = jax.Array | Factors | Signs


@dataclasses.dataclass(frozen=True)
class Law(abc.ABC):
    """A distribution of directions u over all coordinates of a tree.

    Every law is centered and symmetric, and has E[u uᵀ] = I / c. Estimators multiply by
    the factor c.
    """

    def sample(self, key: jax.typing.ArrayLike, params: Any) -> Direction:
        """Samples a direction for `params`.

        Args:
          key: A key; it is consumed.
          params: A tree of arrays, of which only the shapes are used.

        Returns:
          The direction.
        """
        key = counter.as_key(key)
        return Direction(key=key, scale=self._scale(key, params), law=self)

    def materialize(self, direction: Direction, params: Any) -> Any:
        """Computes all elements of `direction`.

        Args:
          direction: A direction that this law sampled.
          params: The tree of arrays it was sampled for.

        Returns:
          A tree like `params`, in the shapes and dtypes of its leaves.
        """
        return jax.tree.map(
            lambda u, p: u.astype(jnp.result_type(p)),
            elements(direction, params),
            params,
        )

    @abc.abstractmethod
    def factor(self, params: Any) -> float:
        """The c of E[u uᵀ] = I / c."""

    @abc.abstractmethod
    def draw(
        self, key: jax.Array, at: counter.Counter, num_coordinates: int
    ) -> jax.Array:
        """The elements at positions `at` before they are scaled: float32."""

    def block(
        self,
        direction: Direction,
        leaf: Leaf,
        indices: Sequence[jax.Array],
        num_coordinates: int,
    ) -> jax.Array:
        """The elements of `leaf` at `indices`, one array per axis: float32."""
        at = counter.positions(leaf.shape, indices, leaf.offset)
        return direction.scale * self.draw(direction.key, at, num_coordinates)

    def whole(
        self, direction: Direction, leaf: Leaf, num_coordinates: int
    ) -> jax.Array:
        """All elements of `leaf`: float32."""
        indices = counter.block(leaf.shape)
        return self.block(direction, leaf, indices, num_coordinates)

    def factors(self, direction: Direction, leaf: Leaf) -> Factors | None:
        """The factors of a leaf's elements, under a law that has such."""
        del direction, leaf
        return None

    def numbers(
        self, direction: Direction, leaves: Sequence[Leaf], num_coordinates: int
    ) -> Any:
        """What is to be stored of leaves whose elements are needed again."""
        return [self.whole(direction, leaf, num_coordinates) for leaf in leaves]

    def draws(self, numbers: Any, leaves: Sequence[Leaf]) -> list[Draw]:
        """`numbers` leaf by leaf."""
        del leaves
        return list(numbers)

    def num_stored(self, leaf: Leaf) -> int:
        """How many numbers make the elements of `leaf`."""
        return math.prod(leaf.shape)

    def normalization(self, draws: Sequence[Draw]) -> jax.Array:
        """What all the elements drawn are multiplied by: float32, shape ()."""
        del draws
        return jnp.ones((), jnp.float32)

    def _scale(self, key: jax.Array, params: Any) -> jax.Array:
        """`normalization` of a draw, which is made only where it is read."""
        del key, params
        return self.normalization(())


def layout(params: Any) -> list[Leaf]:
    """Where each leaf of `params` lies, in the order of `jax.tree.leaves`."""
    leaves, offset = [], 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaves.append(Leaf(tuple(jnp.shape(leaf)), offset, path))
        offset += math.prod(leaves[-1].shape)
    return leaves


def num_coordinates(leaves: Sequence[Leaf]) -> int:
    """d, the number of coordinates of all leaves together."""
    return sum(math.prod(leaf.shape) for leaf in leaves)


def elements(direction: Direction, params: Any) -> Any:
    """All elements of `direction`, as a tree like `params` of float32 arrays."""
    blocks = _draw_blocks(direction, tuple(layout(params)))
    return jax.tree.unflatten(jax.tree.structure(params), blocks)


# Compiled as a whole where it is called outside of any jit; part of the program where
# there is one.
@functools.partial(jax.jit, static_argnames="leaves", inline=True)
def _draw_blocks(
    direction: Direction, leaves: tuple[Leaf, ...]
) -> tuple[jax.Array, ...]:
    total = num_coordinates(leaves)
    return tuple(direction.law.whole(direction, leaf, total) for leaf in leaves)
