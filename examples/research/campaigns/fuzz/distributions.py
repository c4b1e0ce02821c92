"""Distributions of directions, by name: the library's, and custom ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo


@dataclasses.dataclass(frozen=True)
class Sparse(zo.Distribution):
    """Random signs at a share of the coordinates, which each direction draws anew."""

    share: float = 0.1

    def factor(self, dimension: int) -> float:
        return 1.0  # E[u²] = share · 1/share in every coordinate, so E[u uᵀ] = I.

    def draw(self, key: jax.Array, number: jax.Array, at: Any) -> jax.Array:
        which, signs = jax.random.split(key)
        chosen = zo.random.uniform(which, at) < self.share
        sign = jnp.where(zo.random.uniform(signs, at) < 0.5, -1.0, 1.0)
        return jnp.where(chosen, sign / self.share**0.5, 0.0)


@dataclasses.dataclass(frozen=True)
class Smooth(zo.Distribution):
    """Normal numbers, each correlated with its neighbors."""

    weight: float = 1.0

    def factor(self, dimension: int) -> float:
        return 1.0

    def draw(self, key: jax.Array, number: jax.Array, at: Any) -> jax.Array:
        # There is no carry with fewer than 2³² coordinates.
        following = dataclasses.replace(at, lo=at.lo + np.uint32(1))
        here, there = (zo.random.normal(key, p) for p in (at, following))
        return (here + self.weight * there) / (1 + self.weight**2) ** 0.5


class Hashed(zo.Distribution):
    """Numbers that depend on key and position and cost nothing to compile."""

    def factor(self, dimension: int) -> float:
        return 1.0

    def draw(self, key: jax.Array, number: jax.Array, at: Any) -> jax.Array:
        word = (at.lo + jax.random.key_data(key)[1]) * np.uint32(2654435761)
        return (word >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-23) - 1


class Flips(Hashed):
    """Signs that cost nothing to compile: p + s · u is exact in every dtype."""

    def draw(self, key: jax.Array, number: jax.Array, at: Any) -> jax.Array:
        drawn = super().draw(key, number, at)
        return jnp.where(drawn > 0, jnp.float32(1), jnp.float32(-1))


DISTRIBUTIONS: dict[str, zo.Distribution] = {
    "sphere": zo.sphere(),
    "gaussian": zo.gaussian(),
    "rademacher": zo.rademacher(),
    "coordinate": zo.coordinate(),
    "coordinate in turn": zo.coordinate(replace=False),
    "orthonormal": zo.orthonormal(),
    "low_rank": zo.low_rank(),
    "low_rank(2)": zo.low_rank(2),
    "sparse": Sparse(),
    "smooth": Smooth(),
}
