"""Contracts between an estimator and what evaluates its points.

Import from here to write a custom estimator, or a wrapper around one. The estimators
themselves are in `radazo_jax` and `radazo_jax.contrib`.
"""

from radazo_jax._src.directions.combination import LinearCombination
from radazo_jax._src.estimate.accelerated import AcceleratedState
from radazo_jax._src.estimate.adaptive import AdaptiveDifferenceState
from radazo_jax._src.estimate.estimator import GradientEstimator
from radazo_jax._src.estimate.factors import candidate_factors
from radazo_jax._src.estimate.full import FullDifferenceState
from radazo_jax._src.estimate.points import (
    Draw,
    Estimate,
    Points,
    Values,
    candidates,
    sample_points,
)
from radazo_jax._src.estimate.vectorized import Evaluator

__all__ = [
    "AcceleratedState",
    "AdaptiveDifferenceState",
    "Draw",
    "Estimate",
    "Evaluator",
    "FullDifferenceState",
    "GradientEstimator",
    "LinearCombination",
    "Points",
    "Values",
    "candidate_factors",
    "candidates",
    "sample_points",
]
