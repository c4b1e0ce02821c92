"""R-AdaZO and its family: zeroth-order optimization with Optax.

Gradients from function values alone, for any Optax chain:

Examples:
  >>> import jax, jax.numpy as jnp, optax
  >>> import radazo_jax as zo
  >>> def loss(params, x, y):
  ...     return jnp.mean((jnp.tanh(x @ params) - y) ** 2)
  >>> value_and_grad = jax.jit(zo.value_and_grad(loss, zo.forward_difference()))
  >>> optimizer = zo.radazo(learning_rate=1e-2)
  >>> params, x, y = jnp.ones(3), jnp.eye(3), jnp.zeros(3)
  >>> state = optimizer.init(params)
  >>> value, gradient = value_and_grad(jax.random.key(0), params, x, y)
  >>> updates, state = optimizer.update(gradient, state, params)
  >>> params = optax.apply_updates(params, updates)
"""

from radazo_jax._src.alias import radazo, zo_adamm, zo_rmsprop, zo_sgd, zo_signsgd
from radazo_jax._src.directions import Direction, Law
from radazo_jax._src.estimators import (
    GradientEstimator,
    central_difference,
    forward_difference,
    value_and_grad,
)
from radazo_jax._src.laws import coordinate, gaussian, rademacher, sphere
from radazo_jax._src.low_rank import MatrixAxes, low_rank
from radazo_jax._src.minimize import MinimizeResult, MinimizeState, minimize
from radazo_jax._src.perturb import perturb
from radazo_jax._src.processes import check_same_key
from radazo_jax._src.transforms import (
    ScaleByRadazoState,
    ScaleByZoAdammState,
    scale_by_radazo,
    scale_by_zo_adamm,
)
from radazo_jax._src.wrappers import EstimateGradientState, estimate_gradient

__version__ = "0.1.0"

__all__ = [
    "Direction",
    "EstimateGradientState",
    "GradientEstimator",
    "Law",
    "MatrixAxes",
    "MinimizeResult",
    "MinimizeState",
    "ScaleByRadazoState",
    "ScaleByZoAdammState",
    "central_difference",
    "check_same_key",
    "coordinate",
    "estimate_gradient",
    "forward_difference",
    "gaussian",
    "low_rank",
    "minimize",
    "perturb",
    "radazo",
    "rademacher",
    "scale_by_radazo",
    "scale_by_zo_adamm",
    "sphere",
    "value_and_grad",
    "zo_adamm",
    "zo_rmsprop",
    "zo_sgd",
    "zo_signsgd",
]
