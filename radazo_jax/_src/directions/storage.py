"""Strategies by which the elements of a direction are computed and stored.

A strategy belongs to a distribution, and is private: custom distributions have `DENSE`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from radazo_jax._src import fusion
from radazo_jax._src.directions.elements import DenseElements, Elements, LazyElements
from radazo_jax._src.directions.layout import Leaf
from radazo_jax._src.numbers import counter


class Storage(Protocol):
    """A strategy to compute and to store the elements of a direction.

    Attributes:
      packs: Whether neighboring elements share words of random bits, so that elements
        computed together are cheaper than elements computed one by one.
    """

    packs: bool

    def lazy(
        self,
        distribution: Any,
        key: jax.Array,
        number: jax.Array,
        leaf: Leaf,
        dimension: int,
    ) -> Elements:
        """The elements of a leaf, unstored."""
        ...

    def block(
        self,
        distribution: Any,
        key: jax.Array,
        number: jax.Array,
        leaf: Leaf,
        dimension: int,
        indices: Sequence[jax.Array],
    ) -> Elements:
        """The elements of a block of a leaf, neighbors in row-major order.

        `indices` are made by `counter.block`.
        """
        ...

    def store(
        self,
        distribution: Any,
        key: jax.Array,
        number: jax.Array,
        leaves: tuple[Leaf, ...],
        dimension: int,
    ) -> tuple[Elements, ...]:
        """The elements of some leaves, each random number drawn once."""
        ...

    def size(self, distribution: Any, leaf: Leaf) -> int:
        """The number of random numbers from which the elements of a leaf are made."""
        ...


class Dense:
    """Elements are computed one by one, and stored as they are."""

    packs = False

    def lazy(
        self,
        distribution: Any,
        key: jax.Array,
        number: jax.Array,
        leaf: Leaf,
        dimension: int,
    ) -> Elements:
        """See `Storage`."""
        indices = tuple(counter.block(leaf.shape))
        return LazyElements(key, number, indices, distribution, leaf, dimension)

    def block(
        self,
        distribution: Any,
        key: jax.Array,
        number: jax.Array,
        leaf: Leaf,
        dimension: int,
        indices: Sequence[jax.Array],
    ) -> Elements:
        """See `Storage`."""
        return LazyElements(key, number, tuple(indices), distribution, leaf, dimension)

    def store(
        self,
        distribution: Any,
        key: jax.Array,
        number: jax.Array,
        leaves: tuple[Leaf, ...],
        dimension: int,
    ) -> tuple[Elements, ...]:
        """See `Storage`."""

        def draw(key: jax.Array, number: jax.Array) -> list[jax.Array]:
            lazy = (self.lazy(distribution, key, number, x, dimension) for x in leaves)
            return [of_leaf.values() for of_leaf in lazy]

        return tuple(map(DenseElements, fusion.compute_once(draw, key, number)))

    def size(self, distribution: Any, leaf: Leaf) -> int:
        """See `Storage`."""
        del distribution
        return leaf.size


DENSE = Dense()
