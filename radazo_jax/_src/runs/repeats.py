"""Noise and change of a function, from repeated values.

Ranges are confidence intervals of 95 %, for normal noise of one variance everywhere.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_NORMAL = 1.96  # The quantile of the normal distribution.


class Repeats(NamedTuple):
    """Repeats at θ and around it.

    Attributes:
      base: The values at θ, [repeats].
      moved: Those at the other points, both ways along each direction:
        [repeats, directions, 2].
      dtype: The dtype in which values are compared.
      failures: Messages of evaluations that failed.
    """

    base: np.ndarray
    moved: np.ndarray
    dtype: np.dtype
    failures: tuple[str, ...]


class Measures(NamedTuple):
    """Estimates from the values, without the part due to noise, and their ranges."""

    value: float
    noise: float
    noise_range: tuple[float, float]
    difference: float
    difference_range: tuple[float, float]
    curvature: float
    unchanged: bool


def measures(values: Repeats) -> Measures:
    """Separates the noise of values from their change."""
    base, moved = values.base, values.moved
    value = _mean(base)
    noise, freedom = _noise([base, *moved.reshape(len(moved), -1).T])
    finite = np.isfinite(moved)
    with np.errstate(all="ignore"):  # A point without a finite value is NaN.
        change = np.where(finite, moved, 0).sum(0) / finite.sum(0) - value
    above, below = change.T
    slope, curve = (above - below) / 2, (above + below) / 2

    # The variances that noise gives to means at θ and at the other points.
    at_start = noise**2 / max(np.sum(np.isfinite(base)), 1)
    at_points = noise**2 / len(moved)
    size = _signal(change, at_start + at_points)
    likely = _range_of_signal(change, at_start, at_points)
    curvature = ratio(
        _signal(curve, at_start + at_points / 2), _signal(slope, at_points / 2)
    )
    return Measures(
        float(value),
        float(noise),
        _range_of_noise(noise, freedom),
        size,
        likely,
        np.nan if noise > 0 and likely[0] == 0 else curvature,
        bool(noise == 0 and np.all(change == 0)),
    )


def _noise(samples: Sequence[np.ndarray]) -> tuple[Any, int]:
    """The standard deviation of repeated values, and its degrees of freedom."""
    squares, freedom = 0.0, 0
    for sample in samples:
        finite = sample[np.isfinite(sample)]
        if finite.size > 1:
            squares += float(np.sum((finite - finite.mean()) ** 2))
            freedom += finite.size - 1
    return (np.sqrt(squares / freedom) if freedom else np.nan), freedom


def _signal(changes: np.ndarray, variance: float) -> float:
    """The root mean square of changes without noise of this variance."""
    square = _mean(changes**2)
    return float(np.sqrt(np.maximum(square - variance, 0.0)))


def _range_of_noise(noise: Any, freedom: int) -> tuple[float, float]:
    """From quantiles of χ², by the approximation of Wilson and Hilferty."""
    if not noise > 0:
        return float(noise), float(noise)
    spread = 2 / (9 * freedom)
    least, most = (
        float(noise / max(1 - spread + z * np.sqrt(spread), 1e-3) ** 1.5)
        for z in (_NORMAL, -_NORMAL)
    )
    return least, most


def _range_of_signal(changes: np.ndarray, shared: Any, own: Any) -> tuple[float, float]:
    """From quantiles of the noncentral χ², by the approximation of Sankaran.

    The noise of θ is in all changes, and each has its own. The sum of their squares, in
    units of a variance, is then near r = k + λ. λ is the sum without noise; k and the
    variance match the mean and the variance of the sum. The range has all λ that
    this leaves likely.
    """
    found = changes[np.isfinite(changes)]
    if not (own > 0 and found.size):
        size = _signal(found, 0.0)
        return size, size
    variances = np.full(found.size, own)
    variances[0] += found.size * shared
    variance = np.sum(variances**2) / np.sum(variances)
    k = np.sum(variances) / variance
    total = np.sum(found**2) / variance
    # √λ lies within a few units of the root of the sum.
    root = np.sqrt(total)
    lam = np.linspace(max(root - 6, 0), root + 6, 2000) ** 2
    r, p = k + lam, (k + 2 * lam) / (k + lam) ** 2
    h = 1 - 2 * r * (k + 3 * lam) / (3 * (k + 2 * lam) ** 2)
    m = (h - 1) * (1 - 3 * h)
    mean = 1 + h * p * (h - 1 - (2 - h) * m * p / 2)
    deviation = h * np.sqrt(2 * p) * (1 + m * p / 2)
    within = np.abs((total / r) ** h - mean) <= _NORMAL * deviation
    # None is left if there is less noise in the changes than even λ = 0 makes likely.
    likely = lam[within] if within.any() else lam[:1]
    least, most = np.sqrt(likely[[0, -1]] * variance / found.size).tolist()
    return least, most


def _mean(values: np.ndarray) -> Any:
    """The mean of those that are finite."""
    finite = values[np.isfinite(values)]
    return np.mean(finite) if finite.size else np.nan


def ratio(a: Any, b: Any) -> float:
    """Divides, to infinity if only `b` is 0, and to 0 if both are."""
    return float(a) / float(b) if b else float("inf") if a else 0.0
