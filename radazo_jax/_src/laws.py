"""The laws of random directions whose elements are drawn one by one."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from radazo_jax._src import counter, exact, fusion
from radazo_jax._src.directions import (
    Direction,
    Law,
    Leaf,
    Signs,
    elements,
    layout,
    num_coordinates,
    sign,
)

# How many coordinates are drawn together where only their norm is asked for.
_CHUNK = 2**18


class Gaussian(Law):
    """See `gaussian`."""

    def factor(self, params: Any) -> float:
        del params
        return 1.0

    def draw(
        self, key: jax.Array, at: counter.Counter, num_coordinates: int
    ) -> jax.Array:
        del num_coordinates
        return counter.normal(key, at)


class Sphere(Law):
    """See `sphere`."""

    def factor(self, params: Any) -> float:
        return float(num_coordinates(layout(params)))

    def draw(
        self, key: jax.Array, at: counter.Counter, num_coordinates: int
    ) -> jax.Array:
        del num_coordinates
        return counter.fast_normal(key, at)

    def normalization(self, draws: Sequence[Any]) -> jax.Array:
        fraction = exact.fraction_bits(sum(draw.size for draw in draws))
        squares = [exact.sum_of_squares(draw, fraction) for draw in draws]
        square = functools.reduce(counter.add, squares, counter.zero())
        return lax.rsqrt(exact.as_float(square, fraction))

    def _scale(self, key: jax.Array, params: Any) -> jax.Array:
        total = num_coordinates(layout(params))

        def at_once(key: jax.Array) -> jax.Array:
            unscaled = Direction(key, jnp.ones((), jnp.float32), self)
            return self.normalization(jax.tree.leaves(elements(unscaled, params)))

        if total <= _CHUNK:
            return at_once(key)
        # XLA's CPU backend stores what it sums, so there it is drawn in pieces.
        in_pieces = functools.partial(self._scale_in_pieces, total=total)
        return lax.platform_dependent(key, cpu=in_pieces, default=at_once)

    def _scale_in_pieces(self, key: jax.Array, *, total: int) -> jax.Array:
        fraction = exact.fraction_bits(total)
        pieces, rest = divmod(total, _CHUNK)

        def squares(at: counter.Counter) -> counter.Counter:
            return exact.sum_of_squares(self.draw(key, at, total), fraction)

        def add(i: jax.Array, sum_before: counter.Counter) -> counter.Counter:
            piece = counter.block((1, _CHUNK), (i, 0))
            at = counter.positions((pieces, _CHUNK), piece)
            return counter.add(sum_before, squares(at))

        last = squares(counter.positions((rest,), offset=pieces * _CHUNK))
        square = lax.fori_loop(0, pieces, add, last)
        return lax.rsqrt(exact.as_float(square, fraction))


class Rademacher(Law):
    """See `rademacher`."""

    def factor(self, params: Any) -> float:
        del params
        return 1.0

    def draw(
        self, key: jax.Array, at: counter.Counter, num_coordinates: int
    ) -> jax.Array:
        del num_coordinates
        # A random word serves 32 elements, a bit each.
        word = counter.Counter(
            at.hi >> np.uint32(5),
            (at.lo >> np.uint32(5)) | (at.hi << np.uint32(27)),
        )
        return sign(counter.bits(key, word) >> (at.lo & np.uint32(31)))

    def whole(
        self, direction: Direction, leaf: Leaf, num_coordinates: int
    ) -> jax.Array:
        def from_words(direction: Direction) -> jax.Array:
            key = direction.key
            words = fusion.compute_once(functools.partial(_words, leaf=leaf), key, key)
            return direction.scale * Signs(words).elements(leaf.shape)

        elementwise = functools.partial(
            super().whole, leaf=leaf, num_coordinates=num_coordinates
        )
        return lax.platform_dependent(direction, cpu=from_words, default=elementwise)

    def numbers(
        self, direction: Direction, leaves: Sequence[Leaf], num_coordinates: int
    ) -> list[Signs]:
        del num_coordinates
        return [Signs(_words(direction.key, leaf)) for leaf in leaves]


def _words(key: jax.Array, leaf: Leaf) -> jax.Array:
    """The words of `Signs` for a leaf, which need not begin with a drawn one."""
    first, start = divmod(leaf.offset, 32)
    num_words = -(-math.prod(leaf.shape) // 32)
    at = counter.positions((num_words + (start > 0),), offset=first)
    words = counter.bits(key, at)
    if start == 0:
        return words
    return (words[:-1] >> np.uint32(start)) | (words[1:] << np.uint32(32 - start))


class Coordinate(Law):
    """See `coordinate`."""

    def factor(self, params: Any) -> float:
        return float(num_coordinates(layout(params)))

    def draw(
        self, key: jax.Array, at: counter.Counter, num_coordinates: int
    ) -> jax.Array:
        zero = counter.zero()
        chosen = counter.below(key, zero, max(num_coordinates, 1))
        bit = counter.bits(key, zero._replace(lo=zero.lo + np.uint32(1))) >> np.uint32(
            31
        )
        sign = 1 - 2 * bit.astype(jnp.float32)
        return jnp.where((at.hi == chosen.hi) & (at.lo == chosen.lo), sign, 0.0)


def sphere() -> Law:
    """Uniform on the unit sphere of all coordinates: the law of the paper.

    A standard normal vector divided by its norm, which is taken over the whole tree.
    E[u uᵀ] = I/d, so the factor is c = d, the number of all coordinates.

    Returns:
      The law.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
      >>> law = zo.sphere()
      >>> u = law.materialize(law.sample(jax.random.key(0), params), params)
      >>> print(f"{jnp.sqrt(jnp.sum(u['w'] ** 2) + jnp.sum(u['b'] ** 2)):.5f}")
      1.00000
      >>> law.factor(params)
      8.0

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (2).
    """
    return Sphere()


def gaussian() -> Law:
    """Independent standard normal elements: E[u uᵀ] = I, the factor is c = 1.

    Returns:
      The law.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, key, law = jnp.zeros(4), jax.random.key(0), zo.gaussian()
      >>> u = law.materialize(law.sample(key, params), params)
      >>> bool((u == jax.random.normal(key, (4,))).all())
      True

    References:
      Nesterov & Spokoiny, Random Gradient-Free Minimization of Convex Functions, 2017,
      <https://doi.org/10.1007/s10208-015-9296-2>.
    """
    return Gaussian()


def rademacher() -> Law:
    """Independent random signs: E[u uᵀ] = I, the factor is c = 1.

    The cheapest dense law: one random bit per element. Of all laws with independent
    centered elements it has the smallest variance. Its directions have norm √d, where
    those of `sphere` have norm 1: the same `smoothing` moves the parameters √d times as
    far.

    Returns:
      The law.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, law = jnp.zeros(4), zo.rademacher()
      >>> u = law.materialize(law.sample(jax.random.key(0), params), params)
      >>> bool((abs(u) == 1).all())
      True

    References:
      Spall, Multivariate Stochastic Approximation Using a Simultaneous Perturbation
      Gradient Approximation, 1992, <https://doi.org/10.1109/9.119632>.
    """
    return Rademacher()


def coordinate() -> Law:
    """One coordinate, chosen uniformly, with a random sign.

    E[u uᵀ] = I/d, so the factor is c = d. The sign makes the law symmetric: a forward
    difference along it has no bias from curvature.

    Returns:
      The law.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> params, law = jnp.zeros(4), zo.coordinate()
      >>> u = law.materialize(law.sample(jax.random.key(0), params), params)
      >>> float(jnp.sum(abs(u)))
      1.0

    References:
      Lian et al., A Comprehensive Linear Speedup Analysis for Asynchronous Stochastic
      Parallel Optimization from Zeroth-Order to First-Order, 2016,
      <https://arxiv.org/abs/1606.00498>.
    """
    return Coordinate()
