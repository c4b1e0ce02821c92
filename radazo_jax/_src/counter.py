"""Random numbers by position.

The number at position `i` of a draw depends on `(key, i)` alone, so that any
block of a large array can be drawn (and drawn again) where it is needed, on
whichever device that happens to be. `i` is a 64-bit counter held in two 32-bit
words.

The generator is Threefry-2x32, and the mapping from counters to bits is the one of
`jax.random` under `jax_threefry_partitionable` (JAX's default): the same bits,
the same normals. It is written out in `jax.numpy` rather than called as JAX's
primitive, which compiles to a rolled loop on CPU that nothing can be fused with.

References:
  Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011,
  <https://doi.org/10.1145/2063384.2063405>.
"""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_WORD = 2**32

# sin(π x / 2) / x for x in [-1, 1] as a polynomial in x², interpolated at Chebyshev's
# points: its relative error is 7e-9.
_SINE = tuple(
    np.float32(c)
    for c in (1.57079632, -0.645963760, 0.0796899183, -4.67414384e-3, 1.51671704e-4)
)


class Counter(NamedTuple):
    """64-bit counters in two 32-bit words.

    Attributes:
      hi: The high words: uint32, any shape.
      lo: The low words: uint32, the same shape.
    """

    hi: jax.Array
    lo: jax.Array


def as_key(key: jax.typing.ArrayLike, name: str = "key") -> jax.Array:
    """Turns whatever JAX users call a key into a typed Threefry key.

    Args:
      key: A typed key, a raw `uint32[2]` key, or an integer seed.
      name: The name of the argument in error messages.

    Returns:
      A typed scalar key of the `threefry2x32` implementation.

    Raises:
      TypeError: If `key` is none of these.
      ValueError: If `key` is a batch of keys, or of another implementation:
        `rbg` keys draw other numbers under `vmap` than one by one, and a
        direction could not be drawn again.
    """
    if isinstance(key, bool) or not (
        isinstance(key, jax.Array | np.ndarray | np.generic)
        or hasattr(key, "__index__")
    ):
        raise TypeError(
            f"{name} must be a key such as jax.random.key(0), or an integer seed; "
            f"got {key!r}."
        )
    if not isinstance(key, jax.Array | np.ndarray | np.generic):
        return jax.random.key(operator.index(key), impl="threefry2x32")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(key))
        if "threefry" not in impl and impl != "fry":
            raise ValueError(_wrong_implementation(name, impl))
        _check_scalar(name, key.shape)
        return jnp.asarray(key)
    if key.dtype == jnp.uint32 and key.shape == (4,):
        raise ValueError(_wrong_implementation(name, "rbg (raw, uint32[4])"))
    if key.dtype == jnp.uint32 and key.ndim > 0 and key.shape[-1] == 2:
        _check_scalar(name, key.shape[:-1])
        return jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
    if jnp.issubdtype(key.dtype, jnp.integer) and key.shape == ():
        return jax.random.key(key, impl="threefry2x32")
    raise TypeError(
        f"{name} must be a key such as jax.random.key(0), or an integer seed; got an "
        f"array of dtype {key.dtype} and shape {key.shape}."
    )


def _check_scalar(name: str, shape: tuple[int, ...]) -> None:
    if shape != ():
        raise ValueError(
            f"{name} must be a single key; got keys of shape {shape}. Use jax.vmap "
            "to work with several."
        )


def _wrong_implementation(name: str, impl: str) -> str:
    return (
        f"{name} must be a threefry2x32 key; got one of implementation {impl}, whose "
        "numbers change under jax.vmap, so that a direction cannot be drawn again. "
        "Use jax.random.key(seed, impl='threefry2x32')."
    )


def positions(
    shape: Sequence[int],
    indices: Sequence[jax.Array] | None = None,
    offset: int = 0,
) -> Counter:
    """Row-major flat positions in an array, as 64-bit counters.

    Args:
      shape: The shape of the whole array.
      indices: One uint32 array per axis, which broadcast together: the elements
        asked for. `None` asks for all of them.
      offset: The position of the array's first element, a non-negative integer.

    Returns:
      The positions, in the broadcast shape of `indices`.

    Examples:
      >>> from radazo_jax._src import counter
      >>> counter.positions((2, 3)).lo
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
            low = local.lo + index * np.uint32(stride % _WORD)
            local = Counter(local.hi, low)
        else:
            local = add(local, _multiply(index, stride))
    hi, lo = np.uint32(offset // _WORD), np.uint32(offset % _WORD)
    if small and int(lo) + math.prod(shape) <= _WORD:
        result = Counter(local.hi + hi, local.lo + lo)
    else:
        result = add(local, Counter(jnp.asarray(hi), jnp.asarray(lo)))
    return Counter(*(jnp.broadcast_to(word, out_shape) for word in result))


def block(
    sizes: Sequence[int], starts: Sequence[jax.typing.ArrayLike] | None = None
) -> list[jax.Array]:
    """Indices of a rectangular block, one broadcastable uint32 array per axis.

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
    """0, shape ()."""
    return Counter(jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32))


def add(a: Counter, b: Counter) -> Counter:
    """The sum modulo 2^64."""
    lo = a.lo + b.lo
    return Counter(a.hi + b.hi + (lo < b.lo).astype(jnp.uint32), lo)


def shift_left(word: jax.Array, distance: int) -> Counter:
    """A 32-bit word times 2^distance, modulo 2^64; `distance` is below 64."""
    if distance >= 32:
        return Counter(word << np.uint32(distance - 32), jnp.zeros_like(word))
    # By two shifts, for one by 32 is not defined.
    hi = word >> np.uint32(31 - distance) >> np.uint32(1)
    return Counter(hi, word << np.uint32(distance))


def concatenate(counters: Sequence[Counter]) -> Counter:
    """All counters as one, [n], to be drawn together; `split` takes them apart."""
    return Counter(
        jnp.concatenate([jnp.ravel(counter.hi) for counter in counters]),
        jnp.concatenate([jnp.ravel(counter.lo) for counter in counters]),
    )


def split(drawn: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """What was drawn for each of the counters of these shapes."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    parts = jnp.split(drawn, ends)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def words(key: jax.Array, counter: Counter) -> tuple[jax.Array, jax.Array]:
    """The two 32-bit words of Threefry-2x32 (20 rounds) at `counter`."""
    k0, k1 = jnp.moveaxis(jax.random.key_data(key), -1, 0)
    ks = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = counter.hi + ks[0], counter.lo + ks[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ _rotate_left(x1, rotation)
        x0 = x0 + ks[(group + 1) % 3]
        x1 = x1 + ks[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
    """The keys of `jax.vmap(jax.random.fold_in, (None, 0))(key, data)`.

    Args:
      key: A typed key, shape ().
      data: uint32, any shape.

    Returns:
      Typed keys in the shape of `data`. XLA's CPU backend compiles them to a few
      instructions, where `jax.random.fold_in` becomes a loop.
    """
    made = jnp.stack(words(key, Counter(jnp.zeros_like(data), data)), axis=-1)
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(key))


def bits(key: jax.Array, counter: Counter) -> jax.Array:
    """32 uniform random bits per position.

    Args:
      key: A typed key; it is consumed by the positions drawn, not as a whole.
      counter: The positions.

    Returns:
      uint32, the shape of the positions: bit for bit
      `jax.random.bits(key, shape)` at these positions.

    Examples:
      >>> import jax
      >>> from radazo_jax._src import counter
      >>> key = jax.random.key(0)
      >>> mine = counter.bits(key, counter.positions((3,)))
      >>> bool((mine == jax.random.bits(key, (3,))).all())
      True
    """
    first, second = words(key, counter)
    return first ^ second


def normal(key: jax.Array, counter: Counter) -> jax.Array:
    """One standard normal number per position.

    Args:
      key: A typed key; it is consumed by the positions drawn, not as a whole.
      counter: The positions.

    Returns:
      float32, the shape of the positions: bit for bit
      `jax.random.normal(key, shape, "float32")` at these positions.

    Examples:
      >>> import jax
      >>> from radazo_jax._src import counter
      >>> key = jax.random.key(0)
      >>> mine = counter.normal(key, counter.positions((3,)))
      >>> bool((mine == jax.random.normal(key, (3,))).all())
      True
    """
    # 23 random bits behind the exponent of 1 make a number in [1, 2); it is moved
    # to (-1, 1), so that the inverse error function stays finite.
    mantissa = (bits(key, counter) >> np.uint32(9)) | np.uint32(0x3F800000)
    unit = lax.bitcast_convert_type(mantissa, jnp.float32) - np.float32(1)
    low = np.nextafter(np.float32(-1), np.float32(0))
    uniform = jnp.maximum(low, unit * (np.float32(1) - low) + low)
    return np.float32(math.sqrt(2)) * lax.erf_inv(uniform)


def fast_normal(key: jax.Array, counter: Counter) -> jax.Array:
    """One standard normal number per position, in little more than half the time.

    √(−2 log v) sin(π x / 2) with v uniform in (0, 1) and x in (-1, 1), one from each of
    the two words of the generator, 31 and 32 bits: cheaper than the inverse error
    function, and with longer tails (6.7 standard deviations; `normal` has 5.4).

    Args:
      key: A typed key; it is consumed by the positions drawn, not as a whole.
      counter: The positions.

    Returns:
      float32, the shape of the positions. Not the numbers of `jax.random`.

    References:
      Box & Muller, A Note on the Generation of Random Normal Deviates, 1958,
      <https://doi.org/10.1214/aoms/1177706645>.
    """
    first, second = words(key, counter)
    # Signed words, for their conversion to floats is one instruction.
    v = _as_float(first >> np.uint32(1)) * np.float32(2**-31) + np.float32(2**-32)
    x = _as_float(second) * np.float32(2**-31)
    square = x * x
    sine = jnp.full_like(square, _SINE[-1])
    for coefficient in _SINE[-2::-1]:
        sine = sine * square + coefficient
    return jnp.sqrt(np.float32(-2) * jnp.log(v)) * (x * sine)


def _as_float(word: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(word, jnp.int32).astype(jnp.float32)


def below(key: jax.Array, counter: Counter, bound: int) -> Counter:
    """A uniform integer in `[0, bound)` per position.

    Args:
      key: A typed key; it is consumed by the positions drawn, not as a whole.
      counter: The positions.
      bound: A positive integer below 2^64.

    Returns:
      The integers, `floor(r * bound / 2^64)` of 64 random bits `r`: each has a
      probability within 2^-64 of `1 / bound`.
    """
    hi, lo = words(key, counter)
    bound_hi, bound_lo = np.uint32(bound // _WORD), np.uint32(bound % _WORD)
    # Long multiplication, word by word; only the words from 2^64 up are kept.
    low = add(_wide_product(hi, bound_lo), _low(_wide_product(lo, bound_lo).hi))
    middle = add(_wide_product(lo, bound_hi), _low(low.lo))
    top = add(_wide_product(hi, bound_hi), _low(low.hi))
    return add(top, _low(middle.hi))


def _low(word: jax.Array) -> Counter:
    return Counter(jnp.zeros_like(word), word)


def _rotate_left(x: jax.Array, distance: int) -> jax.Array:
    return (x << np.uint32(distance)) | (x >> np.uint32(32 - distance))


def _multiply(index: jax.Array, stride: int) -> Counter:
    """`index * stride` modulo 2^64."""
    product = _wide_product(index, np.uint32(stride % _WORD))
    return Counter(product.hi + index * np.uint32(stride // _WORD % _WORD), product.lo)


def _wide_product(a: jax.Array, b: np.uint32) -> Counter:
    """The 64 bits of a product of 32-bit words, by its 16-bit halves."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a_hi, a_lo, b_hi, b_lo = a >> half, a & mask, b >> half, b & mask
    low = a_lo * b_lo
    middle = a_hi * b_lo + (low >> half)
    other = a_lo * b_hi + (middle & mask)
    return Counter(a_hi * b_hi + (middle >> half) + (other >> half), a * b)
