"""Compares methods with the default before them: paired problems and seeds, by class.

    python -m board.paired --output records/board/paired.json --resume
    python -m board.paired --classes free,steps --development

The problems of the record are fixed by a rule: of each class of `board.classes`, as
many seeds from 100 on as give 50 runs, so 200 targets. Constants are chosen on seeds 0
to 2 (`--development`). A row is a method on a problem, as in `board.classes`. The rows
of the default before, which was a part of the compiled step, are of revision
74433fc.

A method is driven as a generator: its points are evaluated one after another.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from board.class_methods import TARGETS, Count
from board.class_problems import Function
from board.class_table import CLASSES, Case, cases
from board.classes import AT, Row, reached
from common import options
from common.record import collect, numbers, read
from common.tables import Table
from radazo_jax import methods

BEFORE, AFTER = "default", "untuned"
_IDENTITY = ("kind", "problem", "seed", "dimension", "method")
_RUNS, _FIRST = 50, 100
_DRAWS = 2000


def chosen(kind: str, development: bool) -> list[Case]:
    """The problems of a class: of the record, or to choose constants on."""
    if development:
        return cases([kind], range(3))
    seeds = math.ceil(_RUNS / len(CLASSES[kind].problems))
    return cases([kind], range(_FIRST, _FIRST + seeds))


def started(function: Function, seed: int) -> methods.Start:
    """The start that a run gives to a method, in float64."""
    d = function.dimension
    bounds = function.bounds or (np.full(d, -np.inf), np.full(d, np.inf))
    return methods.Start(
        params=np.array(function.start, np.float64),
        box=methods.Box(*(np.asarray(bound, np.float64) for bound in bounds)),
        rng=np.random.default_rng(seed),
        resolution=float(np.finfo(np.float64).eps),
        step=np.zeros(d),
        round=lambda points: points,
        flatten=lambda tree: np.broadcast_to(np.asarray(tree, np.float64), (d,)),
        limited=True,
    )


def driven(method: methods.Method, count: Count, seed: int) -> np.ndarray:
    """Runs a method. Returns its lowest point, or its center under noise."""
    steps = method(started(count.function, seed))
    asked = next(steps)
    while True:
        if not isinstance(asked, methods.Ask):
            asked = methods.Ask(asked)
        values = np.full(len(asked.points), np.nan)
        for i, x in enumerate(asked.points):
            if count.finished:
                return count.lowest[1] if asked.center is None else asked.center
            values[i] = count.value(x)
        try:
            asked = steps.send(np.where(np.isfinite(values), values, np.nan))
        except StopIteration as stop:
            return stop.value.params


def _measured(case: Case, make: Callable[[], Function]) -> dict[str, Any]:
    function = make()
    budget = CLASSES[case.kind].budget * (case.dimension + 1)
    count = Count(function, budget, case.seed)
    with np.errstate(all="ignore"):
        point = driven(methods.untuned(), count, case.seed)
        found: dict[str, Any] = {"evaluations": count.reached, "gap": count.gap}
        if CLASSES[case.kind].noise:
            found["returned"] = (function.fun(point) - function.least) / function.gap
    return numbers(found)


def measures(kinds: Sequence[str], development: bool) -> Iterator[Row]:
    """The rows of the present default."""
    for kind in kinds:
        for case in chosen(kind, development):
            values = (case.kind, case.name, case.seed, case.dimension, AFTER)
            row = dict(zip(_IDENTITY, values, strict=True))
            yield row, functools.partial(_measured, case, case.make)


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Returns the 95 % interval of a mean of paired differences, by the bootstrap."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(differences), size=(_DRAWS, len(differences)))
    low, high = np.quantile(differences[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def tables(content: dict[str, Any]) -> list[Table]:
    """Shares of targets by class, before and after, and their paired differences."""
    lines, means = [], []
    for kind, about in CLASSES.items():
        pairs = paired(content["rows"], kind)
        if not pairs:
            continue
        before, after = (reached(list(rows)) for rows in zip(*pairs, strict=True))
        within = [at <= about.budget for at in AT]
        shares = [
            "/".join(f"{100 * x:.0f}" for x in of.mean(axis=(0, 1))[within])
            for of in (before, after)
        ]
        each = 100 * (after - before)[:, :, within].mean(axis=(1, 2))
        low, high = interval(each)
        means.append(each.mean())
        targets = str(before[:, :, 0].size)
        mean = f"{each.mean():+.1f}"
        lines.append((about.text, targets, *shares, mean, f"{low:+.1f} to {high:+.1f}"))
    if means:
        lines.append(("Mean of classes", "", "", "", f"{np.mean(means):+.1f}", ""))
    head = ("class", "targets", "before", "after", "difference", "95 %")
    return [
        Table(
            "The share of targets (10⁻¹, 10⁻², 10⁻³, 10⁻⁵ of the gap at the start) "
            "reached within 10 / 30 / 100 (d + 1) evaluations, in percent: the "
            "compiled default before, and `methods.untuned` after, on the same "
            "problems and seeds. The difference is the mean over budgets, with its "
            "interval by the paired bootstrap over runs",
            head,
            lines,
        )
    ]


def paired(
    rows: Sequence[dict[str, Any]], kind: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The rows of a class before and after, on the same problems."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == kind:
            key = tuple(row[name] for name in _IDENTITY[:-1])
            found.setdefault(key, {})[row["method"]] = row
    return [(both[BEFORE], both[AFTER]) for both in found.values() if len(both) == 2]


@options.command(__doc__)
@options.listed("--classes", "kinds", of=CLASSES, text="Classes of problems")
@click.option("--development", is_flag=True, help="Seeds to choose constants on.")
@options.output
@options.resume
def main(
    kinds: Sequence[str], development: bool, output: Path | None, resume: bool
) -> None:
    wanted = list(measures(kinds, development))
    keys = {tuple(row.values()) for row, _ in wanted}
    kept, about = [], {"settings": {"targets": TARGETS, "budgets": AT}}
    if output is not None and output.exists():
        rows = read(output)["rows"]
        kept = [r for r in rows if tuple(map(r.get, _IDENTITY)) not in keys]
    made = collect(output, resume, wanted, lambda rows: kept + rows, **about)
    for table in tables({"rows": made}):
        if table.rows:
            print(table.caption, table.format(), sep="\n\n")


if __name__ == "__main__":
    main()
