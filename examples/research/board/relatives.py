"""R-AdaZO, ZO-AdaMM and ZO-SGD with each estimator that the paper builds on."""

import functools
from collections.abc import Iterator

from board import methods, problems
from common.estimators import ESTIMATORS

_MOST = 102  # The dimension up to which problems are taken.


def measures(fast: bool, budget: int, seed: int) -> Iterator[problems.Row]:
    """The rows of the record."""
    found = [case for case in problems.cases(fast) if case.dimension <= _MOST]
    # One estimator after another, and by dimension, for these are programs.
    found.sort(key=lambda case: case.dimension)
    for name, estimator in ESTIMATORS.items():
        for case in found:
            for method, of in methods.swept(estimator).items():
                row = {"estimator": name, "kind": case.kind, "problem": case.name}
                row |= {"dimension": case.dimension, "method": method}
                yield row, functools.partial(methods.measure, case, of, budget, seed)
