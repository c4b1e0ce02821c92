"""The distributions of random directions whose elements are drawn one by one."""

import jax

from radazo_jax._src.directions.distribution import Distribution, UnitNorm
from radazo_jax._src.numbers import generator
from radazo_jax._src.numbers.counter import Positions


class Gaussian(Distribution):
    """See `gaussian`."""

    def factor(self, dimension: int) -> float:
        del dimension
        return 1.0

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        return generator.normal(key, at)


class Sphere(UnitNorm):
    """See `sphere`."""

    normalized = True
    _bounded = True  # By 6.8, because a radius has 33 bits.

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del number
        return generator.fast_normal(key, at)


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
