"""The exact norm of a direction, over all coordinates."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from radazo_jax._src.directions.elements import Elements, LazyElements
from radazo_jax._src.directions.layout import Layout, Part
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
    dimension = layout.dimension

    def drawn(
        part: Part, at: Sequence[jax.Array] | None = None, stored: bool = True
    ) -> jax.Array:
        indices = counter.block(part.shape) if at is None else at
        order = tuple(range(len(part.shape)))
        return LazyElements(
            key, number, tuple(indices), distribution, part, dimension, order, stored
        ).values()

    def at_once() -> jax.Array:
        parts = [Part(leaf.shape, leaf.offset) for leaf in layout.leaves]
        values = [drawn(part, stored=False) for part in parts]
        return _inverse_norm(distribution, values)

    def in_pieces(size: int) -> Callable[[], jax.Array]:
        if dimension <= size:
            return at_once
        return functools.partial(_in_pieces, distribution, drawn, dimension, size)

    if dimension <= _PIECE_ON_CPU:
        return _inverse_norm(distribution, [drawn(Part((dimension,), 0))])

    return lax.platform_dependent(
        cpu=in_pieces(_PIECE_ON_CPU), tpu=at_once, default=in_pieces(_PIECE)
    )


def inverse_norm_of(distribution: Any, elements: Sequence[Elements]) -> jax.Array:
    """Returns 1 over the norm of the elements of all leaves: float32, shape ()."""
    return _inverse_norm(distribution, [of_leaf.values() for of_leaf in elements])


def _inverse_norm(distribution: Any, values: Sequence[jax.Array]) -> jax.Array:
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
    bounded = distribution._packing(x.size) is not None
    whole = jnp.ones((), jnp.bool_) if bounded else jnp.all(abs(x) < _LARGEST)
    return _Sum(exact.sum_of_squares(x, fraction), whole)


def _in_pieces(
    distribution: Any, drawn: Callable[..., jax.Array], dimension: int, size: int
) -> jax.Array:
    fraction = exact.fraction_bits(dimension)
    pieces, rest = divmod(dimension, size)
    rows = Part((pieces, size), 0)

    def add(i: jax.Array, total: _Sum) -> _Sum:
        row = drawn(rows, counter.block((1, size), (i, 0)))
        return total.plus(_sum_of_squares(distribution, row, fraction))

    last = _sum_of_squares(distribution, drawn(Part((rest,), pieces * size)), fraction)
    return lax.fori_loop(0, pieces, add, last).inverse_root(fraction)
