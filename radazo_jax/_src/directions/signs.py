"""The distributions whose elements are signs, of which 32 share a word."""

import abc
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src import xla
from radazo_jax._src.directions import packing
from radazo_jax._src.directions.distribution import Distribution, UnitNorm
from radazo_jax._src.directions.elements import PackedSigns, sign
from radazo_jax._src.directions.packing import Packing
from radazo_jax._src.names import checks_names
from radazo_jax._src.numbers import counter, generator
from radazo_jax._src.numbers.counter import Counter, Positions

# For each of the five low bits of a position, the positions of a word that have it.
_BITS = (0xAAAAAAAA, 0xCCCCCCCC, 0xF0F0F0F0, 0xFF00FF00, 0xFFFF0000)

# How often the number of a row is mixed.
_TERMS = 4


class _Signed(Distribution):
    """Distributions that draw the signs of 32 neighbors together, and store a word."""

    def _packing(self, dimension: int) -> Packing:
        def unpack(words: jax.Array, start: Any, shape: tuple[int, ...]) -> PackedSigns:
            magnitude = self._magnitude(dimension)
            return PackedSigns(_from_bit(words, start), shape, magnitude)

        return Packing(1, 1, self._word, unpack, _choose_units)

    @abc.abstractmethod
    def _word(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        """uint32: bit b of word w says whether element 32 w + b is negative."""

    def _magnitude(self, dimension: int) -> float:
        """The absolute value of all elements."""
        del dimension
        return 1.0

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        words = Positions(*counter.shift_right(at, 5), at.dimension)
        word = self._word(key, number, words)
        bit = word >> (at.lo & np.uint32(31))
        return sign(bit, self._magnitude(at.dimension))


def _choose_units(size: int, stored: bool) -> Callable[..., Any]:
    # A CPU that does not store words would compute one for each of its elements, and a
    # TPU would copy what is made of words into another order.
    del size
    return packing.together if stored else xla.on_one_gpu


def _from_bit(words: jax.Array, start: Any) -> jax.Array:
    """The words along the last axis, from a bit of the first one on."""
    if isinstance(start, int) and start == 0:
        return words
    start = jnp.uint32(start)
    # By two shifts, because one by 32 has no value.
    high = words[..., 1:] << (31 - start) << np.uint32(1)
    return (words[..., :-1] >> start) | high


class Rademacher(_Signed):
    """See `rademacher`."""

    _constructor = "rademacher"

    def factor(self, dimension: int) -> float:
        del dimension
        return 1.0

    def _word(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        return generator.bits(key, at)


class Orthonormal(UnitNorm, _Signed):
    """See `orthonormal`."""

    _constructor = "orthonormal"
    sequential = True

    def _magnitude(self, dimension: int) -> float:
        return 1 / math.sqrt(max(dimension, 1))

    def _word(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        num_bits = _num_bits(at.dimension)
        cycle = number >> np.uint32(num_bits) if num_bits < 32 else number * 0
        key = generator.fold_in(key, cycle)
        row = _row(key, number, num_bits)
        # Of the bits of a position, the low five lie in its word, the others in the
        # number of the word.
        above = counter.shift_right(row, 5)
        common = lax.population_count(above.lo & at.lo)
        if num_bits > 37:
            common = common + lax.population_count(above.hi & at.hi)
        word = generator.bits(key, at) ^ -(common & np.uint32(1))
        for bit, pattern in enumerate(_BITS[:num_bits]):
            is_set = (row.lo >> np.uint32(bit)) & np.uint32(1)
            word = word ^ (np.uint32(pattern) & -is_set)
        return word


def _num_bits(dimension: int) -> int:
    """The number of bits that number the coordinates: the log₂ of the basis size."""
    return max(dimension - 1, 0).bit_length()


def _row(key: jax.Array, number: jax.Array, num_bits: int) -> Counter:
    """Which row the direction of this number is, by a random bijection."""
    # The words of signs are drawn at positions below 2^59.
    here = jnp.full((2 * _TERMS,), 0xFFFFFFFF, jnp.uint32)
    drawn = generator.bits(key, Counter(here, jnp.arange(2 * _TERMS, dtype="uint32")))
    low_bits = min(num_bits, 32)
    mask = np.uint32(2**low_bits - 1)
    row = number & mask
    # Each of the two mixes is a bijection: a product with an odd number, and a shift.
    for factor, term in drawn.reshape(_TERMS, 2):
        row = (row * (factor | np.uint32(1)) + term) & mask
        row = row ^ (row >> np.uint32(max(1, low_bits - low_bits // 2)))
    high = jnp.zeros_like(row)
    if num_bits > 32:
        # There are 2^32 numbers, whose low words differ.
        at = Counter(jnp.full_like(row, 0xFFFFFFFE), row)
        high = generator.bits(key, at) & np.uint32(2 ** (num_bits - 32) - 1)
    return Counter(high, row)


@checks_names
def rademacher() -> Distribution:
    """Independent random signs: E[u uᵀ] = I, the factor is c = 1.

    The cheapest dense distribution: one random bit per element. Of all distributions
    with independent centered elements it has the smallest variance. Its directions have
    norm √d, and the directions of `sphere` norm 1: the same `smoothing` moves the
    parameters √d times as far.

    Returns:
      The distribution.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, distribution = jnp.zeros(4), zo.rademacher()
      >>> u = distribution.materialize(
      ...     distribution.sample(jax.random.key(0), params), params
      ... )
      >>> bool((abs(u) == 1).all())
      True

    References:
      Spall, Multivariate Stochastic Approximation Using a Simultaneous Perturbation
      Gradient Approximation, 1992, <https://doi.org/10.1109/9.119632>.
    """
    return Rademacher()


@checks_names
def orthonormal() -> Distribution:
    """Rows of a random orthonormal basis, without replacement.

    Independent directions repeat the measurements of earlier ones. Here direction i of
    a run is row i mod n of a randomized Walsh-Hadamard basis, in a random order, and
    every n directions there is a new basis; n is the least power of two that is not
    below d, the number of all coordinates. An element is ±1/√d, so that all directions
    have norm 1, and E[u uᵀ] = I/d: the factor is c = d. Over each basis the mean of
    u uᵀ is I/d exactly. If d is a power of two, its directions are orthogonal.
    Otherwise there are n > d of them, which cannot all be orthogonal, and d evaluations
    do not span all coordinates.

    Step t of a run with K directions per step uses the directions tK to tK + K − 1.
    Each call of `value_and_grad` is a run of one step: only the directions of the same
    call are drawn without replacement. After 2³² directions, a run takes another key.

    Returns:
      The distribution.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, estimator = jnp.zeros(4), zo.forward_difference(zo.orthonormal(), 4)
      >>> draw = zo.estimators.Draw.once(jax.random.key(0))
      >>> points, _ = estimator.points(draw, params, estimator.init(params))
      >>> u = zo.estimators.candidates(points, params)[1:] / points.scales
      >>> bool(jnp.allclose(u @ u.T, jnp.eye(4)))
      True

    References:
      Choromanski et al., Structured Evolution with Compact Architectures for Scalable
      Policy Optimization, ICML 2018, <https://arxiv.org/abs/1804.02395>, with one
      basis a step.
    """
    return Orthonormal()
