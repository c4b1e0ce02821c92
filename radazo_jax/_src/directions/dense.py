"""The distributions `sphere`, `gaussian` and `coordinate`."""

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
from radazo_jax._src.directions.elements import DenseElements, sign
from radazo_jax._src.directions.packing import Packing
from radazo_jax._src.names import checks_names
from radazo_jax._src.numbers import counter, generator
from radazo_jax._src.numbers.counter import Counter, Positions
from radazo_jax._src.numbers.generator import PAIR

# Between so many numbers they are drawn in pairs: fewer are not worth the longer
# compilation, and pairs are stored before they are split, in 64 MiB at most.
_FEWEST, _MOST = 2**13, 2**24


class Normals(Distribution):
    """Distributions of normal numbers that are not the numbers of `jax.random`."""

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        return generator.fast_normal(key, at)

    def _packing(self, dimension: int) -> Packing:
        del dimension
        return _PAIRS


def _choose_pairs(size: int, stored: bool) -> Callable[..., Any]:
    # Elsewhere than on a single CPU, what is drawn together would be copied into the
    # shape of the leaf, or sent to other devices.
    fits = stored and _FEWEST <= size <= _MOST
    return xla.on_one_cpu if fits else packing.apart


def _draw(key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
    """The two numbers of each pair: complex64."""
    del number
    near = at.lo & np.uint32(PAIR - 1)
    hi = (at.hi << np.uint32(1)) | (at.lo >> np.uint32(31))
    return generator.normal_pairs(key, Counter(hi, 2 * at.lo - near))


def _unpack(pairs: jax.Array, start: Any, shape: tuple[int, ...]) -> DenseElements:
    stacked = pairs.shape[:-1]
    grouped = pairs.reshape(*stacked, -1, PAIR)
    numbers = jnp.stack([grouped.real, grouped.imag], axis=-2).reshape(*stacked, -1)
    size = math.prod(shape)
    if isinstance(start, int):
        numbers = numbers[..., start : start + size]
    else:
        numbers = lax.dynamic_slice_in_dim(numbers, start, size, axis=-1)
    return DenseElements(numbers.reshape(*stacked, *shape))


# Both numbers of a pair lie in the same group of neighbors.
_PAIRS = Packing(PAIR, 2, _draw, _unpack, _choose_pairs)


class Gaussian(Distribution):
    """See `gaussian`."""

    _constructor = "gaussian"

    def factor(self, dimension: int) -> float:
        del dimension
        return 1.0

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        return generator.normal(key, at)


class Sphere(UnitNorm, Normals):
    """See `sphere`: the numbers of `Normals.draw`, divided by their norm."""

    _constructor = "sphere"
    normalized = True


@checks_names
def sphere() -> Distribution:
    """Uniform on the unit sphere of all coordinates: the distribution of the paper.

    A standard normal vector divided by its norm, which is taken over the whole tree.
    E[u uᵀ] = I/d, so the factor is c = d, the number of all coordinates.

    Returns:
      The distribution.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
      >>> distribution = zo.sphere()
      >>> u = distribution.materialize(
      ...     distribution.sample(jax.random.key(0), params), params
      ... )
      >>> print(f"{jnp.sqrt(jnp.sum(u['w'] ** 2) + jnp.sum(u['b'] ** 2)):.5f}")
      1.00000
      >>> distribution.factor(8)
      8.0

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (2).
    """
    return Sphere()


@checks_names
def gaussian() -> Distribution:
    """Independent standard normal elements: E[u uᵀ] = I, the factor is c = 1.

    Returns:
      The distribution.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, key, distribution = jnp.zeros(4), jax.random.key(0), zo.gaussian()
      >>> u = distribution.materialize(distribution.sample(key, params), params)
      >>> bool((u == jax.random.normal(key, (4,))).all())
      True

    References:
      Nesterov & Spokoiny, Random Gradient-Free Minimization of Convex Functions, 2017,
      <https://doi.org/10.1007/s10208-015-9296-2>.
    """
    return Gaussian()


# How often numbers change places, or not, to be in a random order.
_ROUNDS = 24


class Coordinate(UnitNorm):
    """See `coordinate`."""

    _constructor = "coordinate"

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        chosen = generator.below(key, counter.zero(), max(at.dimension, 1))
        signed = sign(_bit(key, 0, jnp.uint32(1)))
        return jnp.where((at.hi == chosen.hi) & (at.lo == chosen.lo), signed, 0.0)


class CoordinateInTurn(UnitNorm):
    """See `coordinate`, without replacement."""

    sequential = True

    def __repr__(self) -> str:
        return "coordinate(replace=False)"

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        if at.dimension >= 2**32:
            raise ValueError(
                "params must have fewer than 2^32 coordinates under "
                f"coordinate(replace=False); got {at.dimension}."
            )
        size = np.uint32(max(at.dimension, 1))
        key = generator.fold_in(key, number // size)
        chosen = shuffled(key, number % size, size)
        signed = sign(_bit(key, _ROUNDS, chosen))
        return jnp.where((at.hi == 0) & (at.lo == chosen), signed, 0.0)


def shuffled(key: jax.Array, index: jax.Array, size: np.uint32) -> jax.Array:
    """Returns the place of a number below `size` in a random order of them.

    In each round, two numbers form a pair if their sum modulo the size is a random
    number, and each pair changes places by the flip of a coin of its own.

    Args:
      key: A typed key.
      index: uint32, shape ().
      size: The number of numbers.

    References:
      Hoang, Morris & Rogaway, An Enciphering Scheme Based on a Card Shuffle, CRYPTO
      2012, <https://arxiv.org/abs/1208.1176>.
    """
    high = jnp.full((_ROUNDS,), 0xFFFFFFFF, jnp.uint32)
    sums = generator.bits(key, Counter(high, jnp.arange(_ROUNDS, dtype="uint32")))
    sums = sums % size

    def turn(i: jax.Array, index: jax.Array) -> jax.Array:
        drawn = sums[i]
        # Without an overflow: drawn - index modulo the size.
        gap = jnp.where(drawn >= index, drawn - index, size - (index - drawn))
        partner = jnp.where(gap == size, 0, gap)
        change = _bit(key, i.astype(jnp.uint32), jnp.maximum(index, partner))
        return jnp.where(change == 1, partner, index)

    # Written out, the rounds would be most of the time that a step compiles. A loop
    # needs a start that varies over the devices of a shard_map as the key does.
    return lax.fori_loop(0, _ROUNDS, turn, index + 0 * sums[0])


def _bit(key: jax.Array, high: jax.typing.ArrayLike, low: jax.Array) -> jax.Array:
    at = Counter(jnp.broadcast_to(jnp.uint32(high), low.shape), low)
    return generator.bits(key, at) >> np.uint32(31)


@checks_names
def coordinate(replace: bool = True) -> Distribution:
    """A coordinate chosen uniformly, with a random sign.

    E[u uᵀ] = I/d, so the factor is c = d. The sign makes the distribution symmetric: a
    forward difference along it has no bias from curvature.

    Without replacement, every d directions of a run are all coordinates once, in a
    random order that is another each time. An estimate along K = d of them is the
    gradient, up to O(μ): *full differences*, which suit optimizers that need one, such
    as `optax.lbfgs`.

    Args:
      replace: Whether each direction is chosen from all coordinates. If not, they are
        numbered through a run, as with `orthonormal`.

    Returns:
      The distribution.

    Raises:
      ValueError: Without replacement, from an estimate, if there are 2³² coordinates or
        more.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, distribution = jnp.zeros(4), zo.coordinate()
      >>> u = distribution.materialize(
      ...     distribution.sample(jax.random.key(0), params), params
      ... )
      >>> float(jnp.sum(abs(u)))
      1.0

      A gradient from differences along all coordinates:

      >>> estimator = zo.forward_difference(
      ...     zo.coordinate(replace=False), num_directions=4, smoothing=1e-3
      ... )
      >>> x = jnp.arange(4.0)
      >>> value_and_grad = zo.value_and_grad(lambda x: jnp.sum(x**2), estimator)
      >>> _, gradient = value_and_grad(jax.random.key(0), x)
      >>> bool(jnp.allclose(gradient, 2 * x, atol=2e-3))
      True

    References:
      Lian et al., A Comprehensive Linear Speedup Analysis for Asynchronous Stochastic
      Parallel Optimization from Zeroth-Order to First-Order, 2016,
      <https://arxiv.org/abs/1606.00498>.
    """
    return Coordinate() if replace else CoordinateInTurn()
