"""The exact norm of a direction, over all coordinates.

A sum of floats is rounded at every addition: its last bits depend on the order, and so
on how an array is spread over devices. A sum of integers is not rounded.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src.directions import generator
from radazo_jax._src.directions.elements import Draws, Elements, LazyElements
from radazo_jax._src.directions.generator import Counter
from radazo_jax._src.directions.layout import Layout, Part

# The squares that are summed are below 2^6.
_INTEGER_BITS = 6

# A float32 holds integers of so many bits.
_MANTISSA = 24

# So many are summed at once; of more, the sums along the leading axes are summed again.
_MAX_AT_ONCE = 2**28


def fraction_bits(num_squares: int) -> int:
    """Returns the bits after the point for a sum of so many squared normals.

    Enough for an error below the rounding of a float32: the errors of many squares are
    independent, and many squares are not all small.
    """
    log = _log2(num_squares)
    return max(48 - 2 * log, 25 - log // 2)


def sum_of_squares(x: jax.Array, fraction: int) -> Counter:
    """Sums x² in units of 2^-fraction, to which every square is rounded.

    Args:
      x: float32, any shape, of absolute values below 8.
      fraction: `fraction_bits` of the number of squares in the whole sum, of which
        these may be a part.

    Returns:
      The sum, a 64-bit integer of shape ().
    """
    first = _first_axis(x.shape)
    size = math.prod(x.shape[first:])
    # Digits of so many bits that all of them together stay below 2^32.
    base = min(_MANTISSA, 32 - _log2(size))
    digits = _digits(x * x, fraction, base)
    total = generator.zero()
    for place, word in enumerate(_sums(digits, range(first, x.ndim))):
        total = generator.add(total, _sum_of_words(word, base * place))
    return total


def as_float(total: Counter, fraction: int) -> jax.Array:
    """Returns the sum, at least one of its units: float32."""
    hi, lo = (word.astype(jnp.float32) for word in total)
    units = hi * np.float32(2.0**32) + lo
    return jnp.maximum(units, np.float32(1)) * np.float32(2.0**-fraction)


def _log2(size: int) -> int:
    """Returns ⌈log₂ size⌉."""
    return (max(size, 1) - 1).bit_length()


def _first_axis(shape: tuple[int, ...]) -> int:
    """Returns the first of the axes that are summed at once: the last at least."""
    first = 0
    while first < len(shape) - 1 and math.prod(shape[first:]) > _MAX_AT_ONCE:
        first += 1
    return first


def _digits(squares: jax.Array, fraction: int, base: int) -> list[jax.Array]:
    """Returns rounded squares in digits of `base` bits: uint32, the lowest first."""
    num_digits = -(-(_INTEGER_BITS + fraction) // base)
    digits = []
    rest = squares * np.float32(2.0 ** (fraction - base * (num_digits - 1)))
    for place in reversed(range(num_digits)):
        digit = jnp.floor(rest) if place else jnp.round(rest)
        rest = (rest - digit) * np.float32(2.0**base)
        # By way of a signed word: that conversion is one instruction.
        digits.append(lax.bitcast_convert_type(digit.astype(jnp.int32), jnp.uint32))
    return digits[::-1]


def _sum_of_words(words: jax.Array, distance: int) -> Counter:
    """Sums all words times 2^distance."""
    base = 32 - _log2(words.size)
    mask = np.uint32(2**base - 1)
    shifts = range(0, 32, base)
    digits = [(words >> np.uint32(shift)) & mask for shift in shifts]
    total = generator.zero()
    for shift, digit in zip(shifts, _sums(digits, range(words.ndim)), strict=True):
        total = generator.add(total, generator.shift_left(digit, distance + shift))
    return total


def _sums(words: Sequence[jax.Array], axes: range) -> Sequence[jax.Array]:
    """Sums each, so that what makes all of them is computed once."""

    def in_one_reduction(*words: jax.Array) -> tuple[jax.Array, ...]:
        zeros = (np.uint32(0),) * len(words)
        return lax.reduce(words, zeros, _add_each, tuple(axes))

    def in_several(*words: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.sum(word, tuple(axes), jnp.uint32) for word in words)

    # Other compilers fuse several into one; the TPU's takes half a minute for
    # one that is written as such.
    return lax.platform_dependent(*words, cpu=in_one_reduction, default=in_several)


def _add_each(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


# Number of coordinates that are drawn together if only their norm is needed. XLA stores
# what it sums, except on TPUs. On a CPU, a small piece stays in the cache.
_PIECE, _PIECE_ON_CPU = 2**24, 2**18

# The squares of larger elements do not fit into the exact sum.
_LARGEST = 8.0


def inverse_norm(
    distribution: Draws, key: jax.Array, number: jax.Array, layout: Layout
) -> jax.Array:
    """Returns 1 over the norm of a direction that is not stored: float32, shape ().

    All ways to compute it give the same bits, because the sum is exact.
    """
    dimension = layout.dimension

    def drawn(
        part: Part, at: Sequence[jax.Array] | None = None, stored: bool = True
    ) -> jax.Array:
        indices = generator.block(part.shape) if at is None else at
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


def inverse_norm_of(distribution: Draws, elements: Sequence[Elements]) -> jax.Array:
    """Returns 1 over the norm of the elements of all leaves: float32, shape ()."""
    return _inverse_norm(distribution, [of_leaf.values() for of_leaf in elements])


def _inverse_norm(distribution: Draws, values: Sequence[jax.Array]) -> jax.Array:
    fraction = fraction_bits(sum(x.size for x in values))
    sums = [_sum_of_squares(distribution, x, fraction) for x in values]
    return functools.reduce(_Sum.plus, sums, _Sum.zero()).inverse_root(fraction)


class _Sum(NamedTuple):
    """A sum of squares, and whether all of them are in it: a bool of shape ()."""

    squares: Counter
    whole: jax.Array

    @classmethod
    def zero(cls) -> "_Sum":
        return cls(generator.zero(), jnp.ones((), jnp.bool_))

    def plus(self, other: "_Sum") -> "_Sum":
        squares = generator.add(self.squares, other.squares)
        return _Sum(squares, self.whole & other.whole)

    def inverse_root(self, fraction: int) -> jax.Array:
        root = lax.rsqrt(as_float(self.squares, fraction))
        return jnp.where(self.whole, root, jnp.nan)


def _sum_of_squares(distribution: Draws, x: jax.Array, fraction: int) -> _Sum:
    bounded = distribution._packing(x.size) is not None
    whole = jnp.ones((), jnp.bool_) if bounded else jnp.all(abs(x) < _LARGEST)
    return _Sum(sum_of_squares(x, fraction), whole)


def _in_pieces(
    distribution: Draws, drawn: Callable[..., jax.Array], dimension: int, size: int
) -> jax.Array:
    fraction = fraction_bits(dimension)
    pieces, rest = divmod(dimension, size)
    rows = Part((pieces, size), 0)

    def add(i: jax.Array, total: _Sum) -> _Sum:
        row = drawn(rows, generator.block((1, size), (i, 0)))
        return total.plus(_sum_of_squares(distribution, row, fraction))

    last = _sum_of_squares(distribution, drawn(Part((rest,), pieces * size)), fraction)
    return lax.fori_loop(0, pieces, add, last).inverse_root(fraction)
