"""How the elements of a direction are computed and stored.

A strategy belongs to a distribution, and is private: custom distributions have `DENSE`.
"""

from typing import Any, Protocol

import jax

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
        self, law: Any, key: jax.Array, number: jax.Array, leaf: Leaf, dimension: int
    ) -> Elements:
        """The elements of a leaf, unstored."""
        ...

    def store(
        self,
        law: Any,
        key: jax.Array,
        number: jax.Array,
        leaves: tuple[Leaf, ...],
        dimension: int,
    ) -> tuple[Elements, ...]:
        """The elements of some leaves, computed for storage."""
        ...

    def size(self, law: Any, leaf: Leaf) -> int:
        """The number of random numbers from which the elements of a leaf are made."""
        ...


class Dense:
    """Elements are computed one by one, and stored as they are."""

    packs = False

    def lazy(
        self, law: Any, key: jax.Array, number: jax.Array, leaf: Leaf, dimension: int
    ) -> Elements:
        """See `Storage`."""
        indices = tuple(counter.block(leaf.shape))
        return LazyElements(key, number, indices, law, leaf, dimension)

    def store(
        self,
        law: Any,
        key: jax.Array,
        number: jax.Array,
        leaves: tuple[Leaf, ...],
        dimension: int,
    ) -> tuple[Elements, ...]:
        """See `Storage`."""
        drawn = [self.lazy(law, key, number, leaf, dimension) for leaf in leaves]
        return tuple(DenseElements(of_leaf.values()) for of_leaf in drawn)

    def size(self, law: Any, leaf: Leaf) -> int:
        """See `Storage`."""
        del law
        return leaf.size


DENSE = Dense()
