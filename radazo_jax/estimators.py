"""Contracts between an estimator and what evaluates its points.

Import from here to write a custom estimator, or a wrapper around one. The
estimators themselves are in `radazo_jax` and `radazo_jax.contrib`.
"""

from radazo_jax._src.contracts import (
    Draw,
    Estimate,
    Evaluator,
    GradientEstimator,
    Points,
    Values,
)
from radazo_jax._src.directions.combination import LinearCombination, gram
from radazo_jax._src.estimators.differences import AlongDirections, Differences
from radazo_jax._src.estimators.factors import candidate_factors
from radazo_jax._src.estimators.gradients import estimate
from radazo_jax._src.points import (
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
