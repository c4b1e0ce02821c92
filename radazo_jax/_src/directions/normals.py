"""Normal numbers in pairs, of which a CPU draws both at once."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from radazo_jax._src import xla
from radazo_jax._src.directions.distribution import (
    MAX_TOGETHER,
    Distribution,
    Part,
    drawn_once,
)
from radazo_jax._src.directions.elements import DenseElements, Elements
from radazo_jax._src.directions.layout import Leaf
from radazo_jax._src.numbers import counter, generator
from radazo_jax._src.numbers.counter import Counter, Positions
from radazo_jax._src.numbers.generator import PAIR

# Both numbers of a pair lie in the same group of neighbors.
_GROUP = 2 * PAIR

# Between so many numbers they are drawn in pairs: fewer are not worth the longer
# compilation, and pairs are stored before they are split, in 64 MiB at most.
_FEWEST, _MOST = 2**13, 2**24


class Normals(Distribution):
    """Distributions of normal numbers that are not the numbers of `jax.random`."""

    _together = "cpu"

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        return generator.fast_normal(key, at)

    def _neighbors(
        self,
        key: jax.Array,
        number: jax.Array,
        first: Counter,
        size: int,
        dimension: int,
    ) -> jax.Array:
        def together() -> jax.Array:
            return _from(key, first, size)

        def one_by_one() -> jax.Array:
            return super(Normals, self)._neighbors(key, number, first, size, dimension)

        if size < _FEWEST:
            return one_by_one()
        return xla.on_one_cpu(together, one_by_one)

    def _store(
        self,
        keys: jax.Array,
        numbers: jax.Array,
        leaves: tuple[Leaf, ...],
        dimension: int,
    ) -> tuple[Elements, ...]:
        parts = [Part(leaf.shape, leaf.offset) for leaf in leaves]
        drawn = drawn_normals(keys, numbers, parts, dimension)
        return tuple(map(DenseElements, drawn))


def drawn_normals(
    keys: jax.Array,
    numbers: jax.Array,
    parts: Sequence[Part],
    dimension: int,
    max_together: int = MAX_TOGETHER,
) -> list[jax.Array]:
    """Draws and stores normal numbers, as `drawn_once` draws the numbers of `draw_at`.

    On a single CPU, both numbers of a pair are drawn together. Elsewhere what is drawn
    together would be copied into the shape of the leaf, or sent to other devices.
    """

    def one_by_one() -> list[jax.Array]:
        def draw(key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
            del number
            return generator.fast_normal(key, at)

        return drawn_once(draw, keys, numbers, parts, dimension, max_together)

    def in_pairs() -> list[jax.Array]:
        def draw(key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
            del number
            return _draw_pairs(key, Counter(at.hi, at.lo))

        def split(pairs: list[jax.Array]) -> list[jax.Array]:
            return list(map(_part_of, pairs, parts))

        pairs = list(map(_pairs, parts))
        half = max_together // 2
        drawn = drawn_once(draw, keys, numbers, pairs, dimension, half)
        return xla.compute_once(split, drawn)

    size = len(keys) * sum(part.size for part in parts)
    if not _FEWEST <= size <= _MOST:
        return one_by_one()
    return xla.on_one_cpu(in_pairs, one_by_one)


def _from(key: jax.Array, first: Counter, size: int) -> jax.Array:
    """The numbers of `size` neighbors, [size], from a multiple of 32 on."""

    def draw(key: jax.Array, first: Counter) -> jax.Array:
        after = counter.low(jnp.arange(_num_pairs(size), dtype=jnp.uint32))
        return _draw_pairs(key, counter.add(_pair_of(first), after))

    return _both(xla.compute_once(draw, key, first))[:size]


def _draw_pairs(key: jax.Array, pair: Counter) -> jax.Array:
    """The two numbers of the pairs that are numbered so: complex64."""
    near = pair.lo & np.uint32(PAIR - 1)
    hi = (pair.hi << np.uint32(1)) | (pair.lo >> np.uint32(31))
    return generator.normal_pairs(key, Counter(hi, 2 * pair.lo - near))


def _pair_of(first: Counter) -> Counter:
    """The number of the pair at a position that is a multiple of 32."""
    lo = (first.lo >> np.uint32(1)) | (first.hi << np.uint32(31))
    return Counter(first.hi >> np.uint32(1), lo)


def _num_pairs(size: int) -> int:
    """The number of pairs that `size` neighbors need, from a multiple of 32 on."""
    return PAIR * -(-size // _GROUP)


def _pairs(part: Part) -> Part:
    """The pairs in which the numbers of an array lie."""
    groups, start = divmod(part.offset, _GROUP)
    return Part((_num_pairs(start + part.size),), PAIR * groups)


def _part_of(pairs: jax.Array, part: Part) -> jax.Array:
    """The numbers of an array for K directions, [K, *shape], from their pairs."""
    start = part.offset % _GROUP
    numbers = _both(pairs)[:, start : start + part.size]
    return numbers.reshape(len(pairs), *part.shape)


def _both(pairs: jax.Array) -> jax.Array:
    """The numbers in order of their positions: […, n] from complex64 […, n / 2]."""
    grouped = pairs.reshape(*pairs.shape[:-1], -1, PAIR)
    numbers = jnp.stack([grouped.real, grouped.imag], axis=-2)
    return numbers.reshape(*pairs.shape[:-1], -1)
