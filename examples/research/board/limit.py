"""The two parts of the default method on each side of the limit between them.

    python -m board.limit --output records/board/limit.json

Up to a number of parameters, the default method is `bfgs` with `full_difference` and
the search `backtracking`. Above it, the method is SGD with an accelerated estimator and
the search `parabolic`. Both run on problems of 20 to 200 parameters: the paper's
functions, as they are and rotated, and CUTEst's. The record is written after each row,
and `--resume` continues it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax

import radazo_jax as zo
from board import problems, report
from board.oracle import Finished, Oracle
from board.problems import Case, Problem, Row
from common import options
from common.record import collect, numbers
from common.tables import Table
from paper import functions

BUDGET = 30  # In units of d + 1.
AT = (5, 10, 20, 30)  # Budgets of the table.
DIMENSIONS = (20, 30, 50, 70, 100, 140, 200)


def estimator(dimension: int) -> zo.GradientEstimator:
    """The estimator of the default method above the limit."""
    count = min(max(int(dimension**0.5), 10), 32)
    return zo.accelerated(zo.adaptive_difference(zo.orthonormal(), count))


# One transformation for all runs, so that they share programs.
_SGD = optax.sgd(1.0)
METHODS: dict[str, Callable[[int], tuple[Any, Any, Any]]] = {
    "bfgs": lambda _: (zo.bfgs(), zo.full_difference(), zo.search.backtracking()),
    "parabolic_sgd": lambda dimension: (
        _SGD,
        estimator(dimension),
        zo.search.parabolic(),
    ),
}


def cases() -> list[Case]:
    """All problems."""
    every = functions.PROBLEMS | {
        "Ellipsoid": functions.Problem(functions.ellipsoid, 0.0)
    }
    found = []
    for d in DIMENSIONS:
        for name, (fun, at) in every.items():
            make = functools.partial(problems.synthetic, fun, at, d)
            found.append(Case("Synthetic", name, d, make))
            if name != "Quadratic" and d % 50 == 0:
                turned = functools.partial(make, rotated=True)
                found.append(Case("Rotated", name, d, turned))
            if d == 100:
                for noise in problems.NOISES:
                    noisy = functools.partial(make, noise=noise)
                    found.append(Case("Noisy", f"{name}, {noise:.2%}", d, noisy))
    return found + problems._cutest(21, 200)


def measures() -> Iterator[Row]:
    """The rows of the record."""
    for case in cases():
        make = functools.cache(case.make)
        for name in METHODS:
            row = {"kind": case.kind, "problem": case.name}
            row |= {"dimension": case.dimension, "method": name}
            yield row, functools.partial(_measured, make, METHODS[name])


def _measured(
    make: Callable[[], Problem], method: Callable[[int], tuple[Any, Any, Any]]
) -> dict[str, Any]:
    problem = make()
    oracle = Oracle(problem, BUDGET * (problem.dimension + 1))
    with contextlib.suppress(zo.RunError, Finished):
        zo.minimize_black_box(
            oracle.one,
            problem.start,
            *method(problem.dimension),
            max_evaluations=oracle.budget,
            progress=False,
            callback=lambda report: oracle.finished,
        )
    return numbers({"evaluations": oracle.reached, "gap": oracle.gap})


def _group(row: dict[str, Any]) -> str:
    """The row of the table to which a row of the record belongs."""
    if row["kind"] == "Noisy":
        return "100, with noise"
    ends = [*DIMENSIONS, 201]
    least = max(d for d in ends if d <= row["dimension"])
    most = ends[ends.index(least) + 1] - 1
    return f"{least} to {most}"


def tables(content: dict[str, Any]) -> list[Table]:
    """Shares of targets by number of parameters."""
    rows = []
    for group in dict.fromkeys(map(_group, content["rows"])):
        of_group = [row for row in content["rows"] if _group(row) == group]
        kinds = {row["kind"] for row in of_group}
        for name, runs in report.runs(of_group, kinds).items():
            shares = (f"{x:.0%}" for x in runs.shares(AT))
            rows.append((group, f"`{name}`", str(len(runs.names)), *shares))
    caption = (
        "The two parts of the default method, by the number of parameters d: the share "
        "of targets (10⁻¹, 10⁻², 10⁻³ of the gap at the start) reached within so many "
        "times d + 1 evaluations"
    )
    heads = ("d", "method", "problems", *(f"≤ {k}" for k in AT))
    return [Table(caption, heads, rows)]


@options.command(__doc__)
@options.output
@options.resume
def main(output: Path | None, resume: bool) -> None:
    about = {"settings": {"budget": BUDGET}}
    with jax.enable_x64(True):
        made = collect(output, resume, measures(), lambda rows: rows, **about)
    for table in tables({"rows": made}):
        print(table.caption, table.format(), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
