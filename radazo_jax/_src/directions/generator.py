"""Random numbers by position, a 64-bit counter in two 32-bit words.

The number at position `i` of a draw depends on `(key, i)` alone, so that any block of a
large array can be drawn, and drawn again, on the device that needs it.

The generator is Threefry-2x32, and the mapping from counters to bits is the one of
`jax.random` under `jax_threefry_partitionable` (JAX's default): the same bits, the same
normals. It is written out in `jax.numpy` rather than called as JAX's primitive, which
compiles to a rolled loop on CPU that nothing can be fused with.

References:
  Salmon et al., [Parallel Random Numbers: As Easy as 1, 2,
  3](https://doi.org/10.1145/2063384.2063405), SC 2011.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src.base.names import checks_names
from radazo_jax._src.base.trees import STATIC

_WORD = 2**32


class Counter(NamedTuple):
    """64-bit integers in two 32-bit words.

    Attributes:
      hi: The high words: uint32, any shape.
      lo: The low words: uint32, the same shape.
    """

    hi: jax.Array
    lo: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Positions:
    """Positions of elements among all coordinates, which are numbered from 0.

    Attributes:
      hi: The high words of 64-bit numbers: uint32, any shape.
      lo: The low words: uint32, the same shape.
      dimension: d, how many coordinates there are: a Python integer.
    """

    hi: jax.Array
    lo: jax.Array
    dimension: int = dataclasses.field(metadata=STATIC)


@checks_names
def positions(
    shape: Sequence[int],
    indices: Sequence[jax.Array] | None = None,
    offset: int = 0,
    dimension: int | None = None,
) -> Positions:
    """Returns row-major flat positions of the elements of an array.

    Args:
      shape: The shape of the whole array.
      indices: The elements to compute, as a uint32 array per axis that broadcast
        together. `None` asks for all of them.
      offset: The position of the array's first element, a non-negative integer.
      dimension: d, how many coordinates there are; by default, those up to the
        array's last element.

    Returns:
      The positions, in the broadcast shape of `indices`.

    Examples:
      >>> from radazo_jax import random
      >>> random.positions((2, 3)).lo
      Array([[0, 1, 2],
             [3, 4, 5]], dtype=uint32)
    """
    shape = tuple(shape)
    if indices is None:
        indices = block(shape)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    out_shape = jnp.broadcast_shapes(*(index.shape for index in indices))
    # Arrays that end below 2^32 need no carries, and no high words.
    small = math.prod(shape) <= _WORD
    local = zero()
    for index, stride in zip(indices, strides, strict=True):
        if small:
            term = index * np.uint32(stride % _WORD)
            local = Counter(local.hi, local.lo + term)
        else:
            local = add(local, _multiply(index, stride))
    high, low = np.uint32(offset // _WORD), np.uint32(offset % _WORD)
    if small and int(low) + math.prod(shape) <= _WORD:
        result = Counter(local.hi + high, local.lo + low)
    else:
        result = add(local, Counter(jnp.asarray(high), jnp.asarray(low)))
    if dimension is None:
        dimension = offset + math.prod(shape)
    hi, lo = (jnp.broadcast_to(word, out_shape) for word in result)
    return Positions(hi, lo, dimension)


def block(
    sizes: Sequence[int], starts: Sequence[jax.typing.ArrayLike] | None = None
) -> list[jax.Array]:
    """Returns indices of a rectangular block, one broadcastable uint32 array per axis.

    Args:
      sizes: The block's shape.
      starts: Its first element, static or traced integers; `None` is the origin.

    Returns:
      `len(sizes)` arrays, each of rank `len(sizes)`.
    """
    rank = len(sizes)
    indices = [
        lax.broadcasted_iota(
            jnp.uint32, tuple(size if i == axis else 1 for i in range(rank)), axis
        )
        for axis, size in enumerate(sizes)
    ]
    if starts is None:
        return indices
    return [
        index + jnp.asarray(start).astype(jnp.uint32)
        for index, start in zip(indices, starts, strict=True)
    ]


def zero() -> Counter:
    """Returns 0, shape ()."""
    return Counter(jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32))


def add(a: Counter, b: Counter) -> Counter:
    """Adds 64-bit integers modulo 2^64."""
    lo = a.lo + b.lo
    return Counter(a.hi + b.hi + (lo < b.lo).astype(jnp.uint32), lo)


def shift_left(word: jax.Array, distance: int) -> Counter:
    """Multiplies a 32-bit word by 2^distance < 2^64, modulo 2^64."""
    if distance >= 32:
        return Counter(word << np.uint32(distance - 32), jnp.zeros_like(word))
    # By two shifts, because a shift by 32 is not defined.
    hi = word >> np.uint32(31 - distance) >> np.uint32(1)
    return Counter(hi, word << np.uint32(distance))


def shift_right(at: Counter | Positions, distance: int) -> Counter:
    """Divides 64-bit integers by 2^distance, from 2 to 2^31, rounded down."""
    down, up = np.uint32(distance), np.uint32(32 - distance)
    return Counter(at.hi >> down, (at.lo >> down) | (at.hi << up))


def concatenate(parts: Sequence[Positions]) -> Positions:
    """Joins positions, to be drawn together; `split_flat` takes them apart.

    A part that is alone keeps its shape. Several become one axis.
    """
    if len(parts) == 1:
        return parts[0]
    return Positions(
        jnp.concatenate([jnp.ravel(part.hi) for part in parts]),
        jnp.concatenate([jnp.ravel(part.lo) for part in parts]),
        parts[0].dimension,
    )


def split_flat(drawn: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Splits a draw into parts of these shapes."""
    if len(shapes) == 1:
        return [drawn]
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    parts = jnp.split(drawn, ends)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def low(word: jax.Array) -> Counter:
    """Returns a 32-bit word as a 64-bit integer."""
    return Counter(jnp.zeros_like(word), word)


def _multiply(index: jax.Array, stride: int) -> Counter:
    """Multiplies `index` by `stride` modulo 2^64."""
    product = wide_product(index, np.uint32(stride % _WORD))
    return Counter(product.hi + index * np.uint32(stride // _WORD % _WORD), product.lo)


def wide_product(a: jax.Array, b: np.uint32) -> Counter:
    """Multiplies 32-bit words to 64 bits, by their 16-bit halves."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a_hi, a_lo, b_hi, b_lo = a >> half, a & mask, b >> half, b & mask
    lowest = a_lo * b_lo
    middle = a_hi * b_lo + (lowest >> half)
    other = a_lo * b_hi + (middle & mask)
    return Counter(a_hi * b_hi + (middle >> half) + (other >> half), a * b)


At = Positions | Counter

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)

# The rounds for numbers that are not the numbers of `jax.random`.
_FEWER_ROUNDS = 13

# Distance between the positions of two normal numbers that share a block.
PAIR = 16

# sin(π x / 2) / x for x in [-1, 1] as a polynomial in x², interpolated at Chebyshev's
# points: its relative error is 7e-9.
_SINE = tuple(
    np.float32(c)
    for c in (1.57079632, -0.645963760, 0.0796899183, -4.67414384e-3, 1.51671704e-4)
)


# Inlined into the program, but traced once for all draws of a shape.
@functools.partial(jax.jit, static_argnames="rounds", inline=True)
def words(key: jax.Array, at: At, rounds: int = 20) -> tuple[jax.Array, jax.Array]:
    """Computes the two 32-bit words of Threefry-2x32 at these positions."""
    k0, k1 = jnp.moveaxis(jax.random.key_data(key), -1, 0)
    ks = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = at.hi + ks[0], at.lo + ks[1]
    for done in range(1, rounds + 1):
        group, i = divmod(done - 1, 4)
        x0 = x0 + x1
        x1 = x0 ^ _rotate_left(x1, _ROTATIONS[group % 2][i])
        if done % 4 == 0:
            x0 = x0 + ks[(group + 1) % 3]
            x1 = x1 + ks[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
    """Returns the key of `jax.random.fold_in(key, data)`, for a uint32.

    XLA's CPU backend compiles it to a few instructions. JAX's becomes a loop that
    takes 5 % of a step in 10⁴ dimensions.
    """
    made = jnp.stack(words(key, Counter(jnp.zeros_like(data), data)), axis=-1)
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(key))


@checks_names
def bits(key: jax.Array, at: At) -> jax.Array:
    """Draws 32 uniform random bits per position.

    Args:
      key: A typed key; it is consumed by the positions drawn, not as a whole.
      at: The positions.

    Returns:
      uint32, of the shape of the positions, bit for bit
      `jax.random.bits(key, shape)` at these positions.

    Examples:
      >>> import jax
      >>> from radazo_jax import random
      >>> key = jax.random.key(0)
      >>> mine = random.bits(key, random.positions((3,)))
      >>> bool((mine == jax.random.bits(key, (3,))).all())
      True
    """
    first, second = words(key, at)
    return first ^ second


@checks_names
def uniform(key: jax.Array, at: At) -> jax.Array:
    """Draws a number per position, uniform in [0, 1).

    Args:
      key: A typed key; it is consumed by the positions drawn, not as a whole.
      at: The positions.

    Returns:
      float32, of the shape of the positions, bit for bit
      `jax.random.uniform(key, shape, "float32")` at these positions.

    Examples:
      >>> import jax
      >>> from radazo_jax import random
      >>> key = jax.random.key(0)
      >>> mine = random.uniform(key, random.positions((3,)))
      >>> bool((mine == jax.random.uniform(key, (3,))).all())
      True
    """
    # 23 random bits after the exponent of 1 make a number in [1, 2).
    mantissa = (bits(key, at) >> np.uint32(9)) | np.uint32(0x3F800000)
    return lax.bitcast_convert_type(mantissa, jnp.float32) - np.float32(1)


@checks_names
def normal(key: jax.Array, at: At) -> jax.Array:
    """Draws a standard normal number per position.

    Args:
      key: A typed key; it is consumed by the positions drawn, not as a whole.
      at: The positions.

    Returns:
      float32, of the shape of the positions, bit for bit
      `jax.random.normal(key, shape, "float32")` at these positions.

    Examples:
      >>> import jax
      >>> from radazo_jax import random
      >>> key = jax.random.key(0)
      >>> mine = random.normal(key, random.positions((3,)))
      >>> bool((mine == jax.random.normal(key, (3,))).all())
      True
    """
    # Moved to (-1, 1), so that the inverse error function stays finite.
    low = np.nextafter(np.float32(-1), np.float32(0))
    symmetric = jnp.maximum(low, uniform(key, at) * (np.float32(1) - low) + low)
    return np.float32(math.sqrt(2)) * lax.erf_inv(symmetric)


def fast_normal(key: jax.Array, at: At) -> jax.Array:
    """Draws a standard normal number per position, of which two share a block.

    √(−2 log v) sin(φ) and √(−2 log v) cos(φ) with v uniform in (0, 1) and φ in
    (−π, π). The position of the second number is 16 after the first, in each 32. The
    tails are longer than the tails of `normal`: 6.7 standard deviations instead of 5.4.

    Threefry-2x32 passes the tests of its authors from 13 rounds on.

    Args:
      key: A typed key; it is consumed by the positions drawn, not as a whole.
      at: The positions.

    Returns:
      float32, the shape of the positions. Not the numbers of `jax.random`.

    References:
      Box & Muller, A Note on the Generation of Random Normal Deviates, 1958,
      <https://doi.org/10.1214/aoms/1177706645>; Salmon et al., 2011, table 2.
    """
    first_of_pair = Counter(at.hi, at.lo & np.uint32(2**32 - 1 - PAIR))
    radius, sine, cosine = _polar(*words(key, first_of_pair, _FEWER_ROUNDS))
    is_second = (at.lo & np.uint32(PAIR)) != 0
    return radius * _sine(jnp.where(is_second, cosine, sine))


def normal_pairs(key: jax.Array, at: At) -> jax.Array:
    """Draws the numbers of `fast_normal` at positions, and at 16 positions after them.

    One complex number holds both, because XLA would compute the words for each of two
    arrays.

    Args:
      key: A typed key.
      at: Positions of first numbers.

    Returns:
      complex64, of the shape of the positions.
    """
    radius, sine, cosine = _polar(*words(key, at, _FEWER_ROUNDS))
    return lax.complex(radius * _sine(sine), radius * _sine(cosine))


def _polar(
    first: jax.Array, second: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a pair's radius, and angles whose sines are its sine and its cosine.

    An angle is a word: a quarter of a turn, times 2⁻³¹. 31 bits of the first word make
    the radius, the others the angle.
    """
    v = _as_float(first >> np.uint32(1)) * np.float32(2**-31) + np.float32(2**-32)
    # The second word is an angle in the right half of the plane, and the last bit of
    # the first word chooses the half.
    magnitude = second ^ -(second >> np.uint32(31))
    cosine = magnitude ^ np.uint32(2**31 - 1) ^ -(first & np.uint32(1))
    return jnp.sqrt(np.float32(-2) * jnp.log(v)), second, cosine


def _sine(angle: jax.Array) -> jax.Array:
    x = _as_float(angle) * np.float32(2**-31)
    square = x * x
    sine = jnp.full_like(square, _SINE[-1])
    for coefficient in _SINE[-2::-1]:
        sine = sine * square + coefficient
    return x * sine


def _as_float(word: jax.Array) -> jax.Array:
    # Signed, because their conversion is one instruction.
    return lax.bitcast_convert_type(word, jnp.int32).astype(jnp.float32)


def below(key: jax.Array, at: At, bound: int) -> Counter:
    """Draws a uniform integer in `[0, bound)` per position.

    Args:
      key: A typed key; it is consumed by the positions drawn, not as a whole.
      at: The positions.
      bound: A positive integer below 2^64.

    Returns:
      The integers, `floor(r * bound / 2^64)` of 64 random bits `r`: each has a
      probability within 2^-64 of `1 / bound`.
    """
    hi, lo = words(key, at)
    bound_hi, bound_lo = np.uint32(bound // 2**32), np.uint32(bound % 2**32)
    # Long multiplication, word by word; only the words from 2^64 up are kept.
    carried = low(wide_product(lo, bound_lo).hi)
    lowest = add(wide_product(hi, bound_lo), carried)
    middle = add(wide_product(lo, bound_hi), low(lowest.lo))
    top = add(wide_product(hi, bound_hi), low(lowest.hi))
    return add(top, low(middle.hi))


def _rotate_left(x: jax.Array, distance: int) -> jax.Array:
    return (x << np.uint32(distance)) | (x >> np.uint32(32 - distance))
