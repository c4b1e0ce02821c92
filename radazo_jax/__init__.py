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

from radazo_jax import estimators as estimators
from radazo_jax import random as random
from radazo_jax._src.contrib.buffer import QueryBuffer
from radazo_jax._src.contrib.coordinate_wise import CoordinateWiseState, coordinate_wise
from radazo_jax._src.contrib.gaussian_process import (
    GaussianProcessState,
    gaussian_process,
)
from radazo_jax._src.contrib.linear_interpolation import (
    LinearInterpolationState,
    linear_interpolation,
)
from radazo_jax._src.contrib.majority_vote import majority_vote
from radazo_jax._src.contrib.momentum_perturbation import (
    MomentumPerturbationState,
    momentum_perturbation,
)
from radazo_jax._src.contrib.prior_guided import PriorGuidedState, prior_guided
from radazo_jax._src.contrib.query_reuse import QueryReuseState, query_reuse
from radazo_jax._src.contrib.residual_feedback import (
    ResidualFeedbackState,
    residual_feedback,
)
from radazo_jax._src.contrib.variance_reduced import (
    VarianceReducedState,
    variance_reduced,
)
from radazo_jax._src.directions.combination import LinearCombination
from radazo_jax._src.directions.coordinates import coordinate
from radazo_jax._src.directions.law import Direction, Law
from radazo_jax._src.directions.laws import gaussian, sphere
from radazo_jax._src.directions.layout import MatrixAxes
from radazo_jax._src.directions.low_rank import low_rank
from radazo_jax._src.directions.signs import orthonormal, rademacher
from radazo_jax._src.estimate.accelerated import AcceleratedState, accelerated
from radazo_jax._src.estimate.adaptive import (
    AdaptiveDifferenceState,
    adaptive_difference,
)
from radazo_jax._src.estimate.differences import (
    central_difference,
    forward_difference,
    spsa,
)
from radazo_jax._src.estimate.estimator import GradientEstimator
from radazo_jax._src.estimate.gradients import value_and_grad
from radazo_jax._src.estimate.points import (
    Draw,
    Estimate,
    Points,
    Values,
    candidates,
    sample_points,
)
from radazo_jax._src.estimate.sharded import sharded
from radazo_jax._src.estimate.vectorized import Evaluator, vectorized
from radazo_jax._src.numbers.keys import check_same_key
from radazo_jax._src.optimize.aliases import (
    parabolic_sgd,
    radazo,
    zo_adamm,
    zo_rmsprop,
    zo_sgd,
    zo_signsgd,
)
from radazo_jax._src.optimize.ask_tell import AskTell, AskTellState, ask_tell
from radazo_jax._src.optimize.black_box import (
    Best,
    BlackBoxResult,
    minimize_black_box,
)
from radazo_jax._src.optimize.check_up import CheckUp, check_up
from radazo_jax._src.optimize.defaults import default_method
from radazo_jax._src.optimize.failures import RunError
from radazo_jax._src.optimize.history import History, scalars
from radazo_jax._src.optimize.minibatch import (
    ScaleByMinibatchStepState,
    scale_by_minibatch_step,
)
from radazo_jax._src.optimize.minimize import MinimizeResult, minimize
from radazo_jax._src.optimize.optax_wrapper import (
    EstimateGradientState,
    estimate_gradient,
)
from radazo_jax._src.optimize.parabola import (
    ScaleByParabolicStepState,
    scale_by_parabolic_step,
)
from radazo_jax._src.optimize.projections import keep_params_in
from radazo_jax._src.optimize.replay import replay
from radazo_jax._src.optimize.solver import Solver, solver
from radazo_jax._src.optimize.step import Failures, SolverState, StepInfo
from radazo_jax._src.optimize.transforms import (
    ScaleByRadazoState,
    ScaleByZoAdammState,
    scale_by_radazo,
    scale_by_zo_adamm,
)
from radazo_jax._src.perturb.transform import perturb

__version__ = "0.1.0"

__all__ = [
    "AcceleratedState",
    "AdaptiveDifferenceState",
    "AskTell",
    "AskTellState",
    "Best",
    "BlackBoxResult",
    "CheckUp",
    "CoordinateWiseState",
    "Direction",
    "Draw",
    "Estimate",
    "EstimateGradientState",
    "Evaluator",
    "Failures",
    "GaussianProcessState",
    "GradientEstimator",
    "History",
    "Law",
    "LinearCombination",
    "LinearInterpolationState",
    "MatrixAxes",
    "MinimizeResult",
    "MomentumPerturbationState",
    "Points",
    "PriorGuidedState",
    "QueryBuffer",
    "QueryReuseState",
    "ResidualFeedbackState",
    "RunError",
    "ScaleByMinibatchStepState",
    "ScaleByParabolicStepState",
    "ScaleByRadazoState",
    "ScaleByZoAdammState",
    "Solver",
    "SolverState",
    "StepInfo",
    "Values",
    "VarianceReducedState",
    "accelerated",
    "adaptive_difference",
    "ask_tell",
    "candidates",
    "central_difference",
    "check_same_key",
    "check_up",
    "coordinate",
    "coordinate_wise",
    "default_method",
    "estimate_gradient",
    "forward_difference",
    "gaussian",
    "gaussian_process",
    "keep_params_in",
    "linear_interpolation",
    "low_rank",
    "majority_vote",
    "minimize",
    "minimize_black_box",
    "momentum_perturbation",
    "orthonormal",
    "parabolic_sgd",
    "perturb",
    "prior_guided",
    "query_reuse",
    "radazo",
    "rademacher",
    "replay",
    "residual_feedback",
    "sample_points",
    "scalars",
    "scale_by_minibatch_step",
    "scale_by_parabolic_step",
    "scale_by_radazo",
    "scale_by_zo_adamm",
    "sharded",
    "solver",
    "sphere",
    "spsa",
    "value_and_grad",
    "variance_reduced",
    "vectorized",
    "zo_adamm",
    "zo_rmsprop",
    "zo_sgd",
    "zo_signsgd",
]
