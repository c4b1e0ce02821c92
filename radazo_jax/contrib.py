"""Estimators related to the paper's, from the literature.

Use one if its assumptions fit your function. The estimators of everyday use are in
`radazo_jax`.
"""

from radazo_jax._src.contrib._memory import QueryBuffer
from radazo_jax._src.contrib.coordinate_wise import CoordinateWiseState, coordinate_wise
from radazo_jax._src.contrib.gaussian_process import (
    GaussianProcessState,
    gaussian_process,
)
from radazo_jax._src.contrib.hessian_informed import (
    HessianInformedState,
    hessian_informed,
)
from radazo_jax._src.contrib.lazy_low_rank import lazy_low_rank
from radazo_jax._src.contrib.linear_interpolation import (
    LinearInterpolationState,
    linear_interpolation,
)
from radazo_jax._src.contrib.momentum_perturbation import (
    MomentumPerturbationState,
    momentum_perturbation,
)
from radazo_jax._src.contrib.prior_guided import PriorGuidedState, prior_guided
from radazo_jax._src.contrib.query_reuse import QueryReuseState, query_reuse
from radazo_jax._src.contrib.rescaled_differences import majority_vote, normalized_batch
from radazo_jax._src.contrib.residual_feedback import (
    ResidualFeedbackState,
    residual_feedback,
)
from radazo_jax._src.contrib.variance_reduced import (
    VarianceReducedState,
    variance_reduced,
)

__all__ = [
    "CoordinateWiseState",
    "GaussianProcessState",
    "HessianInformedState",
    "LinearInterpolationState",
    "MomentumPerturbationState",
    "PriorGuidedState",
    "QueryBuffer",
    "QueryReuseState",
    "ResidualFeedbackState",
    "VarianceReducedState",
    "coordinate_wise",
    "gaussian_process",
    "hessian_informed",
    "lazy_low_rank",
    "linear_interpolation",
    "majority_vote",
    "momentum_perturbation",
    "normalized_batch",
    "prior_guided",
    "query_reuse",
    "residual_feedback",
    "variance_reduced",
]
