"""The storage of directions: `are_stored` decides, `store` draws what is stored."""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp

from radazo_jax._src.directions import generator, norm
from radazo_jax._src.directions.distribution import (
    Direction,
    Distribution,
    num_random,
    sample_directions,
    stored_elements,
)
from radazo_jax._src.directions.elements import DenseElements
from radazo_jax._src.directions.layout import Layout, Leaf, Part

# Up to this many directions taken in turn, the gradient is one expression, which
# fuses into whatever consumes it; beyond, a loop with one accumulator.
MAX_UNROLLED = 8

# Directions that are alive together are kept from the evaluations to the gradient up
# to this many elements (64 MiB); beyond, they are drawn again.
_MAX_KEPT = 2**24

# Directions taken in turn are kept up to this many words (4 MiB), if that is chosen.
_MAX_KEPT_IN_TURN = 2**20

# Directions that take at most this fraction of the parameters are stored for the
# gradient, and from the evaluations on if they are all alive then.
_CACHED_SHARE = 8


class Use(enum.Enum):
    """A use of directions, by what is alive at the same time."""

    TOGETHER = "evaluated together"
    IN_TURN = "evaluated in turn"
    STORED_IN_TURN = "evaluated in turn, each stored for its points"
    SUMMED = "summed, after the evaluations"


def are_stored(directions: Direction, layout: Layout, use: Use) -> bool:
    """Decides whether the elements of all directions are stored for a use.

    If they are not, they are drawn again wherever they are read.

    Args:
      directions: Directions, stacked: [K].
      layout: The layout of the parameters.
      use: The use of the directions.
    """
    distribution, count = directions.distribution, len(directions.scale)
    numbers = count * num_random(distribution, layout.leaves)
    few = numbers * _CACHED_SHARE <= layout.dimension
    if use is Use.TOGETHER:
        one = count == 1 and layout.dimension <= _MAX_KEPT
        return few or one or numbers <= _MAX_KEPT
    if use is Use.IN_TURN:
        # The elements of the others would be alive during every evaluation.
        return few and count == 1
    if use is Use.STORED_IN_TURN:
        packing = distribution._packing(layout.dimension)
        packed = packing is not None and packing.width == 1
        return (numbers // 32 if packed else numbers) <= _MAX_KEPT_IN_TURN
    # A loop has accumulators of the size of the parameters.
    return few or (count > MAX_UNROLLED and numbers <= layout.dimension)


def have_factors(directions: Direction, layout: Layout) -> bool:
    """Returns whether a direction has few numbers, as factors of matrices do."""
    one = num_random(directions.distribution, layout.leaves)
    return one * _CACHED_SHARE <= layout.dimension


def cache(directions: Direction, layout: Layout, use: Use) -> Direction:
    """Returns the same directions, with their elements if they are stored."""
    if directions.cached is None and are_stored(directions, layout, use):
        return store(directions, layout)
    return directions


def sample_one(distribution: Distribution, key: jax.Array, layout: Layout) -> Direction:
    """Returns direction 0 under a key, stacked, and stored unless it is large."""
    number = jnp.zeros(1, jnp.uint32)
    own = key if distribution.sequential else generator.fold_in(key, number[0])
    scale = jnp.ones(1, jnp.float32)
    direction = Direction(own[None], number, scale, distribution)
    if are_stored(direction, layout, Use.TOGETHER):
        return store(direction, layout)
    return sample_directions(distribution, key, number, layout)


def with_elements(direction: Direction, layout: Layout) -> Direction:
    """Returns a single direction with its elements."""
    if direction.cached is not None:
        return direction
    stacked = jax.tree.map(lambda x: x[None], direction)
    return jax.tree.map(lambda x: x[0], store(stacked, layout))


def store(directions: Direction, layout: Layout) -> Direction:
    """Returns the same directions with their elements, each number drawn once."""
    distribution, scale = directions.distribution, directions.scale
    # Several would be stored once more, when they are cut into leaves.
    at_once = len(scale) == 1 and _are_one(distribution, layout)
    leaves = layout.leaves
    if at_once:
        leaves = (Leaf((layout.dimension,), 0, "", None),)
    keys, numbers = directions.key, directions.number
    stored = stored_elements(distribution, keys, numbers, leaves, layout.dimension)
    if distribution.normalized:
        # The norm of what is stored, so that nothing is drawn twice.
        scale = jax.vmap(functools.partial(norm.inverse_norm_of, distribution))(stored)
    if at_once:
        flat = jax.vmap(lambda elements: elements.values())(stored[0])
        parts = generator.split_flat(flat[0], [leaf.shape for leaf in layout.leaves])
        stored = tuple(DenseElements(part[None]) for part in parts)
    return dataclasses.replace(directions, cached=stored, scale=scale)


def _are_one(distribution: Distribution, layout: Layout) -> bool:
    """Returns whether all leaves of a direction are drawn as one array, and cut.

    Such a program compiles in a fraction of the time. Accelerators would copy what is
    cut, and one array would not be sharded as the leaves are.
    """
    return (
        jax.default_backend() == "cpu"
        and jax.sharding.get_abstract_mesh().empty
        and len(layout.leaves) > 1
        and layout.dimension <= _MAX_KEPT
        and all(
            distribution._parts(leaf) == [Part(leaf.shape, leaf.offset)]
            for leaf in layout.leaves
        )
    )
