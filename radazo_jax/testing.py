"""The synthetic functions of the paper, to test and to compare optimizers on.

Examples:
  >>> import jax, jax.numpy as jnp
  >>> import radazo_jax as zo
  >>> from radazo_jax import testing
  >>> start = testing.uniform_start(jax.random.key(0), 100)
  >>> value_and_grad = zo.value_and_grad(testing.cubic, zo.forward_difference())
  >>> value, gradient = value_and_grad(jax.random.key(1), start)
"""

from radazo_jax._src.synthetic import (
    PROBLEMS,
    Problem,
    cubic,
    ellipsoid,
    levy,
    quadratic,
    rosenbrock,
    uniform_start,
)

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
