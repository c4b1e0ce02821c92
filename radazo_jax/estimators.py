"""Contracts between an estimator and what evaluates its points.

Import from here to write a custom estimator, or a wrapper around one. The
estimators themselves are in `radazo_jax` and `radazo_jax.contrib`.
"""

from radazo_jax._src.directions.sums import LinearCombination, gram
from radazo_jax._src.estimates.contracts import (
    Draw,
    Estimate,
    Evaluator,
    GradientEstimator,
    Points,
    Values,
)
from radazo_jax._src.estimates.differences import AlongDirections, Differences
from radazo_jax._src.estimates.gradients import estimate
from radazo_jax._src.estimates.points import (
    candidate_factors,
    candidate_rows,
    candidates,
    points_along,
    sample_points,
)

__all__ = [
    "AlongDirections",
    "Differences",
    "Draw",
    "Estimate",
    "Evaluator",
    "GradientEstimator",
    "LinearCombination",
    "Points",
    "Values",
    "candidate_factors",
    "candidate_rows",
    "candidates",
    "estimate",
    "gram",
    "points_along",
    "sample_points",
]
