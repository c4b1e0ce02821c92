"""Counts the evaluations that methods need on many problems.

    python -m board
    python -m board --fast
    python -m board --robust
    python -m board --relatives

A row of the record is a method on a problem: the evaluations after which 10⁻¹, 10⁻²
and 10⁻³ of the gap at the start are left, in a budget of 30 (d + 1). The record is
written after each row, and `--resume` continues it. The extra
`board` installs the problems and the other methods; what is missing is left out.
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax

from board import methods, problems, relatives, report, robust
from board.oracle import TARGETS
from common import OUTPUT, figures, options
from common.record import collect, read


class OutOfTime(Exception):
    """The minutes are over; the record has what was measured."""


def measures(fast: bool, budget: int, seed: int) -> Iterator[problems.Row]:
    """The rows of the record."""
    for case in problems.cases(fast):
        for name, method in methods.METHODS.items():
            if method.takes(case.kind, case.dimension):
                row = {"kind": case.kind, "problem": case.name}
                row |= {"dimension": case.dimension, "method": name}
                settings = budget, seed
                yield row, functools.partial(methods.measure, case, method, *settings)


def until(stop: float, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the measurement if it begins in time."""
    if time.monotonic() > stop:
        raise OutOfTime
    return measure()


class Board(NamedTuple):
    """A record: its name, its rows, and its settings besides the seed."""

    name: str
    rows: Iterable[tuple[problems.Row, Callable[[], dict[str, Any]]]]
    settings: dict[str, Any]


def chosen(
    fast: bool, robust_: bool, relatives_: bool, budget: int, seed: int
) -> Board:
    if robust_:
        return Board("robust", robust.measures(fast, seed), {"budget": robust.BUDGET})
    settings = {"budget": budget, "targets": TARGETS}
    if relatives_:
        rows = relatives.measures(fast, budget, seed)
        return Board("relatives", rows, settings)
    return Board("board", measures(fast, budget, seed), settings)


@options.command(__doc__)
@click.option(
    "--budget", type=options.COUNT, default=30, help="Evaluations over d + 1."
)
@click.option("--seed", type=click.IntRange(min=0), default=0)
@click.option("--minutes", type=options.POSITIVE, help="Begins no row later.")
@click.option("--fast", is_flag=True, help="Few dimensions, to see that it works.")
@click.option("--robust", "robust_", is_flag=True, help="Counts what diverges instead.")
@click.option(
    "--relatives", "relatives_", is_flag=True, help="Compares estimators instead."
)
@options.resume
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=OUTPUT / "board",
    help="A folder for the JSON and the PNG.",
)
def main(
    minutes: float | None, resume: bool, output: Path, seed: int, **which: Any
) -> None:
    stop = time.monotonic() + 60 * (minutes or float("inf"))
    with jax.enable_x64(True):
        name, rows, settings = chosen(seed=seed, **which)
        path = output / name
        try:
            collect(
                path.with_suffix(".json"),
                resume,
                [(row, functools.partial(until, stop, get)) for row, get in rows],
                lambda rows: rows,
                settings=settings | {"seed": seed},
            )
        except OutOfTime:
            print(f"{minutes:g} minutes are over; --resume continues")
    content = read(path.with_suffix(".json"))
    for table in report.tables(content):
        print(f"\n{table.caption}\n\n{table.format()}")
    if name == "board":
        figures.save(report.plot(content), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
