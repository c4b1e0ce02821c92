"""The synthetic functions of the paper, to test and to compare optimizers on.

Examples:
  >>> import jax, jax.numpy as jnp
  >>> import radazo_jax as zo
  >>> from paper import functions
  >>> start = functions.uniform_start(jax.random.key(0), 100)
  >>> value_and_grad = zo.value_and_grad(functions.cubic, zo.forward_difference())
  >>> value, gradient = value_and_grad(jax.random.key(1), start)
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = [
    "PROBLEMS",
    "Problem",
    "cubic",
    "ellipsoid",
    "levy",
    "quadratic",
    "rosenbrock",
    "uniform_start",
]


class Problem(NamedTuple):
    """A function to minimize, and its minimum.

    Attributes:
      fun: The function: an array [d] in, a scalar out, float32 at least.
      minimizer: The value of every coordinate at the minimum, which is 0.
    """

    fun: Callable[[jax.Array], jax.Array]
    minimizer: float


def quadratic(theta: jax.Array) -> jax.Array:
    """The paper's Quadratic, ½ Σ θᵢ², with its minimum 0 at θ = 0.

    Args:
      theta: θ, a real floating-point array [d].

    Returns:
      The value, a scalar.

    Examples:
      >>> import jax.numpy as jnp
      >>> from paper import functions
      >>> float(functions.quadratic(jnp.array([1.0, 2.0])))
      2.5

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      appendix B.1.
    """
    return 0.5 * jnp.sum(theta**2)


def cubic(theta: jax.Array) -> jax.Array:
    """The paper's Cubic, Σ (|θᵢ|³ + θᵢ²/2), with its minimum 0 at θ = 0.

    Args:
      theta: θ, a real floating-point array [d].

    Returns:
      The value, a scalar.

    Examples:
      >>> import jax.numpy as jnp
      >>> from paper import functions
      >>> float(functions.cubic(jnp.array([1.0, -2.0])))
      11.5

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      appendix B.1.
    """
    return jnp.sum(jnp.abs(theta) ** 3 + 0.5 * theta**2)


def levy(theta: jax.Array) -> jax.Array:
    """The paper's Levy function, with its minimum 0 at θ = 1.

        sin²(πw₁) + Σᵢ₌₂ᵈ⁻¹ (wᵢ−1)² (1 + 10 sin²(πwᵢ+1)) + (w_d−1)² (1 + sin²(2πw_d))

    with wᵢ = 1 + (θᵢ − 1)/4. This is the formula as the paper prints it: the sum
    starts at 2, and the sum of the usual Levy function at 1. Every coordinate has
    many local minima; near the global one they lie at θ ≈ 0.04 and θ ≈ 3.6.

    Args:
      theta: θ, a real floating-point array [d] with d ≥ 2.

    Returns:
      The value, a scalar.

    Examples:
      >>> import jax.numpy as jnp
      >>> from paper import functions
      >>> print(f"{functions.levy(jnp.ones(5)):.3f}")
      0.000
      >>> print(f"{functions.levy(jnp.array([3.0, 1.0, 5.0])):.3f}")
      2.000

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      appendix B.1.
    """
    w = 1 + (theta - 1) / 4
    middle = w[1:-1]
    return (
        jnp.sin(jnp.pi * w[0]) ** 2
        + jnp.sum((middle - 1) ** 2 * (1 + 10 * jnp.sin(jnp.pi * middle + 1) ** 2))
        + (w[-1] - 1) ** 2 * (1 + jnp.sin(2 * jnp.pi * w[-1]) ** 2)
    )


def rosenbrock(theta: jax.Array) -> jax.Array:
    """The paper's Rosenbrock function, with its minimum 0 at θ = 1.

        Σᵢ₌₁ᵈ⁻¹ (100 (θᵢ₊₁ − θᵢ²)² + (1 − θᵢ)²)

    Args:
      theta: θ, a real floating-point array [d] with d ≥ 2.

    Returns:
      The value, a scalar.

    Examples:
      >>> import jax.numpy as jnp
      >>> from paper import functions
      >>> float(functions.rosenbrock(jnp.array([0.0, 1.0, 1.0])))
      101.0

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      appendix B.1.
    """
    here, following = theta[:-1], theta[1:]
    return jnp.sum(100 * (following - here**2) ** 2 + (1 - here) ** 2)


def ellipsoid(theta: jax.Array, condition: jax.typing.ArrayLike = 1e4) -> jax.Array:
    """An ill-conditioned quadratic, ½ Σ hᵢ θᵢ², with its minimum 0 at θ = 0.

    The curvatures hᵢ = condition^((i−1)/(d−1)) are log-spaced from 1 to `condition`.
    It is not in the paper; adaptive methods are made for functions like this one.

    Args:
      theta: θ, a real floating-point array [d] with d ≥ 2.
      condition: The largest curvature over the smallest, a positive number.

    Returns:
      The value, a scalar.

    Examples:
      >>> import jax.numpy as jnp
      >>> from paper import functions
      >>> print(f"{functions.ellipsoid(jnp.array([2.0, 0.0, 1.0]), 100.0):.3f}")
      52.000

    References:
      Hansen et al., Real-Parameter Black-Box Optimization Benchmarking 2009:
      Noiseless Functions Definitions, function 2 without its irregularities.
    """
    exponents = jnp.linspace(0, 1, theta.size, dtype=theta.dtype)
    curvatures = jnp.asarray(condition, theta.dtype) ** exponents
    return 0.5 * jnp.sum(curvatures * theta**2)


def uniform_start(key: jax.Array, dimension: int) -> jax.Array:
    """A start for the synthetic functions: uniform in [-1, 1) in every coordinate.

    The paper does not give the start of its runs.

    Args:
      key: A key; it is consumed.
      dimension: d, the number of coordinates.

    Returns:
      The starting point, float32 [d].

    Examples:
      >>> import jax
      >>> from paper import functions
      >>> start = functions.uniform_start(jax.random.key(0), 5)
      >>> start.shape, bool(abs(start).max() <= 1)
      ((5,), True)
    """
    return jax.random.uniform(key, (dimension,), jnp.float32, -1.0, 1.0)


PROBLEMS: Mapping[str, Problem] = MappingProxyType(
    {
        "Quadratic": Problem(quadratic, 0.0),
        "Cubic": Problem(cubic, 0.0),
        "Levy": Problem(levy, 1.0),
        "Rosenbrock": Problem(rosenbrock, 1.0),
    }
)
"""The four functions of the paper's figure "Convergence comparison", by name."""
