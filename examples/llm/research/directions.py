"""Compares numbers of directions: at equal forward passes, and at equal time.

    python -m research.directions --output research/records/directions.json

A small language model, pretrained first, is tuned to name the word that fits each of
the sentences in `sentiment`: all parameters, by R-AdaZO, along
directions of the distribution `low_rank`. K = 1 with central differences is the paper's
choice. With forward differences K directions cost K + 1 passes, so that the same passes
make fewer steps, of better estimates. Each choice runs at each rate with each seed, and
is compared at the rate that is best for it.
"""

import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from radazo_llm.formats import weights
from radazo_llm.tune import data
from radazo_llm.tune.run import run
from radazo_llm.tune.train import Settings, start, train_step
from research import common, corpus, pretrain
from research.common import Table, array, by_turns, numbers
from research.comparison import first_at, shown_rate

MODEL = pretrain.Settings(
    vocab_size=1024, hidden_size=64, num_hidden_layers=2, num_steps=500
)
CHOICES = (("central", 1), ("forward", 4), ("forward", 16))
RATES = (4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3)
PARTS = (6, 3, 1)  # The choices are compared after these parts of the passes.
POINTS = 24  # Of a curve.
TIMED = 60  # Steps of each choice, interleaved.


def settings_of(choice: tuple[str, int], passes: int, **options: Any) -> Settings:
    """A run of about so many forward passes."""
    difference, k = choice
    settings = Settings(
        difference=difference,
        num_directions=k,
        tune="full",
        distribution="low_rank",
        objective="language_model",
        **options,
    )
    steps = passes // settings.num_evaluations
    every = max(1, steps // POINTS)
    return dataclasses.replace(settings, num_steps=steps, eval_every=every)


def curve(settings: Settings, *problem: Any) -> dict[str, Any]:
    """Returns the loss of a run by passes; infinite if the run diverged."""
    names = ("difference", "num_directions", "learning_rate", "seed")
    row = {name: getattr(settings, name) for name in names}
    try:
        found = run(settings, *problem, label=str(list(row.values()))).evaluations
        points = [(each["step"], each["train_loss"]) for each in found]
    except FloatingPointError:
        points = [(settings.num_steps, math.inf)]
    steps, losses = zip(*points, strict=True)
    passes = [settings.num_evaluations * step for step in steps]
    return row | {"passes": passes, "train_loss": numbers(losses)}


def pass_ms(settings: Settings, model: Any, batch: data.Batch) -> Iterator[float]:
    """Yields the time of a pass, step by step."""
    job, state = start(settings, model)
    while True:
        before = time.perf_counter()
        state, _ = jax.block_until_ready(train_step(job, state, batch))
        taken = time.perf_counter() - before
        yield 1000 * taken / settings.num_evaluations


# --- Tables -----------------------------------------------------------------------


def tables(content: dict[str, Any]) -> list[Table]:
    """At equal passes; at equal time; and at each rate, in the end."""
    rates, pass_ms = content["rates"], content["pass_ms"]
    groups = {
        choice: {rate: group(content, choice, rate) for rate in rates}
        for choice in CHOICES
    }
    budgets = [content["passes"] // part for part in PARTS]
    fastest = min(pass_ms)  # The others have not come to their ends by then.
    in_passes, in_time, in_the_end = [], [], []
    for (choice, found), ms in zip(groups.items(), pass_ms, strict=True):
        name = f"K = {choice[1]}, {choice[0]}"
        half = min(
            np.mean([first_at(each[0] / 2, passes, each) for each in losses])
            for passes, losses in found.values()
            if np.isfinite(losses).all()
        )
        half = f"{half:,.0f}" if np.isfinite(half) else "not all"
        in_passes.append([name, *(best(found, budget) for budget in budgets), half])
        times = [best(found, budget * fastest / ms) for budget in budgets]
        in_time.append([name, *times, f"{ms:.2f}"])
        ends = [spread(losses[:, -1]) for _, losses in found.values()]
        in_the_end.append([name, *ends])
    first, seeds = content["runs"][0]["train_loss"][0], content["seeds"]
    seconds = [f"{budget * fastest / 1000:.1f} s" for budget in budgets]
    return [
        Table(
            f"Loss after so many forward passes, from {first:.2f}, at the η that is "
            f"best then; mean ± standard deviation of {seeds} seeds",
            ["choice", *(f"{budget:,}" for budget in budgets), "passes to half"],
            in_passes,
        ),
        Table("Loss after so much time", ["choice", *seconds, "a pass_ms"], in_time),
        Table(
            f"Loss after {budgets[-1]:,} passes, at each η",
            ["choice", *map(shown_rate, rates)],
            in_the_end,
        ),
    ]


def best(found: dict[float, tuple[np.ndarray, np.ndarray]], budget: float) -> str:
    """The loss after so many passes, at the rate whose mean is lowest, and that."""
    at = {
        rate: [np.interp(budget, passes, each) for each in losses]
        for rate, (passes, losses) in found.items()
        if np.isfinite(losses).all()
    }
    rate = min(at, key=lambda rate: np.mean(at[rate]))
    return f"{spread(at[rate])} ({shown_rate(rate)})"


def group(
    content: dict[str, Any], choice: tuple[str, int], rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """Passes, and losses of all seeds, [seeds, points]."""
    found = [
        row
        for row in content["runs"]
        if (row["difference"], row["num_directions"]) == choice
        and row["learning_rate"] == rate
    ]
    passes = max((row["passes"] for row in found), key=len)
    losses = np.full((len(found), len(passes)), np.inf)
    for i, row in enumerate(found):
        if len(row["passes"]) == len(passes):
            losses[i] = array(row["train_loss"])
    return np.asarray(passes), losses


def spread(values: Any) -> str:
    values = np.asarray(values)
    if not np.isfinite(values).all():
        return "diverged"
    return f"{values.mean():.3f} ± {values.std():.3f}"


@click.command(help=__doc__)
@common.output
@click.option("--passes", type=click.IntRange(34), default=2040)
@click.option("--seeds", type=common.POSITIVE, default=3)
@click.option("--fast", is_flag=True, help="To see that it works.")
def main(output: Path | None, passes: int, seeds: int, fast: bool) -> None:
    name, settings, rates, rounds = "directions", MODEL, RATES, TIMED
    if fast:
        passes, seeds = 34, 1
        name, settings, rates, rounds = "fast", pretrain.FAST, RATES[:1], 2
    folder = pretrain.pretrained(common.RUNS / f"{name}-model", settings)
    examples = data.read(data.TASKS["sst2"], corpus.SENTIMENT, folder)
    base = weights.load(folder, dtype=jnp.float32)
    runs = [
        curve(
            settings_of(choice, passes, learning_rate=rate, seed=seed),
            copy.deepcopy(base),
            *examples,
        )
        for choice in CHOICES
        for rate, seed in itertools.product(rates, range(seeds))
    ]
    batch = data.batch_at(examples[0], 0, 0, Settings.batch_size)
    times = {
        choice: pass_ms(settings_of(choice, passes=1000), copy.deepcopy(base), batch)
        for choice in CHOICES
    }
    content = common.record() | {
        "passes": passes,
        "seeds": seeds,
        "rates": rates,
        "num_parameters": sum(x.size for x in jax.tree.leaves(nnx.state(base))),
        "pass_ms": list(by_turns(times, rounds).values()),
        "runs": runs,
    }
    for table in tables(content):
        print(f"\n{table.caption}\n\n{table.format()}")
    if output is not None:
        common.write(output, content)


if __name__ == "__main__":
    main()
