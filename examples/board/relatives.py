"""R-AdaZO, ZO-AdaMM and ZO-SGD behind each estimator that the paper builds on."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from examples.board import methods, problems
from examples.board.oracle import Oracle
from examples.common.estimators import ESTIMATORS
from examples.common.record import numbers

_MOST = 102  # The dimension up to which problems are taken.


def measures(
    args: Any,
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """What tells a row from the others, and what measures the rest of it."""
    found = [case for case in problems.cases(args.fast) if case.dimension <= _MOST]
    # One estimator after another, and by dimension, for these are programs.
    found.sort(key=lambda case: case.dimension)

    @functools.cache
    def built(case: problems.Case) -> tuple[Any, Callable[[], Oracle]]:
        problem = case.make()
        budget = args.budget * (problem.dimension + 1)
        return problem, functools.partial(Oracle, problem, budget, args.seed)

    def measure(case: problems.Case, method: methods.Method) -> dict[str, Any]:
        return numbers(methods.measured(method.run(*built(case), args.seed), method))

    for name, estimator in ESTIMATORS.items():
        for case in found:
            for method, of in methods.swept(estimator).items():
                row = {"estimator": name, "kind": case.kind, "problem": case.name}
                row |= {"dimension": case.dimension, "method": method}
                yield row, functools.partial(measure, case, of)
