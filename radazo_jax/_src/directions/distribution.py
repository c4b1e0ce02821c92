"""Distributions of random directions, and the directions sampled from them.

A direction is a distribution, a key and a number, not an array: its elements are
computed from their positions when they are needed. Positions run through the whole
tree of parameters, leaf after leaf, so that a direction does not depend on how the same
coordinates are cut into leaves, and no two leaves share their numbers.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from radazo_jax._src.base import keys, xla
from radazo_jax._src.base.configuration import Configuration
from radazo_jax._src.base.trees import STATIC, Tree
from radazo_jax._src.directions import generator, norm
from radazo_jax._src.directions.elements import (
    DenseElements,
    Elements,
    LazyElements,
    draw,
)
from radazo_jax._src.directions.generator import Positions
from radazo_jax._src.directions.layout import (
    GROUP,
    Layout,
    Leaf,
    Packing,
    Part,
    layout_of,
)

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

    def tree(self, layout: Layout) -> Tree:
        """Returns all elements, as a tree like the parameters: float32."""
        return jax.tree.unflatten(layout.treedef, elements(self, layout))

    def inner_products(self, tree: Tree, layout: Layout) -> jax.Array:
        """Computes ⟨uₖ, w⟩ of stacked directions with a tree w: float32, [K]."""

        def program(directions: Direction, tree: Tree) -> jax.Array:
            total = jnp.zeros(len(directions.scale), jnp.float32)
            for i, w in enumerate(jax.tree.leaves(tree)):
                flat = w.astype(jnp.float32).reshape(-1)
                us = rows(directions, layout, i)
                total += jnp.matmul(us, flat, precision=lax.Precision.HIGHEST)
            return total

        return xla.on_any_mesh(program, jax.P())(self, tree)


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

    @abc.abstractmethod
    def factor(self, dimension: int) -> float:
        """Returns the c of E[u uᵀ] = I / c, by which estimators multiply.

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

    def sample(self, key: ArrayLike, params: optax.Params) -> Direction:
        """Samples a direction for `params`.

        Args:
          key: A key; it is consumed.
          params: A tree of arrays, of which only the shapes are used.

        Returns:
          The direction, number 0 under the key.
        """
        layout = self._layout(params)
        return sample_direction(self, keys.as_key(key), jnp.uint32(0), layout)

    def materialize(self, direction: Direction, params: optax.Params) -> optax.Params:
        """Computes all elements of `direction`.

        Args:
          direction: A direction that this distribution sampled.
          params: The tree of arrays it was sampled for.

        Returns:
          A tree like `params`, in the shapes and dtypes of its leaves.
        """
        layout = self._layout(params)
        return jax.tree.map(
            lambda u, p: u.astype(jnp.result_type(p)), direction.tree(layout), params
        )

    # A custom distribution is complete here. Only distributions of this package, whose
    # numbers are drawn together or make factors, override the methods below.

    def _layout(self, params: optax.Params) -> Layout:
        """Returns the layout of the parameters, with the axes that it prescribes."""
        return layout_of(params)

    def _packing(self, dimension: int) -> Packing | None:
        """Returns the packing of neighbors; `None` if each number is drawn alone."""
        del dimension
        return None

    def _parts(self, leaf: Leaf) -> list[Part]:
        """Returns the arrays of random numbers that make the elements of a leaf."""
        return [Part(leaf.shape, leaf.offset)]

    def _joined(self, leaf: Leaf, parts: Sequence[Elements]) -> Elements:
        """Returns the elements of a leaf from these arrays, which may be stacked."""
        del leaf
        return parts[0]

    def _most_together(self, num_directions: int) -> int:
        """Returns how many numbers of a direction are stored as one array."""
        del num_directions
        return MAX_TOGETHER


class UnitNorm(Distribution):
    """Distributions of directions of norm 1, for which E[u uᵀ] = I/d."""

    def factor(self, dimension: int) -> float:
        return float(dimension)


def sample_direction(
    distribution: Distribution, key: jax.Array, number: jax.Array, layout: Layout
) -> Direction:
    """Samples the direction of this number under a key, which is typed.

    The elements of a normalized direction are all drawn once, to find their norm.
    """
    scale = jnp.ones((), jnp.float32)
    if distribution.normalized:
        scale = norm.inverse_norm(distribution, key, number, layout)
    return Direction(key, number, scale, distribution)


def sample_directions(
    distribution: Distribution, key: jax.Array, numbers: ArrayLike, layout: Layout
) -> Direction:
    """Samples the directions of these numbers under a key, stacked.

    Args:
      distribution: The distribution.
      key: A typed key, shape (). Direction k has the key `fold_in(key, k)`, unless the
        distribution is `sequential`.
      numbers: uint32, [K].
      layout: The layout of the parameters.
    """

    def one(number: jax.Array) -> Direction:
        own = key if distribution.sequential else generator.fold_in(key, number)
        return sample_direction(distribution, own, number, layout)

    # In turn if all elements of each are drawn, to find its norm.
    numbers = jnp.asarray(numbers)
    return lax.map(one, numbers) if distribution.normalized else jax.vmap(one)(numbers)


def lazy(
    direction: Direction,
    leaf: Leaf,
    dimension: int,
    indices: Sequence[jax.Array] | None = None,
    stored: bool = False,
) -> Elements:
    """Returns the unscaled elements of a leaf, which are drawn when they are read.

    Args:
      direction: The direction.
      leaf: The leaf.
      dimension: d, the number of coordinates of all leaves of the layout.
      indices: The elements of a block whose elements are neighbors in row-major order,
        as `counter.block` makes them; `None` for all.
      stored: Whether what neighbors are drawn from may be stored.
    """
    distribution = direction.distribution
    if indices is None:
        indices = generator.block(leaf.shape)
    parts = distribution._parts(leaf)
    # The rows of a block are not neighbors in a factor.
    order = tuple(range(len(leaf.shape))) if len(parts) == 1 else None
    key, number = direction.key, direction.number
    drawn = [
        LazyElements(
            key,
            number,
            part.indices(indices),
            distribution,
            part,
            dimension,
            order,
            stored,
        )
        for part in parts
    ]
    return distribution._joined(leaf, drawn)


def values_of_leaf(direction: Direction, leaf: Leaf, dimension: int) -> jax.Array:
    """Returns all elements of a leaf before they are scaled: float32."""

    def element_by_element(direction: Direction) -> jax.Array:
        return lazy(direction, leaf, dimension).values()

    def together(direction: Direction) -> jax.Array:
        key, number = direction.key[None], direction.number[None]
        [held] = stored_elements(
            direction.distribution, key, number, (leaf,), dimension
        )
        return jax.tree.map(lambda x: x[0], held).values()

    if direction.distribution._packing(dimension) is None:
        return element_by_element(direction)
    # XLA's CPU backend would draw neighbors for each of them.
    return lax.platform_dependent(direction, cpu=together, default=element_by_element)


def stored_elements(
    distribution: Distribution,
    keys: jax.Array,
    numbers: jax.Array,
    leaves: Sequence[Leaf],
    dimension: int,
) -> tuple[Elements, ...]:
    """Draws the elements of some leaves of K directions, stacked, each number once.

    Args:
      distribution: The distribution of the directions.
      keys: Their keys, [K].
      numbers: Their numbers, uint32, [K].
      leaves: The leaves.
      dimension: d, the number of coordinates of all leaves of the layout.
    """
    parts = [distribution._parts(leaf) for leaf in leaves]
    every = [part for some in parts for part in some]
    packing = distribution._packing(dimension)
    most = distribution._most_together(len(keys))

    def one_by_one() -> list[Elements]:
        draw_at = functools.partial(draw, distribution)
        drawn = _drawn_once(draw_at, keys, numbers, every, dimension, most)
        return list(map(DenseElements, drawn))

    def in_units(packing: Packing) -> list[Elements]:
        def unpack(units: list[jax.Array]) -> list[Elements]:
            return [
                packing.unpack(of_part, part.offset % GROUP, part.shape)
                for of_part, part in zip(units, every, strict=True)
            ]

        covers, most_units = list(map(packing.units, every)), most // packing.width
        units = _drawn_once(packing.draw, keys, numbers, covers, dimension, most_units)
        if packing.width == 1 and all(packing.keeps(x.offset % GROUP) for x in every):
            return unpack(units)
        return xla.compute_once(unpack, units)

    if packing is None:
        drawn = iter(one_by_one())
    else:
        size = len(keys) * sum(part.size for part in every)
        choose = packing.choose(size, True)
        drawn = iter(choose(functools.partial(in_units, packing), one_by_one))
    return tuple(
        distribution._joined(leaf, [next(drawn) for _ in some])
        for leaf, some in zip(leaves, parts, strict=True)
    )


def num_random(distribution: Distribution, leaves: Sequence[Leaf]) -> int:
    """Returns the number of random numbers that make the elements of some leaves."""
    return sum(part.size for leaf in leaves for part in distribution._parts(leaf))


# Compiled as a whole outside of `jit`, and a part of the program under `jit`.
@functools.partial(jax.jit, static_argnames="layout", inline=True)
def elements(direction: Direction, layout: Layout) -> list[jax.Array]:
    """Returns all elements of `direction`, leaf by leaf, scaled: float32."""
    if direction.cached is not None:
        return [direction.scale * stored.values() for stored in direction.cached]
    return [
        direction.scale * values_of_leaf(direction, leaf, layout.dimension)
        for leaf in layout.leaves
    ]


def rows(directions: Direction, layout: Layout, i: int) -> jax.Array:
    """Returns the scaled elements of leaf i of K directions: float32, [K, size]."""
    leaf = layout.leaves[i]
    if directions.cached is not None:
        us = jax.vmap(lambda held: held.values())(directions.cached[i])
    else:
        us = jax.vmap(lambda u: values_of_leaf(u, leaf, layout.dimension))(directions)
    return directions.scale[:, None] * us.reshape(len(directions.scale), -1)


def _drawn_once(
    draw_at: Callable[[jax.Array, jax.Array, Positions], jax.Array],
    keys: jax.Array,
    numbers: jax.Array,
    parts: Sequence[Part],
    dimension: int,
    max_together: int,
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
            return draw_at(key, number, generator.concatenate(at))

        return list(map(of_group, groups))

    drawn = xla.compute_once(jax.vmap(draw_all), keys, numbers)
    # Split apart from the draw: XLA's CPU backend would draw everything for each part.
    # And apart from the sums of the parts, which it would round otherwise in a loop.
    found: dict[Part, jax.Array] = {}
    for group, together in zip(groups, drawn, strict=True):
        shapes = [part.shape for part in group]
        split = jax.vmap(functools.partial(generator.split_flat, shapes=shapes))
        alone = len(group) == 1
        arrays = split(together) if alone else xla.compute_once(split, together)
        found |= zip(group, arrays, strict=True)
    return [found[part] for part in parts]


def _groups(parts: Sequence[Part], max_together: int) -> list[list[Part]]:
    """Returns the parts that are drawn as one array: the smallest; others are alone."""
    total, small, others = 0, [], []
    for part in sorted(parts, key=lambda part: part.size):
        total += part.size
        if total <= max_together:
            small.append(part)
        else:
            others.append([part])
    return [small, *others] if small else others
