"""R-AdaZO, pycma and Nevergrad on one function, with as many evaluations each.

Each tool has one scale to choose: the learning rate, or the standard deviation at the
start. It gets the better one of two, by the loss, on a seed that the tables do not use;
everything else is the tool's default, or stands in the script. The default method of
`minimize` has nothing to choose. The result of a run is the best of all
points that it has evaluated.
"""

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import click
import cma
import jax
import nevergrad as ng
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from tqdm import tqdm

import radazo_jax as zo
from examples.black_boxes.results import (
    Table,
    mean_std,
    numbers,
    provenance,
    significant,
)

OUTPUT = Path(__file__).resolve().parents[1] / "out" / "black_boxes"
TUNING_SEED = 1000  # The scale is chosen on it; the seeds of the tables are 0, 1, …


class Problem(NamedTuple):
    """A function to minimize, and its start.

    Attributes:
      loss: The function, at the top level of its module, for processes import it.
      params: The starting point.
      estimator: The estimator of R-AdaZO. One object for all runs: what is compiled
        for it is used again.
      rates: The learning rates to choose from.
      sigmas: As many standard deviations for the other tools.
    """

    loss: Callable[[Any], float]
    params: Any
    estimator: zo.GradientEstimator
    rates: Sequence[float]
    sigmas: Sequence[float]


class Run(NamedTuple):
    values: np.ndarray  # Of all evaluations, in their order.
    params: Any  # The best point.


@functools.cache
def decaying(rate: float, steps: int) -> optax.GradientTransformation:
    schedule = optax.linear_schedule(rate, 0.0, steps)
    return zo.radazo(schedule, bias_correction=True)


def radazo(problem: Problem, rate: float, budget: int, seed: int, pool: Any) -> Run:
    steps = max(1, budget // num_evaluations(problem.estimator, problem.params))
    method = decaying(rate, steps), problem.estimator
    train = functools.partial(zo.train, evaluator=zo.external(executor=pool))
    return _run(train, problem, *method, num_steps=steps, key=seed)


def default(problem: Problem, scale: None, budget: int, seed: int, pool: Any) -> Run:
    del scale
    minimize = functools.partial(zo.minimize, executor=pool)
    return _run(minimize, problem, max_evaluations=budget, key=seed)


def _run(
    call: Callable[..., zo.runs.Result], problem: Problem, *args: Any, **options: Any
) -> Run:
    """A run by a function of radazo_jax, given what follows the parameters."""
    values: list[float] = []

    def keep(report: zo.runs.Report) -> None:
        found = report.values
        values.extend(found[~np.isnan(found)])  # Those that were evaluated.

    result = call(
        *(problem.loss, problem.params, *args),
        progress=False,
        callback=keep,
        **options,
    )
    return Run(np.array(values), result.best.params)


def pycma(problem: Problem, sigma: float, budget: int, seed: int, pool: Any) -> Run:
    start, unravel = _flat(problem.params)
    options = {"seed": seed + 1, "verbose": -9, "maxfevals": np.inf}
    search, values = cma.CMAEvolutionStrategy(start, sigma, options), []
    while len(values) < budget:
        points = search.ask()
        found = list(pool.map(problem.loss, map(unravel, points)))
        search.tell(points, found)
        values += found
    return Run(np.array(values), unravel(search.result.xbest))


def nevergrad(problem: Problem, sigma: float, budget: int, seed: int, pool: Any) -> Run:
    start, unravel = _flat(problem.params)
    space = ng.p.Array(init=start).set_mutation(sigma=sigma)
    space.random_state = np.random.RandomState(seed)
    workers = os.cpu_count() or 1
    search, values = ng.optimizers.NGOpt(space, budget, num_workers=workers), []
    best, least = problem.params, np.inf
    while len(values) < budget:
        points = [search.ask() for _ in range(workers)]
        trees = [unravel(point.value) for point in points]
        for point, tree, value in zip(
            points, trees, pool.map(problem.loss, trees), strict=True
        ):
            search.tell(point, value)
            values.append(value)
            if value < least:
                best, least = tree, value
    return Run(np.array(values), best)


METHODS = {
    "R-AdaZO": radazo,
    "default method": default,
    "pycma": pycma,
    "Nevergrad": nevergrad,
}


def _flat(params: Any) -> tuple[np.ndarray, Callable[[np.ndarray], Any]]:
    """The parameters as one vector, and what makes a tree of such a vector."""
    start, unravel = ravel_pytree(params)
    return np.asarray(start, np.float64), lambda x: jax.tree.map(
        np.asarray, unravel(np.asarray(x, np.float32))
    )


@contextmanager
def processes() -> Iterator[Executor]:
    """Processes that do not compete for cores with threads of their own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield pool


def options(evaluations: int, seeds: int) -> Callable[[Callable[..., None]], Any]:
    """The command line of a script, whose function takes the options as attributes."""

    def command(run: Callable[[SimpleNamespace], None]) -> click.Command:
        at_least_one = click.IntRange(1)

        @click.command(context_settings={"show_default": True})
        @click.option("--evaluations", type=at_least_one, default=evaluations)
        @click.option("--seeds", type=at_least_one, default=seeds)
        @click.option("--fast", is_flag=True, help="two seeds, few evaluations")
        @click.option(
            "--output", type=Path, default=OUTPUT, help="folder of the JSON and the PNG"
        )
        @click.option(
            "--again",
            type=click.Choice(list(METHODS)),
            help="run this tool alone, and keep the other ones of the record",
        )
        def main(
            evaluations: int, seeds: int, fast: bool, output: Path, again: str | None
        ) -> None:
            evaluations, seeds = (60, 2) if fast else (evaluations, seeds)
            tools, kept = list(METHODS), {}
            if again is not None:
                path = output / f"{Path(inspect.getfile(run)).stem}.json"
                tools, kept = [again], json.loads(path.read_text(encoding="utf-8"))
                evaluations, seeds = kept["settings"].values()
            given = {"evaluations": evaluations, "seeds": seeds, "output": output}
            run(SimpleNamespace(**given, tools=tools, kept=kept))

        return main

    return command


def num_evaluations(estimator: zo.GradientEstimator, params: Any) -> int:
    """The number of evaluations per step of an estimator."""

    def points(key: jax.Array) -> zo.estimators.Points:
        draw = zo.estimators.Draw.once(key)
        return estimator.points(draw, params, estimator.init(params))[0]

    return jax.eval_shape(points, jax.random.key(0)).num_points


def compare(
    problem: Problem,
    measure: Callable[[Any], dict[str, float]],
    args: SimpleNamespace,
    pool: Executor,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs the tools; returns the record, and the best params of each on seed 0.

    Args:
      problem: The function to minimize.
      measure: A figure of a point, such as its accuracy on held-out data.
      args: The options.
      pool: The executor.
    """
    start = {"loss": problem.loss(problem.params)} | measure(problem.params)
    runs, found = {}, {}
    chosen = (problem.rates, (None,), problem.sigmas, problem.sigmas)
    scales = dict(zip(METHODS, chosen, strict=True))
    total = sum(len(scales[name]) + args.seeds for name in args.tools)
    with tqdm(total=total, unit="run") as bar:
        for name in args.tools:
            method = METHODS[name]

            def run(scale: float, seed: int, name=name, method=method) -> Run:
                bar.set_postfix_str(f"{name}, scale {scale}, seed {seed}")
                result = method(problem, scale, args.evaluations, seed, pool)
                bar.update()
                return result

            tried = [run(s, TUNING_SEED).values.min() for s in scales[name]]
            scale = scales[name][int(np.argmin(tried))]
            seeds = [run(scale, seed) for seed in range(args.seeds)]
            found[name] = seeds[0].params
            least = [np.minimum.accumulate(one.values) for one in seeds]
            runs[name] = {
                "scales": scales[name],
                "tried": tried,
                "scale": scale,
                "evaluations": [len(one.values) for one in seeds],
                "loss": [x[-1] for x in least],
                # A run may end up to a step before the others.
                "curves": [
                    x[np.minimum(_at(args.evaluations), len(x) - 1)] for x in least
                ],
                "measures": [measure(one.params) for one in seeds],
            }
    settings = {"evaluations": args.evaluations, "seeds": args.seeds}
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(problem.params))
    content = {"settings": settings, "dimension": size, "start": start, "runs": runs}
    if args.kept:
        content["runs"] = args.kept["runs"] | runs
        content = args.kept | content
        # What made the tools that were kept.
        content["before"] = {name: args.kept[name] for name in provenance()}
    return numbers(content), found


def _at(evaluations: int) -> np.ndarray:
    """The evaluations at which curves are kept."""
    return np.unique(np.linspace(0, evaluations - 1, min(evaluations, 60)).astype(int))


def table(content: dict[str, Any], caption: str, names: dict[str, str]) -> Table:
    """A row a tool, and one of the start; `names` are measures and their headers."""
    first = content["start"]
    rows = [("at the start", "", *(significant(first[name], 3) for name in names))]
    for method, run in content["runs"].items():
        columns = [
            run["loss"] if name == "loss" else [m[name] for m in run["measures"]]
            for name in names
        ]
        scale = "" if run["scale"] is None else f"{run['scale']:g}"
        rows.append((method, scale, *map(mean_std, columns)))
    settings = content["settings"]
    caption = (
        f"{caption}: {content['dimension']} parameters, {settings['evaluations']:,} "
        f"evaluations, {settings['seeds']} seeds"
    )
    return Table(caption, ("tool", "scale", *names.values()), rows)
