"""The laws of random directions whose elements are drawn one by one."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from radazo_jax._src.directions.held import Held, Stored
from radazo_jax._src.directions.law import Direction, Law, UnitNorm, elements
from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.numbers import counter, exact, generator
from radazo_jax._src.numbers.counter import Counter, Positions

# How many coordinates are drawn together where only their norm is asked for.
_CHUNK = 2**18


class Gaussian(Law):
    """See `gaussian`."""

    def factor(self, params: Any) -> float:
        del params
        return 1.0

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        return generator.normal(key, at)


class Sphere(UnitNorm):
    """See `sphere`."""

    _normalized = True

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        return generator.fast_normal(key, at)

    def _sample(self, key: jax.Array, number: jax.Array, layout: Layout) -> Direction:
        unscaled = super()._sample(key, number, layout)

        def at_once(direction: Direction) -> jax.Array:
            return self._inverse_norm([Stored(u) for u in elements(direction, layout)])

        if layout.dimension <= _CHUNK:
            scale = at_once(unscaled)
        else:
            # XLA's CPU backend stores what it sums, so there it is drawn in pieces.
            in_pieces = functools.partial(self._in_pieces, layout.dimension)
            scale = lax.platform_dependent(unscaled, cpu=in_pieces, default=at_once)
        return Direction(key, number, scale, self)

    def _inverse_norm(self, held: Sequence[Held]) -> jax.Array:
        elements = [of_leaf.values() for of_leaf in held]
        fraction = exact.fraction_bits(sum(x.size for x in elements))
        squares = [exact.sum_of_squares(x, fraction) for x in elements]
        square = functools.reduce(counter.add, squares, counter.zero())
        return _inverse_root(square, fraction)

    def _in_pieces(self, dimension: int, direction: Direction) -> jax.Array:
        fraction = exact.fraction_bits(dimension)
        pieces, rest = divmod(dimension, _CHUNK)

        def squares(at: Positions) -> Counter:
            drawn = self.draw(direction.key, direction.number, at)
            return exact.sum_of_squares(drawn, fraction)

        def add(i: jax.Array, sum_before: Counter) -> Counter:
            piece = counter.block((1, _CHUNK), (i, 0))
            at = counter.positions((pieces, _CHUNK), piece)
            return counter.add(sum_before, squares(at))

        last = squares(counter.positions((rest,), offset=pieces * _CHUNK))
        return _inverse_root(lax.fori_loop(0, pieces, add, last), fraction)


def _inverse_root(square: Counter, fraction: int) -> jax.Array:
    return lax.rsqrt(exact.as_float(square, fraction))


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
