"""A model that is tuned on a file of prompts and a metric of its replies.

    python -m research.own_metric --output research/records/own_metric.json

The model has learned to add from solved sums, most of which forget the carry
(`warm_up.py`). The file has sums with their answers, and the metric is an exact match
(`exact_match.py`), which no gradient reaches. The command `radazo-llm reward` runs in a
process of its own, as a user runs it, and a seed after another.
"""

import json
import random
from pathlib import Path
from typing import Any

import click

from radazo_llm.run import log
from research import common, warm_up
from research.common import Table

FOLDER = common.RUNS / "own_metric"
METRIC = Path(__file__).with_name("exact_match.py")
ROWS, SHARE = 2500, 0.2  # The second is held out.


def write_sums(path: Path, number: int) -> None:
    """Writes different sums of two numbers below 100, and their answers."""
    pairs = random.Random(0).sample(range(100 * 100), number)
    sums = [divmod(pair, 100) for pair in pairs]
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in sums]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


def options(model: Path, data: Path, steps: int, seed: int) -> list[str]:
    """The command line of a run."""
    held_out = round(SHARE * ROWS)
    return [
        *("reward", "--model", str(model), "--data", str(data)),
        *("--metric", f"{METRIC}:exact_match", "--dev-share", str(SHARE)),
        *("--eval-examples", str(held_out), "--steps", str(steps)),
        *("--seed", str(seed), "--output", str(FOLDER / f"seed-{seed}"), "--resume"),
    ]


def measured(model: Path, data: Path, steps: int, seed: int) -> dict[str, Any]:
    """The held-out accuracies of a run, its time, and what it printed."""
    taken, printed = common.spent(options(model, data, steps, seed), Path.cwd())
    lines = log.rows(FOLDER / f"seed-{seed}")
    return {
        "cpu_s": taken["cpu_s"],
        "held_out": round(SHARE * ROWS),
        "evaluations": [
            [row["step"], row["dev_reward"]] for row in lines if "dev_reward" in row
        ],
        "printed": printed.splitlines(),
    }


def errors_of(row: dict[str, Any]) -> float:
    """The gain of a run in standard errors of the difference of two shares.

    The shares are of the same prompts. Their errors are added as if these were
    independent, which makes the error larger.
    """
    (_, first), *_, (_, last) = row["evaluations"]
    variance = first * (1 - first) + last * (1 - last)
    return (last - first) / (variance / row["held_out"]) ** 0.5


def tables(content: dict[str, Any]) -> list[Table]:
    rows = [
        [
            str(row["seed"]),
            *(f"{100 * row['evaluations'][i][1]:.1f} %" for i in (0, -1)),
            f"{errors_of(row):.1f}",
            f"{row['cpu_s'] / 60:.1f}",
        ]
        for row in content["rows"]
    ]
    held_out, steps = (content["rows"][0][name] for name in ("held_out", "steps"))
    return [
        Table(
            f"Right answers to {held_out} held-out sums, over {steps} steps",
            ["seed", "at first", "at the end", "gain / error", "CPU minutes"],
            rows,
        )
    ]


@click.command(help=__doc__)
@common.output
@common.resume
@click.option("--seeds", type=common.POSITIVE, default=3)
@click.option("--steps", type=common.POSITIVE, default=60)
def main(output: Path | None, resume: bool, seeds: int, steps: int) -> None:
    model = warm_up.warmed_up(FOLDER / "model", warm_up.Settings())
    data = FOLDER / "sums.jsonl"
    write_sums(data, ROWS)

    def measure(seed: int) -> Any:
        return lambda: measured(model, data, steps, seed)

    cases = [({"steps": steps, "seed": seed}, measure(seed)) for seed in range(seeds)]
    common.collect(output, resume, cases, lambda rows: rows)


if __name__ == "__main__":
    main()
