"""Functions of few parameters, with and without bounds, and the tools for them.

    python -m board.few --output records/board/few.json

The functions are CUTEst's of at most 20 parameters, as sif2jax has them, with and
without noise, and the paper's in boxes that cut their minimum off. All methods call the
same NumPy function. A row of the record is a method on a problem: the evaluations until
10⁻¹, 10⁻³ and 10⁻⁵ of the gap at the start are left, in a budget of 200 (d + 1). The
record is written after each row, and `--resume` continues it.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

import radazo_jax as zo
from board import report
from board.oracle import Finished, Oracle
from board.problems import Case, Problem, Row
from common import options
from common.record import collect, numbers
from common.tables import Table
from paper import functions

MOST = 20  # Parameters.
BUDGET = 200  # In units of d + 1.
AT = (5, 10, 20, 30, 50, 100, 200)  # Budgets of the tables.
TARGETS = (1e-1, 1e-3, 1e-5)
KINDS = {
    "CUTEst": "Without bounds",
    "Bounded": "With bounds",
    "Boxed": "The paper's functions in boxes that cut their minimum off",
    "Noisy": "Without bounds, with noise of 1 % of the gap at the start",
}
NOISE = 0.01  # A standard deviation, as a share of the gap at the start.
_BOXED = (2, 5, 10, 20)  # The dimensions of the paper's functions.
_SEED = 2026


def cases() -> list[Case]:
    """All problems: CUTEst's, with and without bounds, and the paper's in boxes."""
    import sif2jax

    found = [
        Case(kind, type(problem).__name__, problem.y0.size, make)
        for kind, problems in (
            ("CUTEst", sif2jax.unconstrained_minimisation_problems),
            ("Bounded", sif2jax.bounded_minimisation_problems),
        )
        for problem in problems
        if problem.y0.size <= MOST
        for make in [functools.partial(_of_sif2jax, problem)]
    ]
    exact = [case for case in found if case.kind == "CUTEst"]
    found += [
        case._replace(kind="Noisy", make=functools.partial(_noisy, case.make))
        for case in exact
    ]
    for name, (fun, at) in functions.PROBLEMS.items():
        for d in _BOXED:
            make = functools.partial(_boxed, fun, at, d)
            found.append(Case("Boxed", name, d, make))
    return sorted(found, key=lambda case: case.dimension)


def _of_sif2jax(problem: Any) -> Problem:
    def fun(theta: jax.Array) -> jax.Array:
        shaped = theta.reshape(problem.y0.shape)
        return jnp.asarray(problem.objective(shaped, problem.args)).reshape(())

    start = np.asarray(problem.y0, np.float64).ravel()
    bounds = None
    if getattr(problem, "bounds", None) is not None:
        lower, upper = (
            np.broadcast_to(np.asarray(bound, np.float64), start.shape)
            for bound in problem.bounds
        )
        bounds = lower, upper
    return _built(fun, start, bounds)


def _noisy(make: Callable[[], Problem]) -> Problem:
    problem = make()
    return dataclasses.replace(problem, noise=NOISE * problem.gap)


def _boxed(
    fun: Callable[[jax.Array], jax.Array], minimizer: float, dimension: int
) -> Problem:
    """A function in a box whose bounds exclude the minimum in half of the parameters.

    The box ends between start and minimum there, and is wide in the others.
    """
    start = np.asarray(
        functions.uniform_start(jax.random.key(_SEED), dimension), np.float64
    )
    far = start - minimizer
    cut = np.arange(dimension) % 2 == 0
    end = minimizer + 0.3 * far  # A third of the way from the minimum.
    wide = 2 * np.abs(far) + 1
    lower = np.where(cut & (far > 0), end, minimizer - wide)
    upper = np.where(cut & (far <= 0), end, minimizer + wide)
    return _built(fun, np.clip(start, lower, upper), (lower, upper))


def _built(
    fun: Callable[[jax.Array], jax.Array],
    start: np.ndarray,
    bounds: tuple[np.ndarray, np.ndarray] | None,
) -> Problem:
    """A problem whose least value exact gradients reach from its start."""
    if bounds is not None:
        start = np.clip(start, *bounds)
    value, exact = jax.jit(fun), jax.jit(jax.value_and_grad(fun))

    def with_gradient(theta: np.ndarray) -> tuple[float, np.ndarray]:
        found = exact(theta)
        return float(found[0]), np.asarray(found[1], np.float64)

    def evaluate(points: np.ndarray) -> np.ndarray:
        return np.array([float(value(np.asarray(x, np.float64))) for x in points])

    box = None if bounds is None else np.stack(bounds, axis=1)
    first, at = float(value(start)), start
    least = first
    options: dict[str, Any]
    for name, options in (
        ("L-BFGS-B", {"maxiter": 3000, "maxfun": 6000, "ftol": 1e-15, "gtol": 1e-12}),
        ("L-BFGS-B", {"maxiter": 3000, "maxfun": 6000, "ftol": 1e-16, "gtol": 1e-13}),
        ("BFGS" if box is None else "TNC", {}),
    ):
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = minimize(
                with_gradient, at, jac=True, method=name, bounds=box, options=options
            )
            if found.fun < least:
                least, at = float(found.fun), found.x
    distance = float(np.sqrt(np.mean((at - start) ** 2)))
    slope = float(np.sum(with_gradient(start)[1] ** 2))
    gap = first - least
    return Problem(start, evaluate, None, least, distance, gap, slope, bounds=bounds)


def default(problem: Problem, oracle: Oracle, batched: bool = False) -> None:
    """`minimize_black_box` with neither an optimizer nor an estimator.

    With `batched`, all points of a step are evaluated at once.
    """

    def values(points: np.ndarray) -> list[float]:
        return [oracle.one(x) for x in points]

    with contextlib.suppress(zo.RunError, Finished):
        zo.minimize_black_box(
            values if batched else oracle.one,
            problem.start,
            max_evaluations=oracle.budget,
            bounds=problem.bounds,
            batched=batched,
            progress=False,
            callback=lambda report: oracle.finished,
        )


def scipy(problem: Problem, oracle: Oracle, method: str) -> None:
    """A method of SciPy, as it is."""
    box = None if problem.bounds is None else np.stack(problem.bounds, axis=1)
    most = {"maxiter": 10**6}
    if method != "COBYQA":
        most = {"maxfun" if method == "L-BFGS-B" else "maxfev": 10**7, **most}
    else:
        most = {"maxfev": oracle.budget, **most}

    with contextlib.suppress(Finished):
        minimize(oracle.one, problem.start, method=method, bounds=box, options=most)


class Free(NamedTuple):
    """A problem of the parameters whose bounds differ, for tools that need it.

    Attributes:
      start: The start of the methods, [free].
      lower: Their lower bounds, [free].
      upper: Their upper bounds, [free].
      fun: Their function.
    """

    start: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    fun: Callable[[np.ndarray], float]

    @classmethod
    def of(cls, problem: Problem, oracle: Oracle) -> "Free":
        infinite = np.full(problem.dimension, np.inf)
        lower, upper = problem.bounds or (-infinite, infinite)
        free = lower < upper

        def fun(theta: np.ndarray) -> float:
            point = problem.start.copy()
            point[free] = np.clip(theta, lower[free], upper[free])
            return oracle.one(point)

        return cls(problem.start[free], lower[free], upper[free], fun)


def cma(problem: Problem, oracle: Oracle) -> None:
    """pycma, whose first standard deviation is 0.5, at most a quarter of the box."""
    import cma

    start, lower, upper, fun = Free.of(problem, oracle)
    scale = float(min(0.5, np.min(upper - lower) / 4))
    options: dict[str, Any] = {"seed": 1, "verbose": -9, "maxfevals": np.inf}
    if len(start) == 1:  # pycma needs two parameters.
        start, lower, upper = (np.repeat(x, 2) for x in (start, lower, upper))
    if problem.bounds is not None:
        options["bounds"] = [list(lower), list(upper)]
    search = cma.CMAEvolutionStrategy(start, scale, options)
    with contextlib.suppress(Finished):
        while not search.stop():
            points = search.ask()
            one = problem.dimension == 1
            search.tell(points, [fun(x[:1] if one else x) for x in points])


def nevergrad(problem: Problem, oracle: Oracle) -> None:
    """NGOpt, which knows the budget and chooses the method."""
    import nevergrad as ng

    start, lower, upper, fun = Free.of(problem, oracle)
    space = ng.p.Array(init=start)
    if np.isfinite(upper - lower).all():
        space.set_bounds(lower, upper)
    space.random_state = np.random.RandomState(0)
    search = ng.optimizers.NGOpt(space, oracle.budget)
    with contextlib.suppress(Finished):
        while True:
            point = search.ask()
            search.tell(point, fun(point.value))


class Method(NamedTuple):
    """A tool, and the kinds of problems on which it is run."""

    run: Callable[[Problem, Oracle], None]
    kinds: tuple[str, ...] = tuple(KINDS)


DEFAULT = "radazo_jax"
METHODS = {
    DEFAULT: Method(default),
    "radazo_jax, all points at once": Method(functools.partial(default, batched=True)),
    "L-BFGS-B": Method(functools.partial(scipy, method="L-BFGS-B")),
    "Nelder-Mead": Method(functools.partial(scipy, method="Nelder-Mead")),
    "CMA": Method(cma),
    "COBYQA": Method(functools.partial(scipy, method="COBYQA")),
    "NGOpt": Method(nevergrad, ("Bounded", "Boxed")),
}


def measures(kinds: Sequence[str], names: Sequence[str]) -> Iterator[Row]:
    """The rows of the record: one method after another."""
    built = [(case, functools.cache(case.make)) for case in cases()]
    for name in names:
        for case, make in built:
            if case.kind in kinds and case.kind in METHODS[name].kinds:
                row = {"kind": case.kind, "problem": case.name}
                row |= {"dimension": case.dimension, "method": name}
                yield row, functools.partial(_measured, make, METHODS[name])


def _measured(make: Callable[[], Problem], method: Method) -> dict[str, Any]:
    problem = make()
    if not problem.gap > 0:
        return {"evaluations": None, "gap": None, "outside": 0}
    oracle = Oracle(problem, BUDGET * (problem.dimension + 1), targets=TARGETS)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        method.run(problem, oracle)
    found = {"evaluations": oracle.reached, "gap": oracle.gap}
    return numbers(found | {"outside": oracle.outside})


def tables(content: dict[str, Any]) -> list[Table]:
    """A table for each kind of problems: shares of targets within budgets."""
    found = []
    # Some problems start at their minimum.
    measured = [row for row in content["rows"] if row["evaluations"] is not None]
    for kind in KINDS:
        of_methods = report.runs(measured, [kind])
        if of_methods:
            rows = [
                (name, str(len(runs.names)), *(f"{x:.0%}" for x in runs.shares(AT)))
                for name, runs in of_methods.items()
            ]
            caption = (
                f"{KINDS[kind]}: the share of targets (10⁻¹, 10⁻³, 10⁻⁵ of the gap at "
                "the start) reached within so many times d + 1 evaluations"
            )
            heads = ("method", "problems", *(f"≤ {k}" for k in AT))
            found.append(Table(caption, heads, rows))
    return found


@options.command(__doc__)
@options.some("--kinds", of=KINDS, text="Kinds of problems")
@options.some("--methods", of=METHODS, text="Methods")
@options.output
@options.resume
def main(
    kinds: Sequence[str], methods: Sequence[str], output: Path | None, resume: bool
) -> None:
    about = {"settings": {"budget": BUDGET, "targets": TARGETS}}
    with jax.enable_x64(True):
        rows = measures(kinds, methods)
        made = collect(output, resume, rows, lambda rows: rows, **about)
    for table in tables({"rows": made}):
        print(table.caption, table.format(), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
