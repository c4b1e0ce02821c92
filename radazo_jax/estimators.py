"""Contracts between an estimator and what evaluates its points.

Import from here to write a custom estimator, or a wrapper around one. Of the
estimators, `cma` is here, and the others are in `radazo_jax` and `radazo_jax.contrib`.
"""

from radazo_jax._src.base import (
    Draw,
    Estimate,
    Evaluator,
    GradientEstimator,
    Lookahead,
    Points,
    Values,
    candidate_rows,
    candidates,
    points_along,
    sample_points,
    shifted_points,
)
from radazo_jax._src.directions.combination import LinearCombination
from radazo_jax._src.directions.inner import gram
from radazo_jax._src.estimators.accelerated import AcceleratedState
from radazo_jax._src.estimators.adaptive import AdaptiveDifferenceState
from radazo_jax._src.estimators.cma import cma
from radazo_jax._src.estimators.covariance import CmaState
from radazo_jax._src.estimators.differences import AlongDirections, Differences
from radazo_jax._src.estimators.factors import candidate_factors
from radazo_jax._src.estimators.gathered import FullDifferenceState
from radazo_jax._src.estimators.gradients import estimate

__all__ = [
    "AcceleratedState",
    "AdaptiveDifferenceState",
    "AlongDirections",
    "CmaState",
    "Differences",
    "Draw",
    "Estimate",
    "Evaluator",
    "FullDifferenceState",
    "GradientEstimator",
    "LinearCombination",
    "Lookahead",
    "Points",
    "Values",
    "candidate_factors",
    "candidate_rows",
    "candidates",
    "cma",
    "estimate",
    "gram",
    "points_along",
    "sample_points",
    "shifted_points",
]
