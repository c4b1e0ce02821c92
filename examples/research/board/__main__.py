"""Counts the evaluations that methods need on many problems.

    python -m board
    python -m board --fast
    python -m board --robust
    python -m board --relatives

A row of the record is a method on a problem: the evaluations after which 10⁻¹, 10⁻²
and 10⁻³ of the gap at the start are left, in a budget of 30 (d + 1). The record is
written after each row, and `--resume` continues it. `pip install -e
".[board]"` installs the problems and the other methods; what is missing is left out.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from board import methods, problems, relatives, report, robust
from board.oracle import TARGETS
from common import OUTPUT, cli, figures
from common.record import collect, read


class OutOfTime(Exception):
    """The minutes are over; the record has what was measured."""


def measures(args: Any) -> Iterator[problems.Row]:
    """The rows of the record."""
    for case in problems.cases(args.fast):
        for name, method in methods.METHODS.items():
            if method.takes(case.kind, case.dimension):
                row = {"kind": case.kind, "problem": case.name}
                row |= {"dimension": case.dimension, "method": name}
                settings = args.budget, args.seed
                yield row, functools.partial(methods.measure, case, method, *settings)


def until(stop: float, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the measurement if it begins in time."""
    if time.monotonic() > stop:
        raise OutOfTime
    return measure()


def main(argv: Sequence[str] | None = None) -> None:
    parser = cli.parser(__doc__)
    add = parser.add_argument
    add("--budget", type=cli.at_least_one, default=30, help="evaluations over d + 1")
    add("--seed", type=cli.integer(0), default=0)
    add("--minutes", type=cli.positive, help="begin no row after so many")
    add("--fast", action="store_true", help="few dimensions: to see that it works")
    add("--robust", action="store_true", help="what diverges, in place of the board")
    add("--relatives", action="store_true", help="the rules behind each estimator")
    add("--resume", action="store_true", help="take the rows that are there")
    add(
        "--output",
        type=Path,
        default=OUTPUT / "board",
        help="folder of the JSON and the PNG",
    )
    args = parser.parse_args(argv)
    stop = time.monotonic() + 60 * (args.minutes or float("inf"))
    name = "robust" if args.robust else "relatives" if args.relatives else "board"
    path = args.output / name
    with jax.enable_x64(True):
        rows = {
            "board": measures,
            "robust": robust.measures,
            "relatives": relatives.measures,
        }[name](args)
        settings = {"budget": args.budget, "seed": args.seed, "targets": TARGETS}
        if args.robust:
            settings = {"budget": robust.BUDGET, "seed": args.seed}
        try:
            collect(
                path.with_suffix(".json"),
                args.resume,
                [(row, functools.partial(until, stop, get)) for row, get in rows],
                lambda rows: rows,
                settings=settings,
            )
        except OutOfTime:
            print(f"{args.minutes:g} minutes are over; --resume goes on")
    content = read(path.with_suffix(".json"))
    for table in report.tables(content):
        print(f"\n{table.caption}\n\n{table.format()}")
    if name == "board":
        figures.save(report.plot(content), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
