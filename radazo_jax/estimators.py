"""Parts for custom estimators: draws, points, values, estimates, evaluators.

What belongs here: the contracts between an estimator and what evaluates its points.
"""

from radazo_jax._src.directions.combination import LinearCombination
from radazo_jax._src.directions.law import Direction
from radazo_jax._src.estimate.estimator import GradientEstimator
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
    "Direction",
    "Draw",
    "Estimate",
    "Evaluator",
    "GradientEstimator",
    "LinearCombination",
    "Points",
    "Values",
    "candidates",
    "sample_points",
]
