"""Training on a reward: populations and a policy gradient, at equal tokens.

    python -m research.rewards --output research/records/rewards.json

A small model has learned to add from solved sums, most of which forget the carry
(`warm_up.py`), and is rewarded for right answers. Each method is
tuned on the same number of settings, with one seed: learning rates and σ (of a policy
gradient, replies to a prompt) are doubled and halved around the best setting so far.
The best setting is run with three other seeds, as are the defaults of
`radazo-llm reward`. ``--resume`` takes the rows that are there.
"""

import contextlib
import dataclasses
import itertools
import math
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import click
import jax
import jax.numpy as jnp
from flax import nnx

from radazo_llm.formats import load
from radazo_llm.reward.pool import RewardPool
from radazo_llm.reward.task import SAMPLES, Task
from radazo_llm.run import log as logs
from radazo_llm.run import loop
from radazo_llm.run.folder import locked
from radazo_llm.settings import REWARD, Settings
from radazo_llm.tune.job import parts_of
from research import common, grpo, warm_up
from research.common import Table, numbers

FOLDER = common.RUNS / "rewards"
MODEL = warm_up.Settings(hidden_size=208, learning_rate=1e-3, num_steps=500)
NAMES = {
    "radazo": "R-AdaZO",
    "default": "R-AdaZO, the program's defaults",
    "zo_sgd": "ZO-SGD",
    "grpo": "GRPO, by backpropagation",
}
REPLIES = 512  # Of a step.
# By method: a learning rate, and σ of populations or the replies to a prompt of GRPO.
STARTS = {"radazo": (2e-3, 0.06), "zo_sgd": (0.02, 0.06), "grpo": (4e-3, 8)}
SEARCHED = ("method", "learning_rate", "other")


def settings(
    method: str, learning_rate: float, other: float, num_steps: int, seed: int
) -> Settings:
    grouped = method == "grpo"
    size = int(other) if grouped else 32
    kind = {"smoothing": other, "method": "radazo" if method == "default" else method}
    return Settings.of(
        REWARD,
        **({} if grouped else kind),
        learning_rate=learning_rate,
        population_size=size,
        batch_size=REPLIES // size,
        num_steps=num_steps,
        eval_every=max(num_steps // 5, 1) if seed else num_steps,
        eval_examples=1000,
        seed=seed,
    )


def by_default() -> dict[str, Any]:
    """The setting of `radazo-llm reward` without options."""
    chosen = Settings.of(REWARD)
    return {
        "method": "default",
        "learning_rate": chosen.learning_rate,
        "other": chosen.smoothing,
    }


def measured(model: warm_up.Settings, **case: Any) -> dict[str, Any]:
    """The curves of a run, its CPU time, and some of the replies."""
    chosen, begin = settings(**case), process_time()
    width = FOLDER / f"width-{model.hidden_size}"
    source = warm_up.warmed_up(width / "model", model)
    folder = width / "-".join(map(str, case.values()))
    shutil.rmtree(folder, ignore_errors=True)  # Of a run that was cut.
    made = {
        name: warm_up.sums(number, chosen.seed, held_out=name == "dev")
        for name, number in (
            ("train", chosen.train_examples),
            ("dev", chosen.eval_examples),
        )
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(folder))
        pool = stack.enter_context(RewardPool({"answer": 1.0}, 1))
        log = stack.enter_context(logs.Log(folder, 0, chosen.num_steps))
        parts = parts_of(chosen, load.load(source, dtype=jnp.float32))
        task = Task(chosen, parts, source, made, pool, folder)
        if case["method"] == "grpo":
            grpo.run(chosen, task, log)
        else:
            rates = chosen.rates(None, [chosen.num_steps])
            loop.run(chosen, task.job(), rates, log, folder=folder)
    return {"cpu_s": round(process_time() - begin), **row_of(folder)}


def num_weights(model: warm_up.Settings) -> int:
    """The number of weights of a model that has been made."""
    loaded = load.load(FOLDER / f"width-{model.hidden_size}" / "model")
    return sum(x.size for x in jax.tree.leaves(nnx.state(loaded, nnx.Param)))


def row_of(folder: Path) -> dict[str, Any]:
    """The curves of a run, from its log."""
    lines = logs.rows(folder)
    steps = [row for row in lines if "reward" in row]
    names = ("reward", "spread", "tokens", "ended")
    tokens = sum(row["tokens"] + row["ended"] for row in steps)
    return {
        "generated": round(tokens * REPLIES),
        "evaluations": [
            [
                r["step"],
                *numbers([r[f"dev_{n}"] for n in ("reward", "tokens", "ended")]),
            ]
            for r in lines
            if "dev_reward" in r
        ],
        "steps": {name: numbers([row[name] for row in steps]) for name in names},
        "samples": samples(folder),
    }


def samples(folder: Path) -> list[str]:
    """The first and the last replies of a run, to the same held-out problems."""
    text = (folder / SAMPLES).read_text("utf-8")
    blocks = [block.splitlines()[1:] for block in text.split("--- ")[1:]]
    return [*blocks[0], *blocks[-1]]


def best(rows: Sequence[dict[str, Any]], method: str) -> dict[str, Any]:
    """The setting of a method whose held-out reward ends highest in the search."""
    mine = [row for row in rows if row["method"] == method and not row["seed"]]
    found = max(mine, key=lambda row: row["evaluations"][-1][1])
    return {name: found[name] for name in SEARCHED}


def place(setting: dict[str, Any]) -> tuple[int, int]:
    """The doublings of a start, of both of its numbers, that give a setting."""
    rate, other = STARTS[setting["method"]]
    return (
        round(math.log2(setting["learning_rate"] / rate)),
        round(math.log2(setting["other"] / other)),
    )


def next_setting(rows: Sequence[dict[str, Any]], method: str) -> dict[str, Any]:
    """A setting that is not in the search yet, nearest to the best one in it."""
    tried = {place(r) for r in rows if r["method"] == method and not r["seed"]}
    around = place(best(rows, method)) if tried else (0, 0)
    near = itertools.product(*(range(x - 4, x + 5) for x in around))
    i, j = min((p for p in near if p not in tried), key=lambda p: math.dist(p, around))
    rate, other = STARTS[method]
    return {
        "method": method,
        "learning_rate": rate * 2.0**i,
        "other": other * 2.0**j,
    }


def is_interior(rows: Sequence[dict[str, Any]], method: str) -> bool:
    """Whether the best setting was compared with twice and half of its numbers."""
    tried = {place(r) for r in rows if r["method"] == method and not r["seed"]}
    i, j = place(best(rows, method))
    return tried >= {(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)}


def of_runs(content: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each method that were not part of the search."""
    return {
        method: [r for r in content["rows"] if r["method"] == method and r["seed"]]
        for method in content["methods"]
    }


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean and the standard deviation over seeds."""
    return (
        f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"
    )


def cpu_minutes(rows: Sequence[dict[str, Any]]) -> str:
    """The mean of the runs that were not cut."""
    spent = [row["cpu_s"] for row in rows if row["cpu_s"] is not None]
    return f"{statistics.mean(spent) / 60:.1f}" if spent else ""


def tables(content: dict[str, Any]) -> list[Table]:
    ends = []
    for method, rows in of_runs(content).items():
        first, last = ([r["evaluations"][i][1] for r in rows] for i in (0, -1))
        gain = [b - a for a, b in zip(first, last, strict=True)]
        error = statistics.stdev(gain) / len(gain) ** 0.5
        ends.append(
            [
                NAMES[method],
                spread(first),
                spread(last),
                f"{statistics.mean(gain) / error:.0f}",
                f"{statistics.mean(r['generated'] for r in rows) / 1e6:.2f}",
                cpu_minutes(rows),
            ]
        )
    caption = "Held-out reward, mean ± standard deviation over seeds, and the gain in "
    headers = ["method", "at first", "at the end", "gain / error", "million tokens"]
    return [Table(caption + "standard errors", [*headers, "CPU minutes"], ends)]


@click.command(help=__doc__)
@common.output
@common.resume
@click.option("--seeds", type=common.POSITIVE, default=3)
@click.option("--settings", "searched", type=common.POSITIVE, default=8)
@click.option("--steps", type=common.POSITIVE, default=30)
@click.option("--fast", is_flag=True, help="A model of 6,000 weights.")
def main(
    output: Path | None, resume: bool, seeds: int, searched: int, steps: int, fast: bool
) -> None:
    model = warm_up.FAST if fast else MODEL
    before: dict[str, Any] = {}
    if resume and output is not None and output.exists():
        before = common.read(output)
    known = {identity(row): row for row in before.get("rows", [])}
    rows: list[dict[str, Any]] = []

    def save(every: list[dict[str, Any]]) -> None:
        content = common.record(every) | {
            "methods": list(NAMES),
            "model": dataclasses.asdict(model),
            "num_weights": before.get("num_weights") or num_weights(model),
            # Of the processor, because runs may have been cut.
            "seconds": sum(row["cpu_s"] or 0 for row in every),
        }
        content["versions"] = before.get("versions", {}) | content["versions"]
        common.write(output, content)

    def run(setting: dict[str, Any], seed: int) -> None:
        case = setting | {"num_steps": steps, "seed": seed}
        row = known.pop(identity(case), None) or case | measured(model, **case)
        print(*case.values(), row["evaluations"][-1], row["cpu_s"], flush=True)
        rows.append(row)
        if output is not None:
            save([*rows, *known.values()])

    for method in STARTS:
        for _ in range(searched):
            run(next_setting(rows, method), 0)
    for seed in range(1, seeds + 1):
        for method in NAMES:
            run(best(rows, method) if method in STARTS else by_default(), seed)
    if output is not None:
        save(rows)  # Without rows of other searches.


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*SEARCHED, "num_steps", "seed"))


if __name__ == "__main__":
    main()
