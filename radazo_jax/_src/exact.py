"""Sums of squares that do not depend on the order in which they are taken.

A sum of floats is rounded at every addition: its last bits depend on the order, and so
on how an array is spread over devices. A sum of integers is not rounded.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src import counter
from radazo_jax._src.counter import Counter

# The squares that are summed are below 2^6.
_INTEGER_BITS = 6

# A float32 holds integers of so many bits.
_MANTISSA = 24

# Longer arrays are summed with carries, which a CPU does element by element.
_MAX_WITHOUT_CARRY = 2**24


def fraction_bits(num_squares: int) -> int:
    """How many bits after the point are enough for a sum of so many squared normals.

    Enough for an error below the rounding of a float32: the errors of many squares are
    independent, and many squares are not all small.
    """
    return max(16, 48 - 2 * _log2(num_squares))


def sum_of_squares(x: jax.Array, fraction: int) -> Counter:
    """Σ x² in units of 2^-fraction, to which every square is rounded.

    Args:
      x: float32, any shape, of absolute values below 8.
      fraction: ``fraction_bits`` of the number of squares in the whole sum, of which
        these may be a part.

    Returns:
      The sum, a 64-bit integer of shape ().
    """
    squares = x * x
    num_bits = _INTEGER_BITS + fraction
    if x.size > _MAX_WITHOUT_CARRY:
        (low,) = _digits(squares, fraction, num_bits, 1)
        words = _reduce((jnp.zeros_like(low), low), _add_with_carry)
        return Counter(*words)
    # Digits of so many bits that all of them together stay below 2^32.
    base = min(_MANTISSA, 32 - _log2(x.size))
    digits = _digits(squares, fraction, base, -(-num_bits // base))
    total = counter.zero()
    for place, digit in enumerate(_reduce(digits, _add_each)):
        total = counter.add(total, counter.shift_left(digit, base * place))
    return total


def as_float(total: Counter, fraction: int) -> jax.Array:
    """The sum, at least one of its units: float32."""
    hi, lo = (word.astype(jnp.float32) for word in total)
    units = hi * np.float32(2.0**32) + lo
    return jnp.maximum(units, np.float32(1)) * np.float32(2.0**-fraction)


def _log2(size: int) -> int:
    """⌈log₂ size⌉."""
    return (max(size, 1) - 1).bit_length()


def _digits(
    x: jax.Array, fraction: int, base: int, num_digits: int
) -> tuple[jax.Array, ...]:
    """``x`` in digits of ``base`` bits, uint32, the lowest first; it is rounded."""
    digits = []
    rest = x * np.float32(2.0 ** (fraction - base * (num_digits - 1)))
    for place in reversed(range(num_digits)):
        digit = jnp.floor(rest + np.float32(0.5)) if place == 0 else jnp.floor(rest)
        rest = (rest - digit) * np.float32(2.0**base)
        # By way of a signed word: that conversion is one instruction.
        digits.append(lax.bitcast_convert_type(digit.astype(jnp.int32), jnp.uint32))
    return tuple(digits[::-1])


# One reduction of several words, so that what makes them is computed once.
def _reduce(
    words: Sequence[jax.Array], add: Callable[[Sequence[Any], Sequence[Any]], Any]
) -> Any:
    zeros = (np.uint32(0),) * len(words)
    return lax.reduce(tuple(words), zeros, add, tuple(range(words[0].ndim)))


def _add_each(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    return list(map(operator.add, a, b))


def _add_with_carry(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> Counter:
    return counter.add(Counter(*a), Counter(*b))
