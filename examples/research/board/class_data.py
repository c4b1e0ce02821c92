"""Regressions on generated data, and on data sets of scikit-learn.

Families are as in `class_problems`. Their docstrings say how f* is found.
"""

import functools

import numpy as np

from board.class_problems import Function, known, polished


def _logistic(
    features: np.ndarray, labels: np.ndarray, ridge: float, start: np.ndarray
) -> Function:
    """Mean logistic loss with a ridge; labels are ±1. Newton's steps give f*."""
    signed = labels[:, None] * features

    def fun(x: np.ndarray) -> float:
        losses = np.logaddexp(0, -(signed @ x))
        return float(losses.sum()) / losses.size + 0.5 * ridge * float(x @ x)

    best = np.zeros(start.size)
    for _ in range(100):
        miss = 1 / (1 + np.exp(signed @ best))
        slopes = -(signed.T @ miss) / miss.size + ridge * best
        curves = (signed * (miss * (1 - miss))[:, None]).T @ signed / miss.size
        step = np.linalg.solve(curves + ridge * np.eye(best.size), slopes)
        size = 1.0
        while fun(best - size * step) > fun(best) and size > 1e-6:
            size /= 2
        best = best - size * step
    return known(fun, start, best)


def logistic(draw: np.random.Generator, d: int) -> Function:
    """A logistic regression on generated data with correlated features."""
    mix = np.eye(d) + 0.7 * draw.normal(size=(d, d)) / np.sqrt(d)
    features = draw.normal(size=(max(100, 2 * d), d)) @ mix
    odds = 2 * features @ draw.normal(size=d) / np.sqrt(d)
    labels = np.where(odds + draw.logistic(size=odds.size) > 0, 1.0, -1.0)
    return _logistic(features, labels, 10 ** draw.uniform(-3, -2), np.zeros(d))


@functools.cache
def _data(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Features of mean 0 and variance 1, and targets, of a set of scikit-learn."""
    import sklearn.datasets

    bunch = getattr(sklearn.datasets, f"load_{name}")()
    features = (bunch.data - bunch.data.mean(axis=0)) / bunch.data.std(axis=0)
    return features, bunch.target


def tumors(draw: np.random.Generator, d: int) -> Function:
    """A logistic regression on d − 1 features of the breast cancer data."""
    features, target = _data("breast_cancer")
    rows = draw.choice(len(features), 150, replace=False)
    columns = draw.choice(features.shape[1], d - 1, replace=False)
    chosen = np.column_stack([features[np.ix_(rows, columns)], np.ones(150)])
    return _logistic(chosen, np.where(target[rows] > 0, 1.0, -1.0), 1e-3, np.zeros(d))


def diabetes(draw: np.random.Generator, d: int) -> Function:
    """A pseudo-Huber regression on products of the features of the diabetes data."""
    features, target = _data("diabetes")
    rows = draw.choice(len(features), 150, replace=False)
    pairs = features[rows][:, draw.integers(0, 10, size=d - 1)]
    second = features[rows][:, draw.integers(0, 10, size=d - 1)]
    chosen = np.where(np.arange(d - 1) % 2, pairs * second, pairs)
    chosen = np.column_stack([chosen, np.ones(150)])
    wanted = (target[rows] - target.mean()) / target.std()

    def fun(x: np.ndarray) -> float:
        r = (chosen @ x - wanted) / 0.3
        return float(np.sqrt(1 + r * r).sum()) / r.size - 1 + 5e-4 * float(x @ x)

    truth = np.linalg.lstsq(chosen, wanted, rcond=1e-8)[0]
    return polished(fun, np.zeros(d), [np.clip(truth, -3, 3)])
