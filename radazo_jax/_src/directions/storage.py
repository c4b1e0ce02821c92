"""Strategies by which the elements of a direction are computed and stored.

A strategy belongs to a distribution, and is private: custom distributions have `DENSE`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from radazo_jax._src import fusion
from radazo_jax._src.directions.elements import (
    DenseElements,
    Elements,
    LazyElements,
    draw,
)
from radazo_jax._src.directions.layout import Leaf
from radazo_jax._src.numbers import counter
from radazo_jax._src.numbers.counter import Positions

# The smallest arrays, with at most this many numbers together, are drawn as one: each
# draw is code of its own, which a CPU compiles in 50 ms. Larger arrays keep their
# shape, because accelerators copy what is cut out of a flat array.
_MAX_TOGETHER = 2**16


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
        keys: jax.Array,
        numbers: jax.Array,
        leaves: tuple[Leaf, ...],
        dimension: int,
    ) -> tuple[Elements, ...]:
        """The elements of some leaves of K directions, stacked, each number drawn once.

        Args:
          distribution: The distribution.
          keys: The keys of the directions, [K].
          numbers: The numbers of the directions, uint32, [K].
          leaves: The leaves.
          dimension: d, the number of coordinates of all leaves of the layout.
        """
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
        order = tuple(range(len(leaf.shape)))
        return LazyElements(key, number, indices, distribution, leaf, dimension, order)

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
        keys: jax.Array,
        numbers: jax.Array,
        leaves: tuple[Leaf, ...],
        dimension: int,
    ) -> tuple[Elements, ...]:
        """See `Storage`."""
        parts = [Part(leaf.shape, leaf.offset) for leaf in leaves]

        def draw_at(key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
            return draw(distribution, key, number, at)

        drawn = drawn_once(draw_at, keys, numbers, parts, dimension)
        return tuple(map(DenseElements, drawn))

    def size(self, distribution: Any, leaf: Leaf) -> int:
        """See `Storage`."""
        del distribution
        return leaf.size


DENSE = Dense()


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


def drawn_once(
    draw: Callable[[jax.Array, jax.Array, Positions], jax.Array],
    keys: jax.Array,
    numbers: jax.Array,
    parts: Sequence[Part],
    dimension: int,
    max_together: int = _MAX_TOGETHER,
) -> list[jax.Array]:
    """Draws and stores the numbers of K directions at the positions of some arrays.

    Args:
      draw: `draw(key, number, at)` draws numbers of a direction at positions.
      keys: The keys of the directions, [K].
      numbers: The numbers of the directions, uint32, [K].
      parts: The arrays.
      dimension: d, the number of coordinates.
      max_together: Number of numbers that are drawn as one array, at most.

    Returns:
      The numbers of each part, [K, *shape].
    """
    groups = _groups(parts, max_together)

    def draw_all(key: jax.Array, number: jax.Array) -> list[jax.Array]:
        def of_group(group: Sequence[Part]) -> jax.Array:
            at = [part.positions(dimension) for part in group]
            return draw(key, number, counter.concatenate(at))

        return list(map(of_group, groups))

    drawn = fusion.compute_once(jax.vmap(draw_all), keys, numbers)
    # Split apart from the draw: XLA's CPU backend would draw everything for each part.
    # And apart from the sums of the parts, which it would round otherwise in a loop.
    found: dict[Part, jax.Array] = {}
    for group, together in zip(groups, drawn, strict=True):
        shapes = [part.shape for part in group]
        split = jax.vmap(functools.partial(counter.split, shapes=shapes))
        alone = len(group) == 1
        arrays = split(together) if alone else fusion.compute_once(split, together)
        found |= zip(group, arrays, strict=True)
    return [found[part] for part in parts]


def _groups(parts: Sequence[Part], max_together: int) -> list[list[Part]]:
    """The parts that are drawn as one array: the smallest, and each other alone."""
    total, small, others = 0, [], []
    for part in sorted(parts, key=lambda part: part.size):
        total += part.size
        if total <= max_together:
            small.append(part)
        else:
            others.append([part])
    return [small, *others] if small else others
