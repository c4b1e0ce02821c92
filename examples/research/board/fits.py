"""Fits of models to data: a method of residuals, and other tools.

    python -m board.fits --seeds 100,101,102 --output records/board/fits.json --resume

A row of the record is a tool on a problem: the evaluations until 10⁻¹, 10⁻², 10⁻³ and
10⁻⁵ of the gap at the start are left, at most 100 (d + 1).
"""

import functools
import importlib.util
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import optimize

import radazo_jax as zo
from board import classes
from board.class_methods import Count, default, measured
from board.fit_problems import GROUPS
from common import options
from common.campaign import Campaign, Case, campaign
from common.tables import Table

_IDENTITY = ("group", "problem", "seed", "dimension", "tool")

Residuals = Callable[[np.ndarray], np.ndarray]


def least_squares(count: Count, seed: int) -> None:
    """`minimize` with its method of residuals."""
    function = count.function
    assert function.residuals is not None
    zo.minimize(
        lambda x: (count.value(x), function.residuals(x))[1],
        function.start,
        zo.methods.least_squares(),
        max_evaluations=count.budget,
        key=seed,
        progress=False,
        callback=lambda report: count.finished,
    )


def _other(
    solve: Callable[[Residuals, np.ndarray], Any], count: Count, seed: int
) -> None:
    """A tool that gets residuals until there is nothing left to find or to spend."""
    np.random.seed(seed)  # DFO-LS draws from NumPy's global generator.
    function = count.function
    assert function.residuals is not None
    solve(lambda x: (count.one(x), function.residuals(x))[1], function.start)


def _dfols(fun: Residuals, start: np.ndarray) -> None:
    import dfols

    dfols.solve(fun, start, maxfun=10**5)


# The second is MINPACK's method of Levenberg and Marquardt, as `curve_fit` calls it.
_OTHERS: dict[str, Callable[[Residuals, np.ndarray], Any]] = {
    "dfols": _dfols,
    "leastsq": functools.partial(optimize.leastsq, maxfev=10**6),
    "trf": functools.partial(optimize.least_squares, x_scale="jac", max_nfev=10**4),
}
TOOLS: dict[str, Callable[[Count, int], Any]] = {
    "least_squares": least_squares,
    **{name: functools.partial(_other, solve) for name, solve in _OTHERS.items()},
    "default": default,
}
NAMES = {"least_squares": "`least_squares()`", "dfols": "DFO-LS"}
NAMES |= {"leastsq": "MINPACK", "trf": "SciPy's `trf`", "default": "the default"}


def measures(seeds: Sequence[int], tools: Sequence[str]) -> Iterator[Case]:
    """The rows of the record, before they are measured."""
    problems = [(g, n, f) for g, of in GROUPS.items() for n, f in of.items()]
    for group, name, family in problems:
        for seed in seeds:
            found = family(np.random.default_rng((zlib.crc32(name.encode()), seed)))
            budget = classes.AT[-1] * (found.dimension + 1)
            for tool in tools:
                if tool != "dfols" or importlib.util.find_spec("dfols"):
                    values = (group, name, seed, found.dimension, tool)
                    case = dict(zip(_IDENTITY, values, strict=True))
                    yield (
                        case,
                        functools.partial(measured, found, budget, TOOLS[tool], seed),
                    )


def tables(content: dict[str, Any]) -> list[Table]:
    """Shares of targets that each tool reached, by group."""
    rows = content["rows"]
    caption = (
        "Fits, the share of targets (10⁻¹, 10⁻², 10⁻³, 10⁻⁵ of the gap at the start) "
        "reached within 10 / 30 / 100 (d + 1) evaluations, in percent"
    )
    groups = {name: name for name in GROUPS}
    fields = ("group", "tool")
    return [classes.by_method(caption, rows, groups, classes.cell, fields, NAMES)]


@campaign(__doc__)
@options.listed("--tools", of=NAMES, text="Tools")
@options.listed("--seeds", text="Seeds of the problems", default="0,1,2")
def main(tools: Sequence[str], seeds: Sequence[str]) -> Campaign:
    wanted = measures(list(map(int, seeds)), tools)
    return Campaign(wanted, about=classes.ABOUT, tables=tables)


if __name__ == "__main__":
    main()
