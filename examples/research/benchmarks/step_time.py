"""Measures a zeroth-order step in multiples of its evaluations.

On Rosenbrock's function, for every distribution, by forward differences with K = 10
directions and by central ones with K = 5 (one evaluation fewer), the time of a whole
R-AdaZO step (evaluations, estimate, update) is divided, within one run, by the time of

* ``evaluations``: its function evaluations alone, at points that lie ready;
* ``perturbed``: the same evaluations with the directions drawn;

and these times are divided by the time of the step:

* ``naive``: the same step written by hand, with ``jax.random.normal``,
  ``tree_map`` and ``vmap``;
* ``evosax``: Open_ES with a population of 10, which are 5 pairs, and Adam, if it is
  installed.

All JAX runs are scans of many steps in one program, so that no dispatch is timed. A
further table compares ``minimize`` with its progress bar and without.

    python -m benchmarks.step_time --output step_time.json
"""

from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from tabulate import tabulate

import radazo_jax as zo
from benchmarks.timing import (
    Step,
    bars,
    evosax,
    key_of,
    medians,
    naive,
    ours,
    scanned,
)
from common import figures, options
from common.distributions import DISTRIBUTIONS
from common.record import record, write
from paper.functions import rosenbrock

DIMENSIONS = (1_000, 10_000, 100_000, 1_000_000)
POPULATION = 10  # K of forward differences, and twice the K of central ones.
SMOOTHING = 5e-3
LEARNING_RATE = 1e-6
MEASURED = ("sphere", "gaussian", "rademacher", "coordinate")
ESTIMATORS = {"forward": zo.forward_difference, "central": zo.central_difference}


def evaluations_step(points: jax.Array, i: jax.Array) -> jax.Array:
    """Evaluations at points that lie ready; writing them back costs one pass."""
    del i
    return points + 1e-30 * jnp.expand_dims(jax.vmap(rosenbrock)(points), 1)


def perturbed_step(
    distribution: zo.Distribution, num_directions: int, central: bool
) -> Step:
    """The evaluations of a step with their directions drawn, and nothing else."""

    def elements(key: jax.Array, x: jax.Array) -> jax.Array:
        return distribution.materialize(distribution.sample(key, x), x)

    def step(x: jax.Array, i: jax.Array) -> jax.Array:
        keys = jax.random.split(key_of(i), num_directions)
        u = jax.vmap(elements, (0, None))(keys, x)
        values = jax.vmap(rosenbrock)(x + SMOOTHING * u).sum()
        if central:
            values += jax.vmap(rosenbrock)(x - SMOOTHING * u).sum()
        else:
            values += rosenbrock(x)
        return x + 1e-30 * values

    return step


def steps_of_run(dimension: int) -> int:
    """Returns a number of steps that hides the first touch of memory."""
    return max(20, min(2000, 20_000_000 // dimension))


def measure(dimension: int, name: str, repeats: int) -> list[dict[str, Any]]:
    """The rows of one estimator at one dimension."""
    central = name == "central"
    num_directions = POPULATION // 2 if central else POPULATION
    num_steps = steps_of_run(dimension)
    x = jnp.full((dimension,), 0.5)
    optimizer = zo.radazo(LEARNING_RATE)
    start = (x, optimizer.init(x))
    num_evaluations = POPULATION if central else num_directions + 1
    shifts = jnp.linspace(0.0, 1e-3, num_evaluations)
    by_hand = naive(rosenbrock, optimizer, num_directions, SMOOTHING, central, True)
    runs = {
        "evaluations": scanned(evaluations_step, x[None] + shifts[:, None], num_steps),
        "naive": scanned(by_hand, start, num_steps),
    }
    for distribution_name in MEASURED:
        distribution = DISTRIBUTIONS[distribution_name]
        estimator = ESTIMATORS[name](distribution, num_directions, SMOOTHING)
        step = ours(rosenbrock, estimator, optimizer)
        runs[f"step {distribution_name}"] = scanned(step, start, num_steps)
        step = perturbed_step(distribution, num_directions, central)
        runs[f"perturbed {distribution_name}"] = scanned(step, x, num_steps)
    if found := evosax(rosenbrock, x, LEARNING_RATE, POPULATION, SMOOTHING):
        runs["evosax"] = scanned(*found, num_steps)
    seconds = medians(runs, repeats)
    micro = {run: 1e6 * seconds[run] / num_steps for run in runs}
    rows = []
    for distribution_name in MEASURED:
        step = micro[f"step {distribution_name}"]
        row = {
            "d": dimension,
            "estimator": name,
            "K": num_directions,
            "distribution": distribution_name,
            "step_us": step,
            "step/evaluations": step / micro["evaluations"],
            "step/perturbed": step / micro[f"perturbed {distribution_name}"],
            "naive/step": micro["naive"] / step,
        }
        if "evosax" in micro:
            row["evosax/step"] = micro["evosax"] / step
        rows.append(row)
    return rows


def measure_progress(dimension: int, repeats: int) -> dict[str, Any]:
    """``minimize`` with its progress bar against ``minimize`` without."""
    x = jnp.full((dimension,), 0.5)
    optimizer, estimator = zo.radazo(LEARNING_RATE), zo.forward_difference()
    num_steps = 20_000_000 // dimension

    def run(progress: bool) -> Any:
        return zo.minimize(
            rosenbrock,
            x,
            optimizer,
            estimator,
            num_steps=num_steps,
            key=0,
            progress=progress,
        ).params

    runs = {"with": lambda: run(True), "without": lambda: run(False)}
    seconds = medians(runs, repeats)
    ratio = seconds["with"] / seconds["without"]
    return {"d": dimension, "num_steps": num_steps, "with/without": ratio}


def plot(content: dict[str, Any]) -> plt.Figure:
    rows = [row for row in content["rows"] if row["table"] == "steps"]
    named = {
        f"d = {r['d']:.0e}, {r['estimator']}, {r['distribution']}": r for r in rows
    }
    return bars(named, ("naive/step", "evosax/step"))


@options.command(__doc__)
@options.output
@click.option("--repeats", type=options.COUNT, default=7)
def main(output: Path | None, repeats: int) -> None:
    rows = []
    for dimension in DIMENSIONS:
        for name in ESTIMATORS:
            found = measure(dimension, name, repeats)
            print(tabulate(found, headers="keys", floatfmt=".2f"), end="\n\n")
            rows += [{"table": "steps", **row} for row in found]
    progress = measure_progress(10_000, repeats)
    print(tabulate([progress], headers="keys", floatfmt=".3f"))
    if output:
        content = record([*rows, {"table": "progress", **progress}])
        write(output, content)
        figures.save(plot(content), output.with_suffix(".png"))


if __name__ == "__main__":
    main()
