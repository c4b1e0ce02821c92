"""Distributions of random directions, and the directions sampled from them.

A direction is a distribution, a key and a number, not an array: its elements are
computed from their positions when they are needed. Positions run through the whole
tree of parameters, leaf after leaf, so that a direction does not depend on how the same
coordinates are cut into leaves, and no two leaves share their numbers.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from radazo_jax._src import xla
from radazo_jax._src.configuration import Configuration
from radazo_jax._src.directions import norm
from radazo_jax._src.directions.elements import (
    DenseElements,
    Elements,
    LazyElements,
    draw,
)
from radazo_jax._src.directions.layout import Layout, Leaf, layout_of
from radazo_jax._src.numbers import counter, keys
from radazo_jax._src.numbers.counter import Counter, Positions
from radazo_jax._src.trees import STATIC

# The smallest arrays, with at most this many numbers together, are drawn as one: each
# draw is code of its own, which a CPU compiles in 50 ms. Larger arrays keep their
# shape, because accelerators copy what is cut out of a flat array.
MAX_TOGETHER = 2**16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Direction:
    """A random direction u, as the numbers from which it can be computed anywhere.

    A pytree of three scalars whatever the size of the parameters: it can be vmapped,
    scanned, sharded and stored.

    Attributes:
      key: The typed key of the draw, shape ().
      number: The number of the direction among those that share the key: uint32,
        shape ().
      scale: The factor of all elements, float32, shape ().
      distribution: The distribution that sampled it; static.
      cached: The stored elements of each leaf, `None` if they are not stored.
    """

    key: jax.Array
    number: jax.Array
    scale: jax.Array
    distribution: "Distribution" = dataclasses.field(metadata=STATIC)
    cached: tuple[Elements, ...] | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Distribution(Configuration, abc.ABC):
    """A distribution of directions u over all coordinates of a tree.

    Distributions are centered and symmetric. A custom distribution is a subclass with
    two methods, `factor` and `draw`, and up to two flags. With fields, make it a frozen
    dataclass, so that distributions with equal fields are equal and can be static under
    `jit`; fields must be hashable.

    Attributes:
      sequential: Whether the directions of a run depend on one another, as draws
        without replacement do. `draw` then gets the key of the run, and the number of
        the direction in the run. Otherwise each direction has a key of its own.
      normalized: Whether directions are divided by their Euclidean norm over all
        coordinates. `draw` then returns elements before this division, of absolute
        values below 8. The norm is exact, so that it does not depend on how the
        parameters are sharded. If an element is larger, all elements are NaN. Draw
        elements of size about 1: the norm of much smaller ones is imprecise.

    Raises:
      TypeError: When an instance is made of a subclass with fields that is not a frozen
        dataclass, or of one with an `__eq__` and without a `__hash__`.

    Examples:
      >>> import dataclasses
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> @dataclasses.dataclass(frozen=True)
      ... class Uniform(zo.Distribution):
      ...     width: float = 1.0
      ...
      ...     def factor(self, dimension):
      ...         return 3 / self.width**2
      ...
      ...     def draw(self, key, number, at):
      ...         return self.width * (2 * zo.random.uniform(key, at) - 1)
      >>> distribution, params = Uniform(0.5), jnp.zeros(4)
      >>> u = distribution.materialize(distribution.sample(0, params), params)
      >>> bool((abs(u) <= 0.5).all())
      True
    """

    sequential: ClassVar[bool] = False
    normalized: ClassVar[bool] = False

    # The backend, "gpu" or "cpu", on which elements are cheaper together than one by
    # one, because neighbors share words of random bits. On a CPU, what is drawn
    # together is stored, so elements that a program reads are drawn one by one.
    _together: ClassVar[str | None] = None

    # Whether all elements are known to fit into the exact norm.
    _bounded: ClassVar[bool] = False

    @abc.abstractmethod
    def factor(self, dimension: int) -> float:
        """The c of E[u uᵀ] = I / c, by which estimators multiply.

        Args:
          dimension: d, the number of coordinates of all leaves together.
        """

    @abc.abstractmethod
    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        """Computes the elements of a direction at some positions, each on its own.

        Args:
          key: A typed key: the direction's own or, if the distribution is `sequential`,
            the key that it shares.
          number: The number of the direction: uint32, shape ().
          at: The positions, of any shape; `at.dimension` is d. `radazo_jax.random`
            draws numbers at them.

        Returns:
          The elements: float32, of the shape of the positions.
        """

    def sample(self, key: jax.typing.ArrayLike, params: optax.Params) -> Direction:
        """Samples a direction for `params`.

        Args:
          key: A key; it is consumed.
          params: A tree of arrays, of which only the shapes are used.

        Returns:
          The direction, number 0 under the key.
        """
        layout = self._annotate(layout_of(params), params)
        return sample(self, keys.as_key(key), jnp.uint32(0), layout)

    def materialize(self, direction: Direction, params: optax.Params) -> optax.Params:
        """Computes all elements of `direction`.

        Args:
          direction: A direction that this distribution sampled.
          params: The tree of arrays it was sampled for.

        Returns:
          A tree like `params`, in the shapes and dtypes of its leaves.
        """
        layout = self._annotate(layout_of(params), params)
        return jax.tree.map(
            lambda u, p: u.astype(jnp.result_type(p)),
            jax.tree.unflatten(layout.treedef, elements(direction, layout)),
            params,
        )

    def _annotate(self, layout: Layout, params: optax.Params) -> Layout:
        """The layout with the axes that the distribution itself prescribes."""
        del params
        return layout

    # The elements of a leaf, computed one by one and stored as they are. Built-in
    # distributions know of cheaper ways.

    def _lazy(
        self, key: jax.Array, number: jax.Array, leaf: Leaf, dimension: int
    ) -> Elements:
        """The elements of a leaf, unstored."""
        indices = tuple(counter.block(leaf.shape))
        order = tuple(range(len(leaf.shape)))
        return LazyElements(key, number, indices, self, leaf, dimension, order)

    def _block(
        self,
        key: jax.Array,
        number: jax.Array,
        leaf: Leaf,
        dimension: int,
        indices: Sequence[jax.Array],
    ) -> Elements:
        """The elements of a block of a leaf, neighbors in row-major order.

        `indices` are made by `counter.block`.
        """
        return LazyElements(key, number, tuple(indices), self, leaf, dimension)

    def _store(
        self,
        keys: jax.Array,
        numbers: jax.Array,
        leaves: tuple[Leaf, ...],
        dimension: int,
    ) -> tuple[Elements, ...]:
        """The elements of some leaves of K directions, stacked, each number drawn once.

        Args:
          keys: The keys of the directions, [K].
          numbers: The numbers of the directions, uint32, [K].
          leaves: The leaves.
          dimension: d, the number of coordinates of all leaves of the layout.
        """
        parts = [Part(leaf.shape, leaf.offset) for leaf in leaves]

        def draw_at(key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
            return draw(self, key, number, at)

        drawn = drawn_once(draw_at, keys, numbers, parts, dimension)
        return tuple(map(DenseElements, drawn))

    def _neighbors(
        self,
        key: jax.Array,
        number: jax.Array,
        first: Counter,
        size: int,
        dimension: int,
    ) -> jax.Array:
        """The elements of `size` neighbors from a position on, [size].

        The first position is a multiple of 32.
        """
        after = counter.low(jnp.arange(size, dtype=jnp.uint32))
        at = Positions(*counter.add(first, after), dimension)
        return draw(self, key, number, at)

    def _size(self, leaf: Leaf) -> int:
        """The number of random numbers from which the elements of a leaf are made."""
        return leaf.size


class UnitNorm(Distribution):
    """Distributions of directions of norm 1, for which E[u uᵀ] = I/d."""

    def factor(self, dimension: int) -> float:
        return float(dimension)


def sample(
    distribution: Distribution, key: jax.Array, number: jax.Array, layout: Layout
) -> Direction:
    """The direction of this number under a key, which is typed.

    The elements of a normalized direction are all drawn once, to find their norm.
    """
    scale = jnp.ones((), jnp.float32)
    if distribution.normalized:
        scale = norm.inverse_norm(distribution, key, number, layout)
    return Direction(key, number, scale, distribution)


def lazy(direction: Direction, leaf: Leaf, dimension: int) -> Elements:
    """The elements of a leaf before they are scaled, unstored."""
    distribution = direction.distribution
    return distribution._lazy(direction.key, direction.number, leaf, dimension)


def whole(direction: Direction, leaf: Leaf, dimension: int) -> jax.Array:
    """All elements of a leaf before they are scaled, computed together: float32."""
    distribution = direction.distribution

    def element_by_element(direction: Direction) -> jax.Array:
        return lazy(direction, leaf, dimension).values()

    if distribution._together is None:
        return element_by_element(direction)

    def together(direction: Direction) -> jax.Array:
        key, number = direction.key[None], direction.number[None]
        [stored] = distribution._store(key, number, (leaf,), dimension)
        values: jax.Array = jax.tree.map(lambda x: x[0], stored).values()
        return values

    # XLA's CPU backend would compute each word for each of its elements.
    return lax.platform_dependent(direction, cpu=together, default=element_by_element)


# Compiled as a whole outside of `jit`, and a part of the program under `jit`.
@functools.partial(jax.jit, static_argnames="layout", inline=True)
def elements(direction: Direction, layout: Layout) -> list[jax.Array]:
    """All elements of `direction`, leaf by leaf, scaled: float32."""
    if direction.cached is not None:
        return [direction.scale * stored.values() for stored in direction.cached]
    return [
        direction.scale * whole(direction, leaf, layout.dimension)
        for leaf in layout.leaves
    ]


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
    draw_at: Callable[[jax.Array, jax.Array, Positions], jax.Array],
    keys: jax.Array,
    numbers: jax.Array,
    parts: Sequence[Part],
    dimension: int,
    max_together: int = MAX_TOGETHER,
) -> list[jax.Array]:
    """Draws and stores the numbers of K directions at the positions of some arrays.

    Args:
      draw_at: `draw_at(key, number, at)` draws numbers of a direction at positions.
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
            return draw_at(key, number, counter.concatenate(at))

        return list(map(of_group, groups))

    drawn = xla.compute_once(jax.vmap(draw_all), keys, numbers)
    # Split apart from the draw: XLA's CPU backend would draw everything for each part.
    # And apart from the sums of the parts, which it would round otherwise in a loop.
    found: dict[Part, jax.Array] = {}
    for group, together in zip(groups, drawn, strict=True):
        shapes = [part.shape for part in group]
        split = jax.vmap(functools.partial(counter.split, shapes=shapes))
        alone = len(group) == 1
        arrays = split(together) if alone else xla.compute_once(split, together)
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
