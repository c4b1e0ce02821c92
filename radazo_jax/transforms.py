"""Optax transformations, from which optimizers are chained, and their states."""

from radazo_jax._src.optimize.anchored_decay import (
    AnchoredDecayState,
    anchored_decay,
)
from radazo_jax._src.optimize.factored import FactoredMoment
from radazo_jax._src.optimize.in_place import InPlaceUpdate, chain_in_place
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
from radazo_jax._src.optimize.replayed import (
    ScaleByReplayedMomentsState,
    scale_by_replayed_radazo,
    scale_by_replayed_zo_adamm,
)
from radazo_jax._src.optimize.revert import Revert
from radazo_jax._src.optimize.rounding import (
    StochasticRoundingState,
    stochastic_rounding,
)
from radazo_jax._src.optimize.step_history import StepHistory
from radazo_jax._src.optimize.transforms import (
    ScaleByRadazoState,
    ScaleByZoAdammState,
    scale_by_radazo,
    scale_by_zo_adamm,
)

__all__ = [
    "AnchoredDecayState",
    "EstimateGradientState",
    "FactoredMoment",
    "InPlaceUpdate",
    "Revert",
    "ScaleByBfgsState",
    "ScaleByMinibatchStepState",
    "ScaleByParabolicStepState",
    "ScaleByRadazoState",
    "ScaleByReplayedMomentsState",
    "ScaleByTrialStepState",
    "ScaleByZoAdammState",
    "StepHistory",
    "StochasticRoundingState",
    "anchored_decay",
    "chain_in_place",
    "estimate_gradient",
    "keep_params_in",
    "scale_by_bfgs",
    "scale_by_minibatch_step",
    "scale_by_parabolic_step",
    "scale_by_radazo",
    "scale_by_replayed_radazo",
    "scale_by_replayed_zo_adamm",
    "scale_by_trial_step",
    "scale_by_zo_adamm",
    "stochastic_rounding",
]
