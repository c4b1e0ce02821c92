"""Convergence on four synthetic functions (the paper's figure of that name).

    python -m paper.synthetic

Quadratic, Cubic, Levy and Rosenbrock in 10⁴ dimensions, with the hyperparameters of
the paper's appendix: K=10, η=1e-3, μ=5e-3, β₁=0.9, β₂=0.99. The paper gives
neither the start nor the length of its runs; here they start uniformly in [-1, 1), at
another point for each seed, and take 10,000 steps.

A sixth curve is not in the paper: ZO-AdaMM with η times sqrt((1 + β₁)/(1 − β₁)) = 4.36,
so that its steps are as long as R-AdaZO's.

All methods get the same starts and the same random directions, drawn once for all.
"""

from collections.abc import Sequence
from typing import Any

import click
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import radazo_jax as zo
from common import figures, options
from common.record import array
from common.tables import Table
from paper import common, functions
from paper.common import (
    COLORS,
    DIMENSION,
    LEARNING_RATE,
    NUM_DIRECTIONS,
    SMOOTHING,
    STRETCHED,
)

POINTS = 200  # How many points a curve has, besides the start.


def compare(name: str, dimension: int, steps: int, seeds: int) -> np.ndarray:
    """The gaps of all methods on one function: [methods, seeds, 1 + points]."""
    fun = functions.PROBLEMS[name].fun
    chosen = list(common.optimizers(LEARNING_RATE).values())
    estimator = zo.forward_difference(zo.sphere(), NUM_DIRECTIONS, SMOOTHING)
    # One key for all methods: the same directions, which are drawn only once.
    value_and_grad = jax.vmap(zo.value_and_grad(fun, estimator), in_axes=(None, 0))

    def step(key: jax.Array, t: jax.Array, state: Any) -> tuple[Any, None]:
        params, states = state
        _, grads = value_and_grad(key, params)
        moved, new_states = [], []
        for i, (optimizer, state) in enumerate(zip(chosen, states, strict=True)):
            updates, state = optimizer.update(grads[i], state, params[i])
            moved.append(optax.apply_updates(params[i], updates))
            new_states.append(state)
        return (jnp.stack(moved), tuple(new_states)), None

    keys = jax.vmap(jax.random.split)(common.seed_keys(seeds))
    starts = jax.vmap(lambda key: functions.uniform_start(key, dimension))(keys[:, 0])
    params = jnp.repeat(starts[:, None], len(chosen), axis=1)
    states = tuple(jax.vmap(optimizer.init)(starts) for optimizer in chosen)
    measure = jax.jit(jax.vmap(jax.vmap(fun)))

    chunk = max(1, steps // POINTS)
    curve = [measure(params)]

    def at_chunk(state: Any, out: None) -> str:
        curve.append(measure(state[0]))
        gaps = curve[-1].mean(axis=0)
        return f"R-AdaZO {gaps[0]:.3g}, ZO-AdaMM {gaps[1]:.3g}"

    common.run(step, keys[:, 1], (params, states), steps, chunk, name, at_chunk)
    return np.moveaxis(np.stack(curve), 0, 2).swapaxes(0, 1)


def first_below(gaps: np.ndarray, iterations: np.ndarray, target: float) -> float:
    """The first iteration at which a gap is at the target or below; inf if none."""
    hits = np.flatnonzero(gaps <= target)
    return float(iterations[hits[0]]) if hits.size else np.inf


def iterations_to_match(
    content: dict[str, Any], function: str, method: str
) -> tuple[np.ndarray, float]:
    """Iterations to ZO-AdaMM's final gap, seed by seed; and how many ZO-AdaMM took."""
    iterations = array(content["iterations"])
    gaps = content["gaps"][function]
    targets = array(gaps["ZO-AdaMM"])[:, -1]
    reached = [
        first_below(curve, iterations, target)
        for curve, target in zip(array(gaps[method]), targets, strict=True)
    ]
    return np.asarray(reached), iterations[-1]


def tables(content: dict[str, Any]) -> list[Table]:
    result = []
    for function, gaps in content["gaps"].items():
        rows = []
        for method, curves in gaps.items():
            start, final = array(curves)[:, [0, -1]].T
            diverged = (final > 10 * start).any()
            reached, total = iterations_to_match(content, function, method)
            own = method == "ZO-AdaMM"
            matched = np.isfinite(reached).all()
            rows.append(
                (
                    method,
                    "diverged" if diverged else common.mean_std(final),
                    "" if own else common.mean_std(reached) if matched else "not all",
                    "" if own else f"{total / reached.max():.2f}" if matched else "",
                )
            )
        start = np.mean(array(gaps["R-AdaZO"])[:, 0])
        caption = (
            f"{function}: gap after {content['iterations'][-1]:,} iterations, from "
            f"{start:,.0f}; iterations to ZO-AdaMM's final gap; and how many times "
            "fewer these are, on the worst seed"
        )
        headers = ("method", "final gap", "iterations to match", "times fewer")
        result.append(Table(caption, headers, rows))
    return result


def plot(content: dict[str, Any]) -> plt.Figure:
    """Means over the seeds as lines, their ranges as bands."""
    count = len(content["gaps"])
    figure, [all_axes] = figures.panels(1, count, (2.3 + 3.2 * count, 4.2))
    for axes, (function, gaps) in zip(all_axes, content["gaps"].items(), strict=True):
        limit = 3 * array(gaps["R-AdaZO"])[:, 0].max()
        for method, curves in gaps.items():
            values = array(curves)
            values = np.where(values < 10 * limit, values, np.nan)
            style = {"color": COLORS[method], "label": method}
            dashed = method in (STRETCHED, "ZO-RMSProp")
            style |= {"ls": (0, (4, 2)) if dashed else "-"}
            style |= {"lw": 2.8 if method == "R-AdaZO" else 1.6}
            figures.band(axes, content["iterations"], values, **style)
        axes.set(yscale="log", title=function, xlabel="iterations")
        axes.set_ylim(top=limit)
    all_axes[0].set_ylabel("F(θ) − min F")
    figures.legend(figure, all_axes[0], 6 if count > 2 else 3 if count > 1 else 2)
    return figure


@common.experiment(__doc__, steps=10_000, seeds=5, fast=(40, 2))
@options.listed("--functions", "chosen", of=functions.PROBLEMS, text="Functions")
@click.option("--name", default="synthetic", help="Of the JSON and the PNG.")
def main(size: common.Size, chosen: Sequence[str], name: str) -> None:
    dimension = 200 if size.fast else DIMENSION
    methods, gaps = common.optimizers(LEARNING_RATE), {}
    for function in chosen:
        found = compare(function, dimension, size.steps, size.seeds)
        gaps[function] = dict(zip(methods, found, strict=True))
    points = gaps[chosen[0]]["R-AdaZO"].shape[1]
    content = {
        "settings": common.settings(dimension, size.seeds, b1=0.9, b2=0.99),
        "iterations": np.arange(points) * max(1, size.steps // POINTS),
        "gaps": gaps,
    }
    common.finish(size.output / name, content, tables, plot)


if __name__ == "__main__":
    main()
