"""Tunes the preprocessing of a scikit-learn pipeline by its cross-validated score.

    python examples/black_boxes/pipeline.py

Nearest neighbors predict Friedman's first function, of 20 features of which 15 are
noise. The pipeline gives each feature a weight. Which neighbors are the nearest changes
in jumps with the weights, and so does the score.
"""

from typing import Any

import numpy as np
from sklearn.datasets import make_friedman1
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import radazo_jax as zo
from examples.black_boxes import compare
from examples.black_boxes.results import Table, finish

# 400 points to tune on, and 1600 to test.
X, X_TEST, Y, Y_TEST = train_test_split(
    *make_friedman1(2000, n_features=20, noise=1.0, random_state=0),
    train_size=400,
    random_state=0,
)
START = np.zeros(20, np.float32)  # The logarithms of the weights.
ESTIMATOR = zo.central_difference(zo.rademacher(), num_directions=4, smoothing=0.1)


def scaled(x: np.ndarray, log_weights: np.ndarray) -> np.ndarray:
    return x * np.exp(log_weights)


def pipeline(log_weights: np.ndarray) -> Pipeline:
    weigh = FunctionTransformer(scaled, kw_args={"log_weights": log_weights})
    return make_pipeline(StandardScaler(), weigh, KNeighborsRegressor(5))


def loss(log_weights: np.ndarray) -> float:
    """Returns 1 − R² of a three-fold cross-validation."""
    return 1 - np.mean(cross_val_score(pipeline(log_weights), X, Y, cv=3))


def measure(log_weights: np.ndarray) -> dict[str, float]:
    """R² in cross-validation, and on points that no run has seen."""
    tuned = pipeline(log_weights).fit(X, Y)
    return {"score": 1 - loss(log_weights), "test": tuned.score(X_TEST, Y_TEST)}


def tables(content: dict[str, Any]) -> list[Table]:
    names = {"score": "cross_validated", "test": "test"}
    return [compare.table(content, "R² of k-NN with weighted features", names)]


@compare.options(evaluations=200, seeds=3)
def main(args: Any) -> None:
    problem = compare.Problem(
        loss, START, ESTIMATOR, rates=(0.1, 0.2), sigmas=(0.3, 1.0)
    )
    with compare.processes() as pool:
        content, _ = compare.compare(problem, measure, args, pool)
    finish(args.output / "pipeline", content, tables)


if __name__ == "__main__":
    main()
