"""Data profiles: which share of problems is solved within how many evaluations."""

from collections.abc import Sequence

import numpy as np


def profile(
    evaluations: np.ndarray, dimensions: np.ndarray, budgets: Sequence[float]
) -> np.ndarray:
    """The share of targets reached within κ(d + 1) evaluations, for each budget κ.

    Args:
      evaluations: Evaluations to each target, infinite if never: [problems, targets].
      dimensions: d of each problem: [problems].
      budgets: The budgets κ.

    References:
      Moré & Wild, Benchmarking Derivative-Free Optimization Algorithms, SIAM J. Optim.
      2009, eq. (2.9).
    """
    units = evaluations / (np.asarray(dimensions)[:, None] + 1)
    return np.array([np.mean(units <= budget) for budget in budgets])


def median_ratio(evaluations: np.ndarray, others: np.ndarray) -> float:
    """Returns the median ratio of the evaluations of two methods.

    It covers the targets that one of the two reaches; 0 and ∞ if only one does.
    """
    either = np.isfinite(evaluations) | np.isfinite(others)
    if not either.any():
        return np.nan
    mine, other = evaluations[either], others[either]
    ratios = np.where(np.isinf(other), 0.0, mine / np.where(np.isinf(other), 1, other))
    return float(np.median(ratios))
