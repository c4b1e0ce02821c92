"""Fits of models to data: a method of residuals, and other tools.

    python -m board.fits --seeds 100,101,102 --output records/board/fits.json --resume

A row of the record is a tool on a problem: the evaluations until 10⁻¹, 10⁻², 10⁻³ and
10⁻⁵ of the gap at the start are left, at most 100 (d + 1).
"""

import contextlib
import functools
import importlib.util
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from scipy import optimize

import radazo_jax as zo
from board import class_methods
from board.class_methods import TARGETS, Count, Finished
from board.fit_problems import GROUPS
from common import options
from common.record import collect, numbers
from common.tables import Table

AT = (10, 30, 100)  # Budgets of the table, in units of d + 1.
_IDENTITY = ("group", "problem", "seed", "dimension", "tool")

Residuals = Callable[[np.ndarray], np.ndarray]


def by_residuals(fun: Residuals, start: np.ndarray, seed: int) -> None:
    """Drives `zo.methods.least_squares` without a run, in all of the plane."""
    d = start.size
    ends = np.full(d, np.inf)
    begun = zo.methods.Start(
        params=np.array(start, np.float64),
        box=zo.methods.Box(-ends, ends),
        rng=np.random.default_rng(seed),
        resolution=float(np.finfo(float).eps),
        step=np.zeros(d),
        round=lambda points: points,
        flatten=lambda tree: np.broadcast_to(tree, d),
        limited=True,
    )
    steps: Any = zo.methods.least_squares()(begun)
    asked = next(steps)
    with contextlib.suppress(StopIteration):
        while True:
            points = getattr(asked, "points", asked)
            asked = steps.send(np.array([fun(x) for x in points]))


def leastsq(fun: Residuals, start: np.ndarray, seed: int) -> None:
    """MINPACK's Levenberg–Marquardt method, as `curve_fit` and lmfit call it."""
    del seed
    optimize.leastsq(fun, start, maxfev=10**6)


def trf(fun: Residuals, start: np.ndarray, seed: int) -> None:
    """SciPy's trust region, scaled by the Jacobian."""
    del seed
    optimize.least_squares(fun, start, x_scale="jac", max_nfev=10**4)


def dfols(fun: Residuals, start: np.ndarray, seed: int) -> None:
    """DFO-LS, as it is."""
    import dfols

    del seed
    dfols.solve(fun, start, maxfun=10**5)


TOOLS = {"least_squares": by_residuals, "dfols": dfols, "leastsq": leastsq, "trf": trf}
NAMES = {"least_squares": "`least_squares()`", "dfols": "DFO-LS"}
NAMES |= {"leastsq": "MINPACK", "trf": "SciPy's `trf`", "default": "the default"}


def _residuals(count: Count, x: np.ndarray) -> np.ndarray:
    if count.finished:
        raise Finished
    count.value(x)
    assert count.function.residuals is not None
    return np.asarray(count.function.residuals(x), np.float64)


def measured(problem: Any, tool: str, seed: int) -> dict[str, Any]:
    """Runs a tool on a problem, with the sum alone if it is the default."""
    function = problem()
    count = Count(function, 100 * (function.dimension + 1), seed)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if tool == "default":
            class_methods.default(count, seed)
        else:
            # A tool that fails ends its run, with what it has found.
            ends = Finished, ValueError, np.linalg.LinAlgError, TypeError
            with contextlib.suppress(*ends):
                fun = functools.partial(_residuals, count)
                TOOLS[tool](fun, function.start, seed)
    return numbers({"evaluations": count.reached, "gap": count.gap})


def measures(seeds: Sequence[int], tools: Sequence[str]) -> Iterator[Any]:
    """The rows of the record, before they are measured."""
    for group, problems in GROUPS.items():
        for name, family in problems.items():
            for seed in seeds:
                key = zlib.crc32(name.encode()), seed
                make = functools.cache(
                    functools.partial(
                        lambda family, key: family(np.random.default_rng(key)),
                        family,
                        key,
                    )
                )
                d = make().dimension
                for tool in tools:
                    if tool != "dfols" or importlib.util.find_spec("dfols"):
                        row = dict(
                            zip(_IDENTITY, (group, name, seed, d, tool), strict=True)
                        )
                        yield row, functools.partial(measured, make, tool, seed)


def tables(content: dict[str, Any]) -> list[Table]:
    """Shares of targets that each tool reached, by group."""
    rows = content["rows"]
    tools = [name for name in NAMES if any(row["tool"] == name for row in rows)]
    lines = []
    for group in dict.fromkeys(row["group"] for row in rows):
        cells = []
        for tool in tools:
            found = [r for r in rows if (r["group"], r["tool"]) == (group, tool)]
            units = np.array(
                [
                    [(e or np.inf) / (row["dimension"] + 1) for e in row["evaluations"]]
                    for row in found
                ]
            )
            cells.append("/".join(f"{100 * np.mean(units <= at):.0f}" for at in AT))
        lines.append((group, str(len(found)), *cells))
    caption = (
        "Fits, the share of targets (10⁻¹, 10⁻², 10⁻³, 10⁻⁵ of the gap at the start) "
        "reached within 10 / 30 / 100 (d + 1) evaluations, in percent"
    )
    return [Table(caption, ("class", "runs", *(NAMES[t] for t in tools)), lines)]


@options.command(__doc__)
@options.listed("--tools", of=NAMES, text="Tools")
@options.listed("--seeds", text="Seeds of the problems", default="0,1,2")
@options.output
@options.resume
def main(
    tools: Sequence[str], seeds: Sequence[str], output: Path | None, resume: bool
) -> None:
    about = {"settings": {"targets": TARGETS, "budgets": AT}}
    wanted = list(measures([int(seed) for seed in seeds], tools))
    made = collect(output, resume, wanted, lambda rows: rows, **about)
    for table in tables({"rows": made}):
        click.echo(f"{table.caption}\n\n{table.format()}\n")


if __name__ == "__main__":
    main()
