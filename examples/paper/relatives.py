"""R-AdaZO, ZO-AdaMM and ZO-SGD behind each estimator that the paper builds on.

    python examples/paper/relatives.py

The paper says that its rule applies to all of them, and shows the plain differences.
Every run has the same number of evaluations; its result is the loss at the end as a
share of that at the start. Equal η is that of the paper, 1e-3; tuned is the best of a
grid for each pair, on the same seeds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from tqdm import tqdm

import radazo_jax as zo
from examples.common import figures
from examples.common.record import array
from examples.common.tables import Table
from examples.paper import common
from radazo_jax import testing

PROBLEMS = {"Quadratic": testing.quadratic, "Rosenbrock": testing.rosenbrock}
METHODS = ("ZO-SGD", "ZO-AdaMM", "R-AdaZO")
PAPER = 1e-3
RATES = (PAPER, *np.logspace(-4, 0, 9))
DIMENSION = 100
EVALUATIONS = 4400

# About as many evaluations a step for each; the rest are defaults.
ESTIMATORS: dict[str, tuple[Callable[[], zo.GradientEstimator], int]] = {
    "forward_difference": (zo.forward_difference, 11),
    "spsa": (lambda: zo.spsa(5, 5e-4), 10),
    "coordinate_wise": (lambda: zo.coordinate_wise(5), 10),
    "residual_feedback": (lambda: zo.residual_feedback(num_directions=10), 10),
    "variance_reduced": (lambda: zo.variance_reduced(num_directions=5), 12),
    "prior_guided": (lambda: zo.prior_guided(num_directions=9), 11),
    "query_reuse": (zo.query_reuse, 10),
    "linear_interpolation": (zo.linear_interpolation, 11),
    "gaussian_process": (lambda: zo.gaussian_process(memory=100), 11),
    "majority_vote": (zo.majority_vote, 11),
    "momentum_perturbation": (zo.momentum_perturbation, 2),
}


def losses(
    problem: Callable[[jax.Array], jax.Array],
    estimator: zo.GradientEstimator,
    method: str,
    steps: int,
    seeds: int,
) -> np.ndarray:
    """The last loss over the first: [rates, seeds]."""

    def run(rate: jax.Array, key: jax.Array) -> jax.Array:
        start_key, run_key = jax.random.split(key)
        params = testing.uniform_start(start_key, DIMENSION)
        optimizer = common.METHODS[method](rate)

        def step(carry: Any, t: jax.Array) -> tuple[Any, None]:
            params, state, memory = carry
            (_, gradient), memory = estimator.estimate(
                problem, jax.random.fold_in(run_key, t), params, memory
            )
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state, memory), None

        carry = params, optimizer.init(params), estimator.init(params)
        (last, *_), _ = jax.lax.scan(step, carry, jnp.arange(steps, dtype="uint32"))
        return problem(last) / problem(params)

    both = jax.vmap(jax.vmap(run, (None, 0)), (0, None))
    return np.asarray(jax.jit(both)(jnp.asarray(RATES), common.seed_keys(seeds)))


def tables(content: dict[str, Any]) -> list[Table]:
    """One for each problem: at equal η, and at the best."""
    result = []
    for problem, estimators in content["losses"].items():
        rows = []
        for name, methods in estimators.items():
            means = {m: mean(methods[m]) for m in METHODS}
            equal = [_shown(means[m][0]) for m in METHODS]
            tuned = [_shown(means[m][1:].min()) for m in METHODS]
            rows.append((f"`{name}`", *equal, *tuned))
        caption = (
            f"{problem}, d = {DIMENSION}, {content['settings']['evaluations']:,} "
            "evaluations: the loss over that at the start, with η = 0.001 and with the "
            "best η; ∞ is above the start"
        )
        headers = ["estimator", *METHODS, *(f"{m}, tuned" for m in METHODS)]
        result.append(Table(caption, headers, rows))
    return result


def mean(runs: Any) -> np.ndarray:
    """Over seeds, infinite where one ends above its start: [rates]."""
    found = array(runs)
    return np.where(found <= 1, found, np.inf).mean(axis=1)


def _shown(loss: float) -> str:
    return common.significant(loss, 2)


def plot(content: dict[str, Any]) -> plt.Figure:
    """The loss at the end by estimator and method, at equal η and tuned."""
    problems = content["losses"]
    figure, all_axes = figures.panels(len(problems), 2, (10, 3.2 * len(problems)))
    for row, (problem, estimators) in zip(all_axes, problems.items(), strict=True):
        for axes, tuned in zip(row, (False, True), strict=True):
            for method in METHODS:
                means = [mean(runs[method]) for runs in estimators.values()]
                best = [m[1:].min() if tuned else m[0] for m in means]
                color = common.COLORS[method]
                axes.plot(best, range(len(best)), "o", color=color, label=method)
            axes.set_yticks(range(len(estimators)), estimators, fontsize=7)
            axes.set(
                xscale="log", title=f"{problem}, {'best η' if tuned else 'η = 0.001'}"
            )
            axes.invert_yaxis()
    all_axes[0, 0].legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__, steps=EVALUATIONS, seeds=3, fast=(110, 2))
    args = common.parse(parser, argv)
    found: dict[str, Any] = {}
    some = list(ESTIMATORS.items())[: 2 if args.fast else None]
    for problem, fun in PROBLEMS.items():
        for name, (make, each) in tqdm(some, desc=problem, unit="estimator"):
            steps = max(1, args.steps // each)
            runs = {m: losses(fun, make(), m, steps, args.seeds) for m in METHODS}
            found.setdefault(problem, {})[name] = runs
    settings = {"evaluations": args.steps, "seeds": args.seeds, "rates": list(RATES)}
    content = {"settings": settings, "losses": found}
    common.finish(args.output / "relatives", content, tables, plot)


if __name__ == "__main__":
    main()
