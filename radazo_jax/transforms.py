"""Optax transformations, from which optimizers are chained, and their states."""

from radazo_jax._src.optimize.minibatch import (
    ScaleByMinibatchStepState,
    scale_by_minibatch_step,
)
from radazo_jax._src.optimize.optax_wrapper import (
    EstimateGradientState,
    estimate_gradient,
)
from radazo_jax._src.optimize.parabola import (
    ScaleByParabolicStepState,
    scale_by_parabolic_step,
)
from radazo_jax._src.optimize.projections import keep_params_in
from radazo_jax._src.optimize.quasi_newton import (
    ScaleByBfgsState,
    ScaleByTrialStepState,
    scale_by_bfgs,
    scale_by_trial_step,
)
from radazo_jax._src.optimize.revert import Revert
from radazo_jax._src.optimize.transforms import (
    ScaleByRadazoState,
    ScaleByZoAdammState,
    scale_by_radazo,
    scale_by_zo_adamm,
)

__all__ = [
    "EstimateGradientState",
    "Revert",
    "ScaleByBfgsState",
    "ScaleByMinibatchStepState",
    "ScaleByParabolicStepState",
    "ScaleByRadazoState",
    "ScaleByTrialStepState",
    "ScaleByZoAdammState",
    "estimate_gradient",
    "keep_params_in",
    "scale_by_bfgs",
    "scale_by_minibatch_step",
    "scale_by_parabolic_step",
    "scale_by_radazo",
    "scale_by_trial_step",
    "scale_by_zo_adamm",
]
