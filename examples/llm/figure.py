"""The paper's figure of language models, at a size that a laptop can run.

"Training loss comparison": R-AdaZO, ZO-AdaMM and ZO-RMSProp with adapters (a) and with
all parameters (b), at the paper's η; each at its own η (c); β₁ of R-AdaZO (d).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from tabulate import tabulate

from examples.llm import train
from examples.llm.data import Batch
from examples.llm.model import OPT
from examples.paper import common

METHODS = {"radazo": "R-AdaZO", "zo_adamm": "ZO-AdaMM", "zo_rmsprop": "ZO-RMSProp"}
BETA_COLORS = ("#56B4E9", "#E69F00", "#CC79A7", "#D55E00")
TUNES = {"lora": "LoRA", "full": "all parameters"}
BETAS = (0.0, 0.5, 0.7, 0.9)
GRID_FACTOR = 4.0  # About what the steps of R-AdaZO and ZO-AdaMM differ by.

CURVES = ("step", "train_loss", "train_accuracy", "dev_accuracy")

Run = dict[str, Any]  # Settings that tell runs apart, and the curves.


class Plan(NamedTuple):
    """How much of everything."""

    steps: dict[str, int]  # By what is tuned.
    points: int  # Of a curve, the first left out.
    seeds: int
    max_rates: int  # Of a method's grid of η.


FULL = Plan({"lora": 300, "full": 150}, points=10, seeds=3, max_rates=6)
FAST = Plan({"lora": 6, "full": 6}, points=2, seeds=2, max_rates=2)


class Problem(NamedTuple):
    make_model: Callable[[], OPT]  # A new one for each run, which consumes it.
    train: Batch
    dev: Batch


def compare(plan: Plan, problem: Problem) -> list[Run]:
    """All runs of the figure, none of them twice."""
    done: dict[train.Settings, Run] = {}

    def run(seed: int = 0, **options: Any) -> Run:
        steps = plan.steps[options["tune"]]
        every = max(1, steps // plan.points)
        settings = train.Settings(
            num_steps=steps, eval_every=every, seed=seed, **options
        )
        if settings not in done:
            done[settings] = _run(settings, problem)
        return done[settings]

    seeds = range(plan.seeds)
    for tune in TUNES:
        for method in METHODS:
            for seed in seeds:
                run(seed, tune=tune, method=method)
            rate = best_rate(run, tune, method, plan.max_rates)
            for seed in seeds:
                run(seed, tune=tune, method=method, learning_rate=rate)
    for b1 in BETAS:
        for seed in seeds:
            run(seed, tune="lora", method="radazo", b1=b1)
    return list(done.values())


def best_rate(run: Callable[..., Run], tune: str, method: str, max_rates: int) -> float:
    """By the final training loss of seed 0: up from the paper's η while it falls."""
    best_rate, best_loss = math.nan, math.inf
    for i in range(max_rates):
        rate = train.Settings.learning_rate * GRID_FACTOR**i
        loss = run(tune=tune, method=method, learning_rate=rate)["train_loss"][-1]
        if not loss < best_loss:
            break
        best_rate, best_loss = rate, loss
    return best_rate


def _run(settings: train.Settings, problem: Problem) -> Run:
    name = METHODS[settings.method]
    label = (
        f"{TUNES[settings.tune]}, {name}, η={settings.learning_rate:.3g}, "
        f"β₁={settings.b1:g}, seed {settings.seed}"
    )
    result: Run = {
        "tune": settings.tune,
        "method": name,
        "b1": settings.b1,
        "learning_rate": settings.learning_rate,
        "seed": settings.seed,
    }
    try:
        evaluations = train.run(
            settings, problem.make_model(), problem.train, problem.dev, label=label
        ).evaluations
    except FloatingPointError:  # Diverged: what it reached before is of no use.
        steps = range(0, settings.num_steps + 1, settings.eval_every)
        evaluations = [dict.fromkeys(CURVES, math.inf) | {"step": i} for i in steps]
    return result | {name: [e[name] for e in evaluations] for name in CURVES}


def select(runs: Sequence[Run], **wanted: Any) -> list[Run]:
    return [
        run
        for run in runs
        if all(
            np.isclose(run[k], v) if isinstance(v, float) else run[k] == v
            for k, v in wanted.items()
        )
    ]


class Group(NamedTuple):
    """The seeds of one method in one setting."""

    name: str
    learning_rate: float
    steps: np.ndarray  # [points]
    losses: np.ndarray  # [seeds, points]
    accuracies: np.ndarray  # [seeds], on the examples held back, in the end.


def group(runs: Sequence[Run], **wanted: Any) -> Group:
    found = select(runs, **wanted)
    return Group(
        found[0]["method"],
        found[0]["learning_rate"],
        np.asarray(found[0]["step"]),
        common.array([run["train_loss"] for run in found]),
        common.array([run["dev_accuracy"][-1] for run in found]),
    )


def equal_rates(runs: Sequence[Run], tune: str) -> list[Group]:
    """Each method at the paper's η."""
    rate = train.Settings.learning_rate
    return [
        group(runs, tune=tune, method=name, b1=0.9, learning_rate=rate)
        for name in METHODS.values()
    ]


def tuned_rates(runs: Sequence[Run], tune: str) -> list[Group]:
    """Each method at its best η, which is the one that all seeds were run at."""
    result = []
    for name in METHODS.values():
        grid = select(runs, tune=tune, method=name, b1=0.9, seed=0)
        best = grid[int(common.array([run["train_loss"][-1] for run in grid]).argmin())]
        rate = best["learning_rate"]
        result.append(group(runs, tune=tune, method=name, b1=0.9, learning_rate=rate))
    return result


def betas(runs: Sequence[Run]) -> list[Group]:
    rate = train.Settings.learning_rate
    return [
        group(runs, tune="lora", method="R-AdaZO", b1=b1, learning_rate=rate)
        for b1 in BETAS
    ]


def steps_to(found: Group, losses: np.ndarray) -> np.ndarray:
    """Steps [seeds] until the loss is as low as `losses` [seeds], inf if never.

    Between two evaluations the loss is taken for a straight line.
    """
    result = np.full(len(losses), np.inf)
    for seed, (curve, loss) in enumerate(zip(found.losses, losses, strict=True)):
        below = np.flatnonzero(curve <= loss)
        if below.size:
            i = below[0]
            ends = slice(max(i - 1, 0), i + 1)
            # np.interp wants the x ascending, and the losses fall.
            result[seed] = np.interp(-loss, -curve[ends], found.steps[ends])
    return result


def rows(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """The tables of the docs, and those that are printed."""
    for kind, groups in (("equal", equal_rates), ("tuned", tuned_rates)):
        for tune, title in TUNES.items():
            found = groups(runs, tune)
            other = next(g for g in found if g.name == "ZO-AdaMM")
            for one in found:
                yield {"table": kind, "tuned": title} | _row(one, other)
    slowest = betas(runs)[0]
    for b1, one in zip(BETAS, betas(runs), strict=True):
        yield {"table": "b1", "β₁": f"{b1:g}"} | _row(one, slowest)
    for tune, title in TUNES.items():
        for name in METHODS.values():
            for run in select(runs, tune=tune, method=name, b1=0.9, seed=0):
                yield {
                    "table": "grid",
                    "tuned": title,
                    "method": name,
                    "η": _rate(run["learning_rate"]),
                    "final_loss": _shown(run["train_loss"][-1]),
                }


def _row(one: Group, other: Group) -> dict[str, Any]:
    """`other` is whose final loss is to be reached."""
    reached, last = steps_to(one, other.losses[:, -1]), one.steps[-1]
    matched, fewer = "", ""
    if one.name != other.name or one.losses[0, -1] != other.losses[0, -1]:
        matched = "not all"
        if np.isfinite(reached).all() and (reached > 0).all():
            matched = f"{reached.mean():.0f}"
            fewer = f"{(last / reached).min():.2f}"
    return {
        "method": one.name,
        "η": _rate(one.learning_rate),
        "first_loss": f"{one.losses[:, 0].mean():.4f}",
        "final_loss": _mean_std(one.losses[:, -1], 4),
        "dev_accuracy": _mean_std(100 * one.accuracies, 1) + " %",
        "steps": f"{last:,}",
        "steps_to_match": matched,
        "times_fewer": fewer,
    }


def _rate(value: float) -> str:
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _shown(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.4f}"


def _mean_std(values: np.ndarray, digits: int) -> str:
    std = values.std(ddof=1) if len(values) > 1 else 0.0
    return f"{values.mean():.{digits}f} ± {std:.{digits}f}"


CAPTIONS = {
    "equal": "At the paper's η, the same for all methods",
    "tuned": "Each method at its own η",
    "b1": "R-AdaZO with adapters at the paper's η, by β₁ (to match: that of β₁ = 0)",
    "grid": "How the η of each method was found: seed 0",
}


def printed(rows: Sequence[dict[str, Any]]) -> str:
    """The tables as texts, one below the other."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cells = {name: value for name, value in row.items() if name != "table"}
        parts.setdefault(row["table"], []).append(cells)
    return "\n\n".join(
        f"{CAPTIONS[kind]}\n\n{tabulate(part, headers='keys', disable_numparse=True)}"
        for kind, part in parts.items()
    )


def plot(runs: Sequence[Run]) -> plt.Figure:
    figure, all_axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    rate = _rate(train.Settings.learning_rate)
    panels = (
        (f"(a) LoRA, η = {rate}", equal_rates(runs, "lora")),
        (f"(b) all parameters, η = {rate}", equal_rates(runs, "full")),
        ("(c) LoRA, η tuned for each method", tuned_rates(runs, "lora")),
    )
    for axes, (title, groups) in zip(all_axes.flat, panels, strict=False):
        for one in groups:
            label = f"{one.name}, η = {_rate(one.learning_rate)}"
            _curve(
                axes,
                one,
                label,
                common.COLORS[one.name],
                dashed=one.name == "ZO-RMSProp",
            )
        _finish(axes, title)
    for b1, one, color in zip(BETAS, betas(runs), BETA_COLORS, strict=True):
        _curve(all_axes[1, 1], one, f"β₁ = {b1:g}", color)
    _finish(all_axes[1, 1], f"(d) R-AdaZO, LoRA, η = {rate}")
    return figure


def _curve(
    axes: plt.Axes, one: Group, label: str, color: str, dashed: bool = False
) -> None:
    mean, low, high = (f(one.losses, axis=0) for f in (np.mean, np.min, np.max))
    axes.fill_between(one.steps, low, high, color=color, alpha=0.2, lw=0)
    style = "--" if dashed else "-"
    axes.plot(one.steps, mean, style, color=color, lw=1.8, label=label)


def _finish(axes: plt.Axes, title: str) -> None:
    axes.set(title=title, xlabel="steps", ylabel="training loss")
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    common.tidy(axes)
