"""The exact norm of a direction, over all coordinates."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src.directions.elements import DenseElements, Elements
from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.numbers import counter, exact
from radazo_jax._src.numbers.counter import Counter

# Number of coordinates that are drawn together if only their norm is needed. XLA stores
# what it sums, except on TPUs. On a CPU, a small piece stays in the cache.
_PIECE, _PIECE_ON_CPU = 2**24, 2**18

# The squares of larger elements do not fit into the exact sum.
_LARGEST = 8.0


def inverse_norm(
    distribution: Any, key: jax.Array, number: jax.Array, layout: Layout
) -> jax.Array:
    """Returns 1 over the norm of a direction that is not stored: float32, shape ().

    All ways to compute it give the same bits, because the sum is exact.
    """

    def at_once(key: jax.Array, number: jax.Array) -> jax.Array:
        lazy = [
            distribution._lazy(key, number, leaf, layout.dimension)
            for leaf in layout.leaves
        ]
        return inverse_norm_of(distribution, lazy)

    def in_one_piece(key: jax.Array, number: jax.Array) -> jax.Array:
        size = layout.dimension
        drawn = distribution._neighbors(key, number, counter.zero(), size, size)
        return inverse_norm_of(distribution, [DenseElements(drawn)])

    def in_pieces(size: int) -> Any:
        if layout.dimension <= size:
            return at_once
        return functools.partial(_in_pieces, distribution, layout.dimension, size)

    if layout.dimension <= _PIECE_ON_CPU:
        return in_one_piece(key, number)

    return lax.platform_dependent(
        key,
        number,
        cpu=in_pieces(_PIECE_ON_CPU),
        tpu=at_once,
        default=in_pieces(_PIECE),
    )


def inverse_norm_of(distribution: Any, elements: Sequence[Elements]) -> jax.Array:
    """Returns 1 over the norm of the elements of all leaves: float32, shape ()."""
    values = [of_leaf.values() for of_leaf in elements]
    fraction = exact.fraction_bits(sum(x.size for x in values))
    sums = [_sum_of_squares(distribution, x, fraction) for x in values]
    return functools.reduce(_Sum.plus, sums, _Sum.zero()).inverse_root(fraction)


class _Sum(NamedTuple):
    """A sum of squares, and whether all of them are in it: a bool of shape ()."""

    squares: Counter
    whole: jax.Array

    @classmethod
    def zero(cls) -> "_Sum":
        return cls(counter.zero(), jnp.ones((), jnp.bool_))

    def plus(self, other: "_Sum") -> "_Sum":
        squares = counter.add(self.squares, other.squares)
        return _Sum(squares, self.whole & other.whole)

    def inverse_root(self, fraction: int) -> jax.Array:
        root = lax.rsqrt(exact.as_float(self.squares, fraction))
        return jnp.where(self.whole, root, jnp.nan)


def _sum_of_squares(distribution: Any, x: jax.Array, fraction: int) -> _Sum:
    whole = jnp.ones((), jnp.bool_)
    if not distribution._bounded:
        whole = jnp.all(abs(x) < _LARGEST)
    return _Sum(exact.sum_of_squares(x, fraction), whole)


def _in_pieces(
    distribution: Any, dimension: int, size: int, key: jax.Array, number: jax.Array
) -> jax.Array:
    fraction = exact.fraction_bits(dimension)
    pieces, rest = divmod(dimension, size)

    def squares(first: Counter, size: int) -> _Sum:
        drawn = distribution._neighbors(key, number, first, size, dimension)
        return _sum_of_squares(distribution, drawn, fraction)

    def add(i: jax.Array, total: _Sum) -> _Sum:
        first = counter.wide_product(i.astype(jnp.uint32), np.uint32(size))
        return total.plus(squares(first, size))

    after = divmod(pieces * size, 2**32)
    last = squares(Counter(*map(jnp.uint32, after)), rest)
    return lax.fori_loop(0, pieces, add, last).inverse_root(fraction)
