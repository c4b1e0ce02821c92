"""Normal numbers in pairs, of which a CPU draws both at once."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src import compiler
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

# From so many numbers on they are drawn in pairs, because that takes longer to compile.
_FEWEST = 2**13

# Numbers that are drawn in one turn, because pairs are stored before they are split:
# 16 MiB. Turns are a loop, which XLA's CPU backend runs in one thread.
_TURN = 2**22


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
        return compiler.on_one_cpu(together, one_by_one)

    def _block(
        self,
        key: jax.Array,
        number: jax.Array,
        leaf: Leaf,
        dimension: int,
        indices: Sequence[jax.Array],
    ) -> Elements:
        def together() -> jax.Array:
            shape = jnp.broadcast_shapes(*(index.shape for index in indices))
            corner = [jnp.ravel(index)[0] for index in indices]
            first = counter.positions(leaf.shape, corner, leaf.offset)
            start = first.lo & np.uint32(_GROUP - 1)
            size = math.prod(shape)
            found = _from(key, Counter(first.hi, first.lo - start), size + _GROUP - 1)
            start = start.astype(jnp.int32)
            return lax.dynamic_slice(found, (start,), (size,)).reshape(shape)

        def one_by_one() -> jax.Array:
            lazy = super(Normals, self)._block(key, number, leaf, dimension, indices)
            return lazy.values()

        return DenseElements(compiler.on_one_cpu(together, one_by_one))

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

    On a single CPU, both numbers of a pair are drawn together, unless a direction has
    too many. Elsewhere what is drawn together would be copied into the shape of the
    leaf, or sent to other devices.
    """
    num, size = len(keys), sum(part.size for part in parts)

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

        def some(drawn: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
            pairs = drawn_once(draw, *drawn, pair_parts, dimension, max_together // 2)
            return compiler.compute_once(split, pairs)

        pair_parts = list(map(_pairs, parts))
        turns = _turns(num, size)
        if turns == 1:
            return some((keys, numbers))
        found = lax.map(some, (keys.reshape(turns, -1), numbers.reshape(turns, -1)))
        return [x.reshape(num, *x.shape[2:]) for x in found]

    if size > _TURN or num * size < _FEWEST:
        return one_by_one()
    return compiler.on_one_cpu(in_pairs, one_by_one)


def _turns(num: int, size: int) -> int:
    """The number of equal parts in which `num` directions are drawn: the fewest."""
    counts = (n for n in range(1, num + 1) if num % n == 0)
    return next((n for n in counts if num // n * size <= _TURN), 1)


def _from(key: jax.Array, first: Counter, size: int) -> jax.Array:
    """The numbers of `size` neighbors, [size], from a multiple of 32 on."""

    def draw(key: jax.Array, first: Counter) -> jax.Array:
        after = counter.low(jnp.arange(_num_pairs(size), dtype=jnp.uint32))
        return _draw_pairs(key, counter.add(_pair_of(first), after))

    return _both(compiler.compute_once(draw, key, first))[:size]


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
    return PAIR * -(-size // (_GROUP))


def _pairs(part: Part) -> Part:
    """The pairs in which the numbers of an array lie."""
    groups, start = divmod(part.offset, _GROUP)
    return Part((_num_pairs(start + part.size),), PAIR * groups)


def _part_of(pairs: jax.Array, part: Part) -> jax.Array:
    """The numbers of an array for K directions, [K, *shape], from their pairs."""
    start = part.offset % (_GROUP)
    numbers = _both(pairs)[:, start : start + part.size]
    return numbers.reshape(len(pairs), *part.shape)


def _both(pairs: jax.Array) -> jax.Array:
    """The numbers in order of their positions: […, n] from complex64 […, n / 2]."""
    grouped = pairs.reshape(*pairs.shape[:-1], -1, PAIR)
    numbers = jnp.stack([grouped.real, grouped.imag], axis=-2)
    return numbers.reshape(*pairs.shape[:-1], -1)
