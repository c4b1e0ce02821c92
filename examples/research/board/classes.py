"""The default method and other tools by class of problems, on functions made by seeds.

    python -m board.classes --methods default --seeds 0,1,2 --output x.json --resume
    python -m board.classes --classes free,steps --problems --methods default,cma
    python -m board.classes --classes everyday,guessed,jitter --runs 50 --output x.json

Constants may be chosen on seeds 0 to 2, and the record has seeds from 100 on, which are
other functions: other rotations, data, starts and numbers of parameters d. With
`--runs`, a class has as many of them as give so many runs. A row of the
record is a method on a problem: the evaluations until 10⁻¹, 10⁻², 10⁻³ and 10⁻⁵ of the
gap at the start are left, at most 100 (d + 1), or 30 (d + 1) above 200 parameters. With
noise, it is also the true gap at the point that the method returned. f* is the closed
form or, without one, the end of a long run from the parameters that made the data.

The record is written after each row. `--resume` takes its rows, and keeps the others.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

from board.class_methods import METHODS, NAMES, TARGETS, measured
from board.class_problems import Function
from board.class_table import CLASSES, Case, cases
from common import options
from common.record import array, collect, numbers, read
from common.tables import Table

# A row of the record, before it is measured.
Row = tuple[dict[str, Any], Callable[[], dict[str, Any]]]

AT = (10, 30, 100)  # Budgets of the tables, in units of d + 1.
NOISY = tuple(name for name, kind in CLASSES.items() if kind.noise)
_FIRST = 100  # The first seed of the record.
_IDENTITY = ("kind", "problem", "seed", "dimension", "method")


def chosen(kinds: Sequence[str], runs: int) -> list[Case]:
    """Returns so many seeds, from 100 on, that each class has so many runs."""
    return [
        case
        for kind in kinds
        for count in [math.ceil(runs / len(CLASSES[kind].problems))]
        for case in cases([kind], range(_FIRST, _FIRST + count))
    ]


def measures(wanted: Sequence[Case], methods: Sequence[str]) -> Iterator[Row]:
    """The rows of the record: all methods on one problem after another."""
    for case in wanted:
        make = functools.cache(case.make)
        for method in methods:
            if METHODS[method].takes(case.dimension):
                values = (case.kind, case.name, case.seed, case.dimension, method)
                row = dict(zip(_IDENTITY, values, strict=True))
                yield row, functools.partial(_measured, case, make, method)


def _measured(case: Case, make: Callable[[], Function], method: str) -> dict[str, Any]:
    budget = CLASSES[case.kind].budget * (case.dimension + 1)
    return numbers(measured(make(), budget, method, case.seed))


def reached(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """Whether each run reached each target within each budget: [runs, targets, AT].

    Budgets above the limit of the class are NaN.
    """
    units = array([row["evaluations"] for row in rows])
    units = units / np.array([[row["dimension"] + 1] for row in rows])
    within = (units[:, :, None] <= np.array(AT)).astype(np.float64)
    most = np.array([CLASSES[row["kind"]].budget for row in rows])
    within[np.broadcast_to(most[:, None, None] < np.array(AT), within.shape)] = np.nan
    return within


def shares(rows: Sequence[dict[str, Any]]) -> list[float]:
    """The share of targets reached within each budget that all runs have."""
    found = reached(rows).mean(axis=(0, 1))
    return [float(share) for share in found if np.isfinite(share)]


def wilson(share: float, count: int, deviations: float = 1.96) -> tuple[float, float]:
    """Returns Wilson's interval of a share of so many trials.

    References:
      Wilson, Probable inference, the law of succession, and statistical inference,
      Journal of the American Statistical Association 1927.
    """
    square = deviations**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = np.sqrt(share * (1 - share) / count + square / (4 * count**2))
    half *= deviations / (1 + square / count)
    return float(max(0, middle - half)), float(min(1, middle + half))


def _cell(rows: Sequence[dict[str, Any]]) -> str:
    """Shares at the budgets, in percent."""
    return "/".join(f"{100 * share:.0f}" for share in shares(rows)) if rows else "–"


def _interval(rows: Sequence[dict[str, Any]]) -> str:
    """The intervals of the shares; a run is one trial, because its targets depend."""
    if not rows:
        return "–"
    found = [wilson(share, len(rows)) for share in shares(rows)]
    return ", ".join(f"{100 * low:.0f}–{100 * high:.0f}" for low, high in found)


def _stuck(rows: Sequence[dict[str, Any]]) -> str:
    """Number of runs without a point below the start."""
    return str(sum(not row["gap"] < 1 for row in rows)) if rows else "–"


def _grouped(
    rows: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], Any]
) -> dict[Any, list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _by_method(
    caption: str,
    rows: Sequence[dict[str, Any]],
    groups: dict[Any, str],
    key: Callable[[dict[str, Any]], Any],
    cell: Callable[[Sequence[dict[str, Any]]], str],
) -> Table:
    """A table with a line for each group of rows, and a column for each method."""
    methods = [name for name in METHODS if any(row["method"] == name for row in rows)]
    found = _grouped(rows, lambda row: (key(row), row["method"]))
    lines = []
    for group, text in groups.items():
        of_group = [found.get((group, method), []) for method in methods]
        if any(of_group):
            count = max(map(len, of_group))
            lines.append((text, str(count), *map(cell, of_group)))
    return Table(caption, ("class", "runs", *(NAMES[name] for name in methods)), lines)


def tables(content: dict[str, Any]) -> list[Table]:
    """Shares of targets by class, their intervals, stuck runs, and gaps with noise."""
    rows = content["rows"]
    exact = [row for row in rows if row["kind"] not in NOISY]
    every = {name: kind.text for name, kind in CLASSES.items()}
    groups = {name: text for name, text in every.items() if name not in NOISY}

    def kind(row: dict[str, Any]) -> str:
        return row["kind"]

    targets = "the share of targets (10⁻¹, 10⁻², 10⁻³, 10⁻⁵ of the gap at the start)"
    return [
        _by_method(
            f"By class, {targets} reached within 10 / 30 / 100 (d + 1) evaluations, in "
            "percent; with noise, by the true values of the points",
            *(rows, every, kind, _cell),
        ),
        _by_method(
            "By class, the 95 % intervals (Wilson's) of these shares. A run counts as "
            "one trial, because its targets depend on one another",
            *(rows, every, kind, _interval),
        ),
        _by_method(
            "By class, the number of runs without a point below the start",
            *(exact, groups, kind, _stuck),
        ),
        _noise(rows),
    ]


def _noise(rows: Sequence[dict[str, Any]]) -> Table:
    """Medians of the true gap at the returned point, by noise and dimension."""
    noisy = [row for row in rows if row["kind"] in NOISY]
    dimensions = sorted({row["dimension"] for row in noisy})

    def cell(rows: Sequence[dict[str, Any]]) -> str:
        found = _grouped(rows, lambda row: row["dimension"])
        medians = (
            np.median(array([row["returned"] for row in found[d]]))
            if d in found
            else None
            for d in dimensions
        )
        return " / ".join("–" if m is None else f"{m:.2g}" for m in medians)

    return _by_method(
        "With noise of so much of the gap at the start (additive) or of the value "
        "(relative), the true gap at the returned point after 100 (d + 1) evaluations, "
        "as a share of the gap at the start: medians for d = "
        f"{' / '.join(map(str, dimensions))}",
        noisy,
        {name: CLASSES[name].text for name in NOISY},
        lambda row: row["kind"],
        cell,
    )


def by_problem(rows: Sequence[dict[str, Any]]) -> Table:
    """Shares of targets by problem, which show what a method lacks."""
    groups = {(row["kind"], row["problem"]): "" for row in rows}
    return _by_method(
        "Shares of targets by problem",
        rows,
        {group: f"{group[0]}: {group[1]}" for group in groups},
        lambda row: (row["kind"], row["problem"]),
        _cell,
    )


@options.command(__doc__)
@options.listed("--classes", "kinds", of=CLASSES, text="Classes of problems")
@options.listed("--methods", of=METHODS, text="Methods")
@options.listed("--seeds", text="Seeds of the problems", default="0,1,2")
@click.option("--runs", default=0, help="Runs of each class, instead of seeds.")
@click.option("--problems", is_flag=True, help="Prints a table by problem, too.")
@options.output
@options.resume
def main(
    kinds: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[str],
    runs: int,
    problems: bool,
    output: Path | None,
    resume: bool,
) -> None:
    about = {"settings": {"targets": TARGETS, "budgets": AT}}
    of_seeds = cases(kinds, [int(seed) for seed in seeds])
    wanted = list(measures(chosen(kinds, runs) if runs else of_seeds, methods))
    keys = {tuple(row.values()) for row, _ in wanted}
    kept = []
    if resume and output is not None and output.exists():
        before = read(output)["rows"]
        kept = [r for r in before if tuple(map(r.get, _IDENTITY)) not in keys]
    with jax.enable_x64(True):
        made = collect(output, resume, wanted, lambda rows: kept + rows, **about)
    shown = tables({"rows": made}) + ([by_problem(made)] if problems else [])
    for table in shown:
        if table.rows:
            print(table.caption, table.format(), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
