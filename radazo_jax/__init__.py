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

from radazo_jax import checks as checks
from radazo_jax import contrib as contrib
from radazo_jax import distributions as distributions
from radazo_jax import estimators as estimators
from radazo_jax import methods as methods
from radazo_jax import random as random
from radazo_jax import runs as runs
from radazo_jax import shaping as shaping
from radazo_jax import transforms as transforms
from radazo_jax._src.directions.distribution import Distribution
from radazo_jax._src.directions.distributions import (
    coordinate,
    gaussian,
    low_rank,
    orthonormal,
    rademacher,
    sphere,
)
from radazo_jax._src.estimates.contracts import Evaluator, GradientEstimator
from radazo_jax._src.estimates.differences import (
    central_difference,
    forward_difference,
    spsa,
)
from radazo_jax._src.estimates.evolution import evolution_strategy
from radazo_jax._src.estimates.external import external
from radazo_jax._src.estimates.sharded import sharded
from radazo_jax._src.estimates.value_and_grad import value_and_grad
from radazo_jax._src.estimates.vectorized import vectorized
from radazo_jax._src.host.ask_tell import ask_tell
from radazo_jax._src.host.minimize import minimize
from radazo_jax._src.measure.diagnose import diagnose
from radazo_jax._src.measure.learning_rate import find_learning_rate
from radazo_jax._src.measure.smoothing import find_smoothing
from radazo_jax._src.optimizers.aliases import (
    radazo,
    zo_adamm,
    zo_rmsprop,
    zo_sgd,
    zo_signsgd,
)
from radazo_jax._src.optimizers.constraints import anchored_decay, keep_params_in
from radazo_jax._src.optimizers.in_place import chain_in_place
from radazo_jax._src.optimizers.moments import scale_by_radazo, scale_by_zo_adamm
from radazo_jax._src.optimizers.replayed import scale_by_replayed_radazo
from radazo_jax._src.optimizers.rounding import stochastic_rounding
from radazo_jax._src.perturb.transform import perturb
from radazo_jax._src.steps.optax_wrapper import estimate_gradient
from radazo_jax._src.steps.solver import solver
from radazo_jax._src.steps.states import RunError
from radazo_jax._src.train.train import replay, train
from radazo_jax._src.workers.distribute import distribute

__version__ = "0.1.0"

__all__ = [
    "Distribution",
    "Evaluator",
    "GradientEstimator",
    "RunError",
    "anchored_decay",
    "ask_tell",
    "central_difference",
    "chain_in_place",
    "coordinate",
    "diagnose",
    "distribute",
    "estimate_gradient",
    "evolution_strategy",
    "external",
    "find_learning_rate",
    "find_smoothing",
    "forward_difference",
    "gaussian",
    "keep_params_in",
    "low_rank",
    "minimize",
    "orthonormal",
    "perturb",
    "radazo",
    "rademacher",
    "replay",
    "scale_by_radazo",
    "scale_by_replayed_radazo",
    "scale_by_zo_adamm",
    "sharded",
    "solver",
    "sphere",
    "spsa",
    "stochastic_rounding",
    "train",
    "value_and_grad",
    "vectorized",
    "zo_adamm",
    "zo_rmsprop",
    "zo_sgd",
    "zo_signsgd",
]
