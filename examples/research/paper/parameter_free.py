"""No learning rate, and directions without replacement (not in the paper).

    python -m paper.parameter_free
    python -m paper.parameter_free --long

Steps whose size is found from values that are there anyway, against the best of eleven
learning rates of `tuned.py`, on its problems and to its targets; and, with `--long`,
against R-AdaZO with the paper's η after 10,000 iterations of `synthetic.py`. Nothing
is searched for or set: K=10 and μ=5e-3 are the paper's. Seeds have the starts of those
modules, whose records in `records/evidence` are what is compared with.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import radazo_jax as zo
from common import RECORDS, figures
from common.record import array, read
from common.tables import Table
from paper import common, functions, synthetic, tuned

NUM_DIRECTIONS = 10  # K
SMOOTHING = 5e-3  # μ
LONG = {"Quadratic": 2500, "Cubic": 2500, "Levy": 5000, "Rosenbrock": 4500}
LONG_METHODS = "SGD, orthonormal", "SGD, accelerated"
TUNED = "ZO-AdaMM, β₁=0.9"


class Method(NamedTuple):
    """An estimator, an optimizer and a search that need no learning rate."""

    estimator: zo.GradientEstimator
    optimizer: optax.GradientTransformation
    search: zo.search.Search
    more: int = 0  # Evaluations a step, besides the K + 1 of the estimate.

    def count(self, steps: np.ndarray) -> np.ndarray:
        """Evaluations in so many steps."""
        return steps * (NUM_DIRECTIONS + 1 + self.more)


INDEPENDENT = zo.forward_difference(zo.sphere(), NUM_DIRECTIONS, SMOOTHING)
ORTHONORMAL = zo.forward_difference(zo.orthonormal(), NUM_DIRECTIONS, SMOOTHING)
SGD, PARABOLIC = optax.sgd(1.0), zo.search.parabolic()
METHODS = {
    "SGD, independent": Method(INDEPENDENT, SGD, PARABOLIC),
    "SGD, orthonormal": Method(ORTHONORMAL, SGD, PARABOLIC),
    "SGD, accelerated": Method(zo.accelerated(ORTHONORMAL), SGD, PARABOLIC, more=1),
    "R-AdaZO, orthonormal": Method(
        ORTHONORMAL,
        zo.radazo(1.0),
        zo.search.parabolic(extra_evaluations=1),
        more=1,
    ),
}


def first_steps(
    label: str,
    problem: tuned.Problem,
    method: Method,
    targets: np.ndarray,
    steps: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Steps until the loss is first at the targets [seeds, targets]; the last losses.

    Args:
      label: Text before the bar.
      problem: The problem.
      method: The method.
      targets: Losses, [seeds, targets].
      steps: Largest number of steps.
    """
    solver = zo.solver(problem.loss, method.optimizer, method.estimator, method.search)

    def start(key: jax.Array, targets: jax.Array) -> Any:
        start_key, run_key = jax.random.split(key)
        params = problem.init(start_key)
        never = jnp.full(targets.shape, jnp.inf)
        return solver.init(params, run_key), targets, never, problem.full_loss(params)

    def step(key: jax.Array, t: jax.Array, state: Any) -> tuple[Any, None]:
        before, targets, reached, loss = state
        after, info = solver.step(before, problem.sample(key))
        seen = info.value
        first = jnp.minimum(reached, t.astype(jnp.float32))
        reached = jnp.where(seen <= targets, first, reached)
        loss = jnp.where(jnp.isinf(seen), loss, seen)
        return (after, targets, reached, loss), None

    def report(state: Any, out: None) -> str:
        return f"loss {np.mean(state[3]):.3g}"

    keys = common.seed_keys(len(targets))
    states = jax.jit(jax.vmap(start))(keys, jnp.asarray(targets, jnp.float32))
    chunk = max(1, steps // 20)
    state, _ = common.run(step, keys, states, steps, chunk, label, report)
    return np.asarray(state[2]), np.asarray(state[3])


def against_tuned(size: common.Size, names: Sequence[str]) -> dict[str, Any]:
    """The problems of `tuned.py`; by default, all."""
    record = read(RECORDS / "evidence/tuned.json")["problems"]
    dimension = 100 if size.fast else tuned.DIMENSION
    found = {}
    some = ("Quadratic",) if size.fast else tuned.FUNCTIONS
    for name in names or some:
        problem = tuned.problems(dimension)[name]
        steps = max(1, size.steps * problem.steps // 1000)
        starts = [
            problem.full_loss(problem.init(jax.random.split(key)[0]))
            for key in common.seed_keys(size.seeds)
        ]
        targets = np.outer(starts, problem.targets)
        runs = {
            label: first_steps(f"{name}, {label}", problem, method, targets, steps)[0]
            for label, method in METHODS.items()
        }
        best = [tuned.best(record[name], TUNED, i) for i in range(2)]
        found[name] = {
            "targets": problem.targets,
            "max_steps": steps,
            "tuned": None if size.fast else [one.evaluations.mean() for one in best],
            "runs": {
                label: {"steps": reached, "evaluations": METHODS[label].count(reached)}
                for label, reached in runs.items()
            },
        }
    return found


def against_the_paper(size: common.Size) -> dict[str, Any]:
    """Iterations to the loss of R-AdaZO after 10,000, with the paper's η."""
    record = read(RECORDS / "evidence/synthetic.json")["gaps"]
    found: dict[str, Any] = {}
    for name, fun in functions.PROBLEMS.items():
        gaps = array(record[name]["R-AdaZO"])[: size.seeds, -1:]
        problem = tuned.Problem(
            init=lambda key: functions.uniform_start(key, synthetic.DIMENSION),
            loss=lambda params, batch, fun=fun.fun: fun(params),
            sample=lambda key: (),
            full_loss=fun.fun,
            every=1,
            targets=(0.0, 0.0),
            curvature=1.0,
            steps=LONG[name],
        )
        steps = max(1, size.steps * problem.steps // 1000)
        found[name] = {"target": gaps[:, 0], "runs": {}}
        for label in LONG_METHODS:
            method, shown = METHODS[label], f"{name}, {label}, d = 10⁴"
            reached, last = first_steps(shown, problem, method, gaps, steps)
            run = {"iterations": reached[:, 0], "last": last}
            found[name]["runs"][label] = run
    return found


def labels(problems: dict[str, Any]) -> list[str]:
    """The methods that ran."""
    return list(next(iter(problems.values()))["runs"])


def tables(content: dict[str, Any]) -> list[Table]:
    if "long" in content:
        return [_long_table(content["long"])]
    rows = []
    for name, problem in content["problems"].items():
        for i, target in enumerate(problem["targets"]):
            best = problem["tuned"] and problem["tuned"][i]
            row = [name, f"{target:.0%}", f"{best:,.0f}" if best else ""]
            for run in problem["runs"].values():
                counts = array(run["evaluations"])[:, i]
                ratio = counts.mean() / best if best else np.inf
                row.append(_mean_where_all_arrived(counts))
                row.append(f"{ratio:.2f}" if np.isfinite(ratio) else "")
            rows.append(tuple(row))
    headers = ["problem", "target", "tuned ZO-AdaMM"]
    for label in labels(content["problems"]):
        headers += [label, "ratio"]
    table = Table(
        "Evaluations to fractions of the loss at the start, without a learning rate, "
        "and as a ratio to ZO-AdaMM (β₁=0.9) at the best of eleven rates",
        headers,
        rows,
    )
    return [table]


def _mean_where_all_arrived(counts: np.ndarray) -> str:
    return common.mean_std(counts) if np.isfinite(counts).all() else "not all"


def _long_table(runs: dict[str, Any]) -> Table:
    rows = []
    for name, found in runs.items():
        for label, run in found["runs"].items():
            shown = _mean_where_all_arrived(array(run["iterations"]))
            gaps = common.mean_std(found["target"]), common.mean_std(run["last"])
            rows.append((name, gaps[0], label, shown, gaps[1]))
    headers = ["function", "R-AdaZO's gap after 10,000", "method"]
    headers += ["iterations to it", "last gap"]
    return Table(
        "Iterations without a learning rate to the gap of R-AdaZO with the paper's η "
        "after 10,000; d = 10,000",
        headers,
        rows,
    )


def plot(content: dict[str, Any]) -> plt.Figure:
    """The ratios of the first table; below 1, nothing to tune needs fewer."""
    figure, all_axes = figures.panels(1, 1, (9, 4.2))
    axes = all_axes[0, 0]
    if "long" in content:
        for i, found in enumerate(content["long"].values()):
            for color, (label, run) in zip(
                common.COLORS.values(), found["runs"].items(), strict=False
            ):
                there = run["iterations"]
                label = None if i else label  # Once in the legend.
                axes.plot([i] * len(there), there, "o", color=color, label=label)
        axes.legend(frameon=False)
        axes.set_xticks(range(len(content["long"])), content["long"])
        axes.set(ylabel="iterations", ylim=(0, None))
        return figure
    ticks = []
    for name, problem in content["problems"].items():
        for i, target in enumerate(problem["targets"]):
            ticks.append(f"{name}\n{target:.0%}")
            best = problem["tuned"][i] if problem["tuned"] else 1.0
            colors = zip(common.COLORS.values(), problem["runs"].values(), strict=False)
            for color, run in colors:
                counts = array(run["evaluations"])[:, i]
                here = np.full(len(counts), len(ticks) - 1)
                axes.plot(here, counts / best, "o", color=color, ms=4)
    found = labels(content["problems"])
    for color, label in zip(common.COLORS.values(), found, strict=False):
        axes.plot([], [], "o", color=color, label=label)
    axes.axhline(1, color="#777777", lw=0.8)
    axes.set(yscale="log", ylabel="evaluations / tuned ZO-AdaMM")
    axes.set_xticks(range(len(ticks)), ticks, fontsize=7)
    axes.legend(frameon=False)
    return figure


@common.experiment(__doc__, steps=1000, seeds=5, fast=(10, 2))
@click.option("--long", is_flag=True, help="Runs in 10⁴ dimensions.")
@click.option(
    "--problems",
    type=click.Choice(list(tuned.FUNCTIONS)),
    multiple=True,
    help="By default, all; can be repeated.",
)
@click.option("--name", help="Of the JSON and the PNG.")
def main(
    size: common.Size, long: bool, problems: Sequence[str], name: str | None
) -> None:
    content = {
        "settings": {
            "num_directions": NUM_DIRECTIONS,
            "smoothing": SMOOTHING,
            "seeds": size.seeds,
        },
    }
    if long:
        content["long"] = against_the_paper(size)
    else:
        content["problems"] = against_tuned(size, problems)
    name = name or f"parameter_free{'_long' if long else ''}"
    common.finish(size.output / name, content, tables, plot)


if __name__ == "__main__":
    main()
