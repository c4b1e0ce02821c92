"""Past queries: directions that can be drawn again, and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from radazo_jax._src.directions.distribution import Direction, Distribution
from radazo_jax._src.estimate.points import Points


class QueryBuffer(NamedTuple):
    """The directions of past points, the oldest first: 16 bytes each.

    Attributes:
      keys: The keys of the directions: typed keys, [size].
      numbers: Their numbers: uint32, [size].
      scales: Their scales: float32, [size].
    """

    keys: jax.Array
    numbers: jax.Array
    scales: jax.Array

    def directions(self, distribution: Distribution) -> Direction:
        """The directions, to be drawn again, stacked."""
        return Direction(self.keys, self.numbers, self.scales, distribution)

    def followed_by(self, points: Points) -> "QueryBuffer":
        """The buffer of the same size that ends with the directions of these points."""
        new = points.directions
        added = QueryBuffer(new.key, new.number, new.scale)
        return jax.tree.map(followed_by, self, added)


def empty(size: int) -> QueryBuffer:
    """A buffer before the first query."""
    key = jax.random.key(0, impl="threefry2x32")
    return QueryBuffer(
        jnp.broadcast_to(key, (size,)),
        jnp.zeros(size, jnp.uint32),
        jnp.zeros(size, jnp.float32),
    )


def followed_by(old: jax.Array, new: jax.Array) -> jax.Array:
    """Appends `new`, and drops as many of the oldest entries."""
    return jnp.concatenate([old, new])[len(new) :]
