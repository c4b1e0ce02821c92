"""The quantities of the paper's analysis, with the numbers of their equations.

Examples:
  >>> from radazo_jax import theory
  >>> variance = theory.first_moment_variance(b1=0.9, gradient_variance=1.0)
  >>> round(variance, 4), round(theory.step_ratio(0.9), 2)
  (0.0526, 4.36)
"""

from radazo_jax._src.theory import (
    convergence_constant_radazo,
    convergence_constant_zo_adamm,
    predicted_speedup,
    second_moment_bound_radazo,
    second_moment_bound_zo_adamm,
    step_ratio,
)
from radazo_jax._src.variance import (
    first_moment_squared_bias,
    first_moment_variance,
    gradient_variance_bound,
    smoothing_bias_bound,
)

__all__ = [
    "convergence_constant_radazo",
    "convergence_constant_zo_adamm",
    "first_moment_squared_bias",
    "first_moment_variance",
    "gradient_variance_bound",
    "predicted_speedup",
    "second_moment_bound_radazo",
    "second_moment_bound_zo_adamm",
    "smoothing_bias_bound",
    "step_ratio",
]
