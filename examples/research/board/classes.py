"""The default method and other tools by class of problems, on functions made by seeds.

    python -m board.classes --methods default --seeds 0,1,2 --output x.json --resume
    python -m board.classes --classes free,steps --methods default,cma
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
from typing import Any

import click
import numpy as np

from board.class_methods import METHODS, NAMES, TARGETS, measured
from board.class_problems import Function
from board.class_table import CLASSES, Case, cases
from common import options
from common.campaign import Campaign, campaign
from common.campaign import Case as Measured
from common.record import Row, array
from common.tables import Table

AT = (10, 30, 100)  # Budgets of the tables, in units of d + 1.
ABOUT = {"settings": {"targets": TARGETS, "budgets": AT}}
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


def measures(wanted: Sequence[Case], methods: Sequence[str]) -> Iterator[Measured]:
    """The rows of the record: all methods on one problem after another."""
    for case in wanted:
        make = functools.cache(case.make)
        for method in methods:
            if METHODS[method].takes(case.dimension):
                values = (case.kind, case.name, case.seed, case.dimension, method)
                row = dict(zip(_IDENTITY, values, strict=True))
                yield row, functools.partial(_measured, case, make, method)


def _measured(case: Case, make: Callable[[], Function], method: str) -> Row:
    budget = CLASSES[case.kind].budget * (case.dimension + 1)
    return measured(make(), budget, METHODS[method].run, case.seed)


def shares(rows: Sequence[Row]) -> list[float]:
    """The share of targets reached within each budget that all runs have."""
    units = array([row["evaluations"] for row in rows])
    units = units / np.array([[row["dimension"] + 1] for row in rows])
    most = min(CLASSES[row["kind"]].budget if "kind" in row else AT[-1] for row in rows)
    return [float(np.mean(units <= at)) for at in AT if at <= most]


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


def cell(rows: Sequence[Row]) -> str:
    """Shares at the budgets, in percent."""
    return "/".join(f"{100 * share:.0f}" for share in shares(rows)) if rows else "–"


def _interval(rows: Sequence[Row]) -> str:
    """The intervals of the shares; a run is one trial, because its targets depend."""
    if not rows:
        return "–"
    found = [wilson(share, len(rows)) for share in shares(rows)]
    return ", ".join(f"{100 * low:.0f}–{100 * high:.0f}" for low, high in found)


def _stuck(rows: Sequence[Row]) -> str:
    """Number of runs without a point below the start."""
    return str(sum(not row["gap"] < 1 for row in rows)) if rows else "–"


def by_method(
    caption: str,
    rows: Sequence[Row],
    groups: dict[str, str],
    cell: Callable[[Sequence[Row]], str],
    fields: tuple[str, str] = ("kind", "method"),
    names: dict[str, str] = NAMES,
) -> Table:
    """A table with a line for each group of rows, and a column for each method."""
    group_of, method_of = fields
    methods = [name for name in names if any(row[method_of] == name for row in rows)]
    lines = []
    for group, text in groups.items():
        of_group = [
            [r for r in rows if (r[group_of], r[method_of]) == (group, method)]
            for method in methods
        ]
        if any(of_group):
            count = max(map(len, of_group))
            lines.append((text, str(count), *map(cell, of_group)))
    return Table(caption, ("class", "runs", *(names[name] for name in methods)), lines)


def tables(content: dict[str, Any]) -> list[Table]:
    """Shares of targets by class, their intervals, stuck runs, and gaps with noise."""
    rows = content["rows"]
    exact = [row for row in rows if row["kind"] not in NOISY]
    every = {name: kind.text for name, kind in CLASSES.items()}
    groups = {name: text for name, text in every.items() if name not in NOISY}

    targets = "the share of targets (10⁻¹, 10⁻², 10⁻³, 10⁻⁵ of the gap at the start)"
    return [
        by_method(
            f"By class, {targets} reached within 10 / 30 / 100 (d + 1) evaluations, in "
            "percent; with noise, by the true values of the points",
            *(rows, every, cell),
        ),
        by_method(
            "By class, the 95 % intervals (Wilson's) of these shares. A run counts as "
            "one trial, because its targets depend on one another",
            *(rows, every, _interval),
        ),
        by_method(
            "By class, the number of runs without a point below the start",
            *(exact, groups, _stuck),
        ),
        _noise(rows),
    ]


def _noise(rows: Sequence[Row]) -> Table:
    """Medians of the true gap at the returned point, by noise and dimension."""
    noisy = [row for row in rows if row["kind"] in NOISY]
    dimensions = sorted({row["dimension"] for row in noisy})

    def medians(rows: Sequence[Row]) -> str:
        found = [
            [row["returned"] for row in rows if row["dimension"] == d]
            for d in dimensions
        ]
        return " / ".join(f"{np.median(array(x)):.2g}" if x else "–" for x in found)

    return by_method(
        "With noise of so much of the gap at the start (additive) or of the value "
        "(relative), the true gap at the returned point after 100 (d + 1) evaluations, "
        "as a share of the gap at the start: medians for d = "
        f"{' / '.join(map(str, dimensions))}",
        noisy,
        {name: CLASSES[name].text for name in NOISY},
        medians,
    )


@campaign(__doc__)
@options.listed("--classes", "kinds", of=CLASSES, text="Classes of problems")
@options.listed("--methods", of=METHODS, text="Methods")
@options.listed("--seeds", text="Seeds of the problems", default="0,1,2")
@click.option("--runs", default=0, help="Runs of each class, instead of seeds.")
def main(
    kinds: Sequence[str], methods: Sequence[str], seeds: Sequence[str], runs: int
) -> Campaign:
    wanted = chosen(kinds, runs) if runs else cases(kinds, list(map(int, seeds)))
    return Campaign(measures(wanted, methods), about=ABOUT, tables=tables, keeps=True)


if __name__ == "__main__":
    main()
