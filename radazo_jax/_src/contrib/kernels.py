"""Kernels of Gaussian processes: k(X, X), and the derivatives of k(θ, X) by θ.

Each is a function of the squared distances of the points, [n, n], of X − θ, [n, d], and
of the lengthscale, to arrays [n, n] and [n, d].
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

_EXACT = jax.lax.Precision.HIGHEST

Kernel = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def square_root(squares: jax.Array) -> jax.Array:
    """√x, whose derivative at 0 is 0: distances vanish on the diagonal and at θ."""
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)


def _squared_exponential(
    squares: jax.Array, away: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    from_theta = jnp.sum(away**2, axis=1)
    along = jnp.exp(-from_theta / (2 * scale**2)) / scale**2
    return jnp.exp(-squares / (2 * scale**2)), along[:, None] * away


def _matern(
    squares: jax.Array, away: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    r = square_root(5 * squares) / scale
    from_theta = square_root(5 * jnp.sum(away**2, axis=1)) / scale
    along = 5 / (3 * scale**2) * (1 + from_theta) * jnp.exp(-from_theta)
    return (1 + r + r**2 / 3) * jnp.exp(-r), along[:, None] * away


KERNELS: dict[str, Kernel] = {
    "matern": _matern,
    "squared_exponential": _squared_exponential,
}


def features(
    key: jax.Array, size: int, away: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The same for the kernel of `size` random Fourier features."""
    of_directions, of_phases = jax.random.split(key)
    shape, dtype = (size, away.shape[1]), away.dtype
    frequencies = jax.random.normal(of_directions, shape, dtype) / scale
    phases = jax.random.uniform(of_phases, (size,), dtype, maxval=2 * math.pi)
    angles = jnp.matmul(away, frequencies.T, precision=_EXACT) + phases[None]
    phis = math.sqrt(2 / size) * jnp.cos(angles)
    rows = jnp.matmul(phis, phis.T, precision=_EXACT)
    at_theta = -math.sqrt(2 / size) * jnp.sin(phases)
    slopes = jnp.matmul(phis * at_theta[None], frequencies, precision=_EXACT)
    return rows, slopes
