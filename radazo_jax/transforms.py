"""Optax transformations, from which optimizers are chained, and their states."""

from radazo_jax._src.optimizers.constraints import (
    AnchoredDecayState,
    anchored_decay,
    keep_params_in,
)
from radazo_jax._src.optimizers.in_place import InPlaceUpdate, chain_in_place
from radazo_jax._src.optimizers.moments import (
    ScaleByRadazoState,
    ScaleByZoAdammState,
    scale_by_radazo,
    scale_by_zo_adamm,
)
from radazo_jax._src.optimizers.replayed import (
    FactoredMoment,
    ScaleByReplayedMomentsState,
    StepHistory,
    scale_by_replayed_radazo,
)
from radazo_jax._src.optimizers.rounding import (
    StochasticRoundingState,
    stochastic_rounding,
)
from radazo_jax._src.steps.optax_wrapper import EstimateGradientState, estimate_gradient

__all__ = [
    "AnchoredDecayState",
    "EstimateGradientState",
    "FactoredMoment",
    "InPlaceUpdate",
    "ScaleByRadazoState",
    "ScaleByReplayedMomentsState",
    "ScaleByZoAdammState",
    "StepHistory",
    "StochasticRoundingState",
    "anchored_decay",
    "chain_in_place",
    "estimate_gradient",
    "keep_params_in",
    "scale_by_radazo",
    "scale_by_replayed_radazo",
    "scale_by_zo_adamm",
    "stochastic_rounding",
]
