"""The exact norm of a direction, over all coordinates."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from radazo_jax._src.directions.elements import Elements
from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.directions.storage import DENSE
from radazo_jax._src.numbers import counter, exact
from radazo_jax._src.numbers.counter import Counter, Positions

# Number of coordinates that are drawn together if only their norm is needed. XLA stores
# what it sums, except on TPUs. On a CPU, a small piece stays in the cache.
_PIECE, _PIECE_ON_CPU = 2**24, 2**18

# The squares of larger elements do not fit into the exact sum.
_LARGEST = 8.0


def inverse_norm(
    distribution: Any, key: jax.Array, number: jax.Array, layout: Layout
) -> jax.Array:
    """One over the norm of a direction that is not stored: float32, shape ().

    All ways to compute it give the same bits, because the sum is exact.
    """

    def at_once(key: jax.Array, number: jax.Array) -> jax.Array:
        return inverse_norm_of(
            [
                DENSE.lazy(distribution, key, number, leaf, layout.dimension)
                for leaf in layout.leaves
            ]
        )

    def in_pieces(size: int) -> Any:
        if layout.dimension <= size:
            return at_once
        return functools.partial(_in_pieces, distribution, layout.dimension, size)

    return lax.platform_dependent(
        key,
        number,
        cpu=in_pieces(_PIECE_ON_CPU),
        tpu=at_once,
        default=in_pieces(_PIECE),
    )


def inverse_norm_of(elements: Sequence[Elements]) -> jax.Array:
    """One over the norm of the elements of all leaves: float32, shape ()."""
    values = [of_leaf.values() for of_leaf in elements]
    fraction = exact.fraction_bits(sum(x.size for x in values))
    total = functools.reduce(
        _add, [_sum_of_squares(x, fraction) for x in values], _zero()
    )
    return _inverse_root(total, fraction)


def _in_pieces(
    distribution: Any, dimension: int, size: int, key: jax.Array, number: jax.Array
) -> jax.Array:
    fraction = exact.fraction_bits(dimension)
    pieces, rest = divmod(dimension, size)

    def squares(at: Positions) -> tuple[Counter, jax.Array]:
        return _sum_of_squares(distribution.draw(key, number, at), fraction)

    def add(i: jax.Array, total: Any) -> Any:
        piece = counter.block((1, size), (i, 0))
        return _add(total, squares(counter.positions((pieces, size), piece)))

    last = squares(counter.positions((rest,), offset=pieces * size))
    return _inverse_root(lax.fori_loop(0, pieces, add, last), fraction)


def _sum_of_squares(x: jax.Array, fraction: int) -> tuple[Counter, jax.Array]:
    """The sum, and whether all elements fit into it."""
    fits = jnp.all(abs(x) < _LARGEST)
    return exact.sum_of_squares(x, fraction), fits


def _zero() -> tuple[Counter, jax.Array]:
    return counter.zero(), jnp.ones((), jnp.bool_)


def _add(
    a: tuple[Counter, jax.Array], b: tuple[Counter, jax.Array]
) -> tuple[Counter, jax.Array]:
    return counter.add(a[0], b[0]), a[1] & b[1]


def _inverse_root(total: tuple[Counter, jax.Array], fraction: int) -> jax.Array:
    square, fits = total
    return jnp.where(fits, lax.rsqrt(exact.as_float(square, fraction)), jnp.nan)
