"""The paper's figure of language models, at a size that a laptop can run.

    python -m research.comparison --output research/records/llm.json

"Training loss comparison": R-AdaZO, ZO-AdaMM and ZO-RMSProp with adapters (a) and with
all parameters (b), at the paper's η; each at its own η (c); β₁ of R-AdaZO (d).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import matplotlib.pyplot as plt
import numpy as np

from radazo_llm.examples.splits import Own
from radazo_llm.settings import Settings
from research import common, corpus, pretrain, sentences
from research.common import Table, array

METHODS = {"radazo": "R-AdaZO", "zo_adamm": "ZO-AdaMM", "zo_rmsprop": "ZO-RMSProp"}
# By Okabe and Ito, whose colors all kinds of color vision tell apart.
COLORS = {"R-AdaZO": "#D55E00", "ZO-AdaMM": "#0072B2", "ZO-RMSProp": "#009E73"}
TUNES = {"lora": "LoRA", "full": "all parameters"}
RATE = 5e-5  # The paper's η.
# β₁ and its color.
BETAS = {0.0: "#56B4E9", 0.5: "#E69F00", 0.7: "#CC79A7", 0.9: "#D55E00"}
GRID_FACTOR = 4.0  # About what the steps of R-AdaZO and ZO-AdaMM differ by.
CURVES = ("step", "train_loss", "train_accuracy", "dev_accuracy")
Run = dict[str, Any]  # Settings that tell runs apart, and the curves.
# Makes a run of these settings, under a label, and returns its evaluations.
Execute = Callable[[Settings, str], Sequence[dict[str, float]]]


class Plan(NamedTuple):
    """The size of the comparison."""

    steps: dict[str, int]  # By what is tuned.
    points: int  # Of a curve, the first left out.
    seeds: int
    max_rates: int  # Of a method's grid of η.


FULL = Plan({"lora": 300, "full": 150}, points=10, seeds=3, max_rates=6)
FAST = Plan({"lora": 6, "full": 6}, points=2, seeds=1, max_rates=1)


# --- Runs -------------------------------------------------------------------------


def compare(plan: Plan, execute: Execute) -> list[Run]:
    """All runs of the figure, none of them twice."""
    done: dict[Settings, Run] = {}

    def run(seed: int = 0, **options: Any) -> Run:
        steps = plan.steps[options["tune"]]
        every = max(1, steps // plan.points)
        options = {"learning_rate": RATE} | options
        settings = Settings(num_steps=steps, eval_every=every, seed=seed, **options)
        if settings not in done:
            done[settings] = _run(settings, execute)
        return done[settings]

    for tune in TUNES:
        for method in METHODS:
            for seed in range(plan.seeds):
                run(seed, tune=tune, method=method)
            rate = best_rate(run, tune, method, plan.max_rates)
            for seed in range(plan.seeds):
                run(seed, tune=tune, method=method, learning_rate=rate)
    for b1 in BETAS:
        for seed in range(plan.seeds):
            run(seed, tune="lora", method="radazo", b1=b1)
    return list(done.values())


def best_rate(run: Callable[..., Run], tune: str, method: str, max_rates: int) -> float:
    """The η with the least final loss of seed 0: up from the paper's while it falls."""
    best_rate, best_loss = math.nan, math.inf
    for i in range(max_rates):
        rate = RATE * GRID_FACTOR**i
        loss = run(tune=tune, method=method, learning_rate=rate)["train_loss"][-1]
        if not loss < best_loss:
            break
        best_rate, best_loss = rate, loss
    return best_rate


def _run(settings: Settings, execute: Execute) -> Run:
    names = ("tune", "b1", "learning_rate", "seed")
    result = {name: getattr(settings, name) for name in names}
    result["method"] = METHODS[settings.method]
    try:
        evaluations = execute(settings, ", ".join(map(str, result.values())))
    except FloatingPointError:  # Diverged: what it reached before is of no use.
        steps = range(0, settings.num_steps + 1, settings.eval_every)
        evaluations = [dict.fromkeys(CURVES, math.inf) | {"step": i} for i in steps]
    return result | {name: [e[name] for e in evaluations] for name in CURVES}


# --- Groups of runs ---------------------------------------------------------------


class Group(NamedTuple):
    """The seeds of one method in one setting."""

    name: str
    learning_rate: float
    steps: np.ndarray  # [points]
    losses: np.ndarray  # [seeds, points]
    accuracies: np.ndarray  # [seeds], on the examples held back, in the end.


def select(runs: Sequence[Run], **wanted: Any) -> list[Run]:
    return [run for run in runs if wanted.items() <= run.items()]


def group(
    runs: Sequence[Run], tune: str, name: str, b1: float = 0.9, rate: float = RATE
) -> Group:
    found = select(runs, tune=tune, method=name, b1=b1, learning_rate=rate)
    return Group(
        name,
        rate,
        np.asarray(found[0]["step"]),
        array([run["train_loss"] for run in found]),
        array([run["dev_accuracy"][-1] for run in found]),
    )


def grid(runs: Sequence[Run], tune: str, name: str) -> list[Run]:
    """The runs by which the η of a method was found."""
    return select(runs, tune=tune, method=name, b1=0.9, seed=0)


def equal_rates(runs: Sequence[Run], tune: str) -> list[Group]:
    """Each method at the paper's η."""
    return [group(runs, tune, name) for name in METHODS.values()]


def tuned_rates(runs: Sequence[Run], tune: str) -> list[Group]:
    """Each method at its best η, which is the one that all seeds were run at."""
    result = []
    for name in METHODS.values():
        tried = grid(runs, tune, name)
        best = array([run["train_loss"][-1] for run in tried]).argmin()
        rate = tried[best]["learning_rate"]
        result.append(group(runs, tune, name, rate=rate))
    return result


def betas(runs: Sequence[Run]) -> list[Group]:
    return [group(runs, "lora", "R-AdaZO", b1) for b1 in BETAS]


def steps_to(found: Group, losses: np.ndarray) -> np.ndarray:
    """Steps [seeds] until the loss is as low as `losses` [seeds], inf if never."""
    pairs = zip(found.losses, losses, strict=True)
    return np.array([first_at(loss, found.steps, curve) for curve, loss in pairs])


def first_at(goal: float, steps: np.ndarray, losses: np.ndarray) -> float:
    """The step at which a loss is first as low as the goal, inf if never.

    Between two evaluations the loss is taken for a straight line.
    """
    below = np.flatnonzero(losses <= goal)
    if not below.size:
        return math.inf
    ends = slice(max(below[0] - 1, 0), below[0] + 1)
    # np.interp wants the x ascending, and the losses fall.
    return float(np.interp(-goal, -losses[ends], steps[ends]))


# --- Tables and picture -----------------------------------------------------------

_HEADERS = ("method", "η", "first loss", "final loss", "dev accuracy", "steps")
_HEADERS += ("steps to match", "times fewer")


def tables(content: dict[str, Any]) -> list[Table]:
    runs = content["runs"]
    captions = {
        "At the paper's η, the same for all methods": equal_rates,
        "Each method at its own η": tuned_rates,
    }
    result = []
    for caption, groups in captions.items():
        rows = []
        for tune, title in TUNES.items():
            found = groups(runs, tune)
            rows += [(title, *_row(one, found[1])) for one in found]
        result.append(Table(caption, ("tuned", *_HEADERS), rows))
    caption = (
        "R-AdaZO with adapters at the paper's η, by β₁ (to match: the loss of β₁ = 0)"
    )
    found = betas(runs)
    rows = [
        (f"{b1:g}", *_row(one, found[0])) for b1, one in zip(BETAS, found, strict=True)
    ]
    result.append(Table(caption, ("β₁", *_HEADERS), rows))
    rows = []
    for tune, title in TUNES.items():
        for name in METHODS.values():
            for one in grid(runs, tune, name):
                loss, rate = one["train_loss"][-1], shown_rate(one["learning_rate"])
                shown = "diverged" if loss is None else f"{loss:.4f}"
                rows.append((title, name, rate, shown))
    headers = ("tuned", "method", "η", "final loss")
    return [*result, Table("How the η of each method was found: seed 0", headers, rows)]


def _row(one: Group, other: Group) -> tuple[str, ...]:
    """A row of a table; steps are counted until the final loss of `other`."""
    reached, last = steps_to(one, other.losses[:, -1]), one.steps[-1]
    matched, fewer = "", ""
    if one is not other:
        matched = "not all"
        if np.isfinite(reached).all() and (reached > 0).all():
            matched = f"{reached.mean():.0f}"
            fewer = f"{(last / reached).min():.2f}"
    return (
        one.name,
        shown_rate(one.learning_rate),
        f"{one.losses[:, 0].mean():.4f}",
        _mean_std(one.losses[:, -1], 4),
        _mean_std(100 * one.accuracies, 1) + " %",
        f"{last:,}",
        matched,
        fewer,
    )


def shown_rate(value: float) -> str:
    """Such as 1.6e-3."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _mean_std(values: np.ndarray, digits: int) -> str:
    std = values.std(ddof=1) if len(values) > 1 else 0.0
    return f"{values.mean():.{digits}f} ± {std:.{digits}f}"


def plot(content: dict[str, Any]) -> plt.Figure:
    runs = content["runs"]
    figure, all_axes = common.panels(2, 2, (10, 7))
    rate, by_b1 = shown_rate(RATE), betas(runs)
    panels = {
        f"(a) LoRA, η = {rate}": equal_rates(runs, "lora"),
        f"(b) all parameters, η = {rate}": equal_rates(runs, "full"),
        "(c) LoRA, η tuned for each method": tuned_rates(runs, "lora"),
        f"(d) R-AdaZO, LoRA, η = {rate}": by_b1,
    }
    for axes, (title, found) in zip(all_axes.flat, panels.items(), strict=True):
        for one, b1 in zip(found, BETAS, strict=False):
            label = f"{one.name}, η = {shown_rate(one.learning_rate)}"
            color = COLORS[one.name]
            if found is by_b1:
                label, color = f"β₁ = {b1:g}", BETAS[b1]
            dash = "--" if one.name == "ZO-RMSProp" else "-"
            style = {"ls": dash, "lw": 1.8, "label": label, "color": color}
            common.band(axes, one.steps, one.losses, **style)
        axes.set(title=title, xlabel="steps", ylabel="training loss", xlim=(0, None))
        axes.legend(frameon=False)
    return figure


# --- The command ------------------------------------------------------------------


@click.command(help=__doc__)
@common.output
@click.option("--fast", is_flag=True, help="A small run: to see that it works.")
def main(output: Path | None, fast: bool) -> None:
    name, plan, pretraining = "llm", FULL, pretrain.Settings()
    if fast:
        name, plan, pretraining = "fast", FAST, pretrain.FAST
    folder = pretrain.pretrained(common.RUNS / f"{name}-model", pretraining)
    splits = Own(corpus.SENTIMENT, Settings(**sentences.OPTIONS)).read(folder).batches

    def execute(settings: Settings, label: str) -> list[dict[str, float]]:
        output = common.RUNS / f"{name}-runs" / label.replace(", ", "-")
        return common.tuned_run(settings, folder, splits, output)

    content = {
        "settings": dataclasses.asdict(Settings(learning_rate=RATE)) | plan._asdict(),
        "pretraining": dataclasses.asdict(pretraining),
        "runs": compare(plan, execute),
    }
    content = common.record() | common.numbers(content)
    for table in tables(content):
        print(f"\n{table.caption}\n\n{table.format()}")
    if output is not None:
        common.write(output, content)
        common.save_figure(plot(content), output.with_suffix(".png"))


if __name__ == "__main__":
    main()
