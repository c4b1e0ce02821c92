"""Normal numbers in pairs, of which a CPU draws both at once."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src import xla
from radazo_jax._src.directions import packing
from radazo_jax._src.directions.distribution import Distribution
from radazo_jax._src.directions.elements import DenseElements
from radazo_jax._src.directions.packing import Packing
from radazo_jax._src.numbers import generator
from radazo_jax._src.numbers.counter import Counter, Positions
from radazo_jax._src.numbers.generator import PAIR

# Between so many numbers they are drawn in pairs: fewer are not worth the longer
# compilation, and pairs are stored before they are split, in 64 MiB at most.
_FEWEST, _MOST = 2**13, 2**24


class Normals(Distribution):
    """Distributions of normal numbers that are not the numbers of `jax.random`."""

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        return generator.fast_normal(key, at)

    def _packing(self, dimension: int) -> Packing:
        del dimension
        return _PAIRS


def _choose(size: int, stored: bool) -> Callable[..., Any]:
    # Elsewhere than on a single CPU, what is drawn together would be copied into the
    # shape of the leaf, or sent to other devices.
    fits = stored and _FEWEST <= size <= _MOST
    return xla.on_one_cpu if fits else packing.apart


def _draw(key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
    """The two numbers of each pair: complex64."""
    del number
    near = at.lo & np.uint32(PAIR - 1)
    hi = (at.hi << np.uint32(1)) | (at.lo >> np.uint32(31))
    return generator.normal_pairs(key, Counter(hi, 2 * at.lo - near))


def _unpack(pairs: jax.Array, start: Any, shape: tuple[int, ...]) -> DenseElements:
    stacked = pairs.shape[:-1]
    grouped = pairs.reshape(*stacked, -1, PAIR)
    numbers = jnp.stack([grouped.real, grouped.imag], axis=-2).reshape(*stacked, -1)
    size = math.prod(shape)
    if isinstance(start, int):
        numbers = numbers[..., start : start + size]
    else:
        numbers = lax.dynamic_slice_in_dim(numbers, start, size, axis=-1)
    return DenseElements(numbers.reshape(*stacked, *shape))


# Both numbers of a pair lie in the same group of neighbors.
_PAIRS = Packing(PAIR, 2, _draw, _unpack, _choose)
