"""Records of measurements, their tables and figures, for all scripts."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax
import matplotlib.pyplot as plt
import numpy as np
from tabulate import tabulate

import radazo_jax as zo
from radazo_llm.examples.tokens import Batch
from radazo_llm.formats.files import json_object
from radazo_llm.run import session
from radazo_llm.settings import Settings
from radazo_llm.tune.job import Tuned, tuned

RECORDS = Path(__file__).parent / "records"
RUNS = Path("runs")  # For models and checkpoints.
# Distributions whose versions are told if their modules were imported.
_NAMED = ("jax", "jaxlib", "libtpu", "optax", "flax", "numpy", "tokenizers", "qwix")
_BEGIN = time.perf_counter()


# --- The command line -------------------------------------------------------------

POSITIVE = click.IntRange(1)
output = click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="A JSON file."
)
resume = click.option("--resume", is_flag=True, help="Take the rows of --output.")


# --- Records ----------------------------------------------------------------------


def record(rows: Iterable[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The provenance of a file, and its rows if it has any."""
    versions = {"python": platform.python_version()}
    for package in _NAMED:
        if package in sys.modules:
            versions[package] = importlib.metadata.version(package)
    device, module = jax.devices()[0], sys.modules["__main__"].__spec__
    # A package is run by its name.
    name = module.name.removesuffix(".__main__") if module else sys.argv[0]
    content = {
        "command": f"python -m {name} {shlex.join(sys.argv[1:])}".rstrip(),
        "date": datetime.date.today().isoformat(),
        "device": f"{device.platform} ({device.device_kind})",
        "cpu_count": os.cpu_count(),
        "versions": versions | {"radazo_jax": zo.__version__},
        "seconds": round(time.perf_counter() - _BEGIN),
    }
    return content if rows is None else content | {"rows": list(rows)}


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON, with the innermost lists on one line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(
        r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text
    )
    path.write_text(text.replace("[ ", "[").replace(" ]", "]") + "\n", encoding="utf-8")


read = json_object


def collect(
    output: Path | None,
    resume: bool,
    cases: Iterable[tuple[dict[str, Any], Callable[[], dict[str, Any]]]],
    derived: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    **about: Any,
) -> list[dict[str, Any]]:
    """Measures one case after another, and writes a record after each.

    Args:
      output: The file to write.
      resume: Whether to take the rows that are there.
      cases: Pairs of a row's identity and a function that measures the rest of it.
      derived: Makes the record's rows from the rows measured so far.
      about: Other contents of the record.

    Returns:
      The record's rows.
    """
    cases = list(cases)
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    before, versions = 0, {}
    if resume and output is not None and output.exists():
        names, found = tuple(cases[0][0]), read(output)
        rows = {tuple(map(r.get, names)): r for r in found["rows"]}
        before, versions = found.get("seconds", 0), found["versions"]
    for case, measure in cases:
        key, start = tuple(case.values()), time.perf_counter()
        if key not in rows:
            rows[key] = case | measure()
            rows[key]["compile_s"] = round(time.perf_counter() - start, 3)
        print(*rows[key].values(), flush=True)
        keys = [tuple(other.values()) for other, _ in cases]
        made = derived([rows[key] for key in keys if key in rows])
        if output is not None:
            content = record(made) | about
            # The time of all rows, with the rows of previous runs.
            content["seconds"] += before
            content["versions"] = versions | content["versions"]
            write(output, content)
    return made


def tuned_run(
    settings: Settings,
    model: Path,
    splits: tuple[Batch, ...],
    folder: Path,
    change: Callable[[Tuned], Tuned] = lambda made: made,
    **options: Any,
) -> list[dict[str, Any]]:
    """The evaluations of a run as `radazo-llm tune` does it.

    Args:
      settings: The settings of the run.
      model: The folder or file of the model.
      splits: The examples to train on, to evaluate on and, maybe, of the test.
      folder: The folder of the run.
      change: Changes the job of the run.
      options: Other options of `session.execute`.
    """

    def prepare(loaded: Any, stack: Any) -> Tuned:
        frozen = folder.parent / "frozen"
        return change(tuned(settings, loaded, splits, frozen_folder=frozen))

    given = {"model": str(model), "path": model, "output": folder, "notes": {}}
    given |= {"to": {}, "dtype": "float32", "resume": True}
    return session.execute(settings, prepare, **(given | options))


def spent(arguments: Sequence[str], folder: Path) -> tuple[dict[str, Any], str]:
    """Runs the program in a folder: what its processes take, and what it prints.

    Raises:
      RuntimeError: If it fails.
    """
    begin = time.perf_counter()
    command = [sys.executable, "-m", "radazo_llm", *arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        output, errors = out.read(), err.read()
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{errors[-2000:]}")
    return {
        "seconds": round(time.perf_counter() - begin),
        "cpu_s": round(usage.ru_utime + usage.ru_stime),
        "peak_MiB": round(usage.ru_maxrss / 2**10),
    }, output


def numbers(values: Any) -> Any:
    """Arrays as nested lists of five significant digits; what is not finite, as None.

    JSON has no infinity, and a run that diverged is shown as a gap.
    """
    if isinstance(values, dict):
        return {name: numbers(value) for name, value in values.items()}
    if isinstance(values, (list, tuple, np.ndarray, jax.Array)):
        return [numbers(value) for value in values]
    if isinstance(values, (str, bool)) or values is None:
        return values
    if isinstance(values, (int, np.integer)):
        return int(values)
    return float(f"{float(values):.5g}") if np.isfinite(values) else None


def array(values: Any) -> np.ndarray:
    """Nested lists out of a JSON file as an array; None is infinite."""
    result = np.asarray(values, dtype=object)
    return np.where(np.equal(result, None), np.inf, result).astype(np.float64)


# --- Tables and figures -----------------------------------------------------------


NAMES = {"radazo": "R-AdaZO", "zo_adamm": "ZO-AdaMM", "zo_sgd": "ZO-SGD"}


def worded(name: str) -> str:
    """The name of a column or a value in words: "pass_ms" is "pass, ms"."""
    if "`" in name:
        return name
    for identifier, word in NAMES.items():
        name = re.sub(rf"\b{identifier}(?![a-z]|_jax)", word, name)
    name = re.sub(r"_(ms|s)$", lambda unit: f", {unit[1]}", name)
    return re.sub(r"(?<=[a-z])(?<!radazo)_(?=[a-z])", " ", name)


class Table(NamedTuple):
    """Rows of texts, as they are printed and as they stand in the pages."""

    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def format(self, style: str = "simple") -> str:
        align = ("left", *("right" for _ in self.headers[1:]))
        return tabulate(
            [[worded(cell) for cell in row] for row in self.rows],
            [worded(header) for header in self.headers],
            style,
            colalign=align,
            disable_numparse=True,
        )


def panels(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[plt.Figure, np.ndarray]:
    """A figure and its axes [rows, columns]."""
    figure, all_axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **options
    )
    for axes in all_axes.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", lw=0.7)
    return figure, all_axes


def band(axes: plt.Axes, x: Any, curves: np.ndarray, **style: Any) -> None:
    """The mean of the curves [seeds, points] as a line, and their range as a band."""
    low, high = curves.min(axis=0), curves.max(axis=0)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.2, lw=0)
    axes.plot(x, curves.mean(axis=0), **style)


def legend(figure: plt.Figure, axes: plt.Axes, columns: int) -> None:
    """Draws one legend below all axes, with the curves of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False
    )


def save_figure(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
