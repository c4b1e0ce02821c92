"""Records of comparisons as JSON, with their tables."""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
from tabulate import tabulate

import radazo_jax as zo

_PACKAGES = {
    name: name
    for name in (
        *("jax", "jaxlib", "optax", "numpy", "scipy", "cma", "nevergrad"),
        *("gymnasium", "mujoco", "onnx", "onnxruntime"),
    )
} | {"sklearn": "scikit-learn"}
_BEGIN = time.perf_counter()


class Table(NamedTuple):
    """Rows of texts."""

    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def format(self) -> str:
        align = ("left", *("right" for _ in self.headers[1:]))
        headers = [header.replace("_", " ") for header in self.headers]
        return tabulate(self.rows, headers, colalign=align, disable_numparse=True)


def provenance() -> dict[str, Any]:
    """The command, date, machine and versions of the packages that were imported."""
    versions = {
        package: importlib.metadata.version(package)
        for module, package in _PACKAGES.items()
        if module in sys.modules
    }
    device = jax.devices()[0]
    command = shlex.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    return {
        "command": f"python {command}",
        "date": datetime.date.today().isoformat(),
        "device": f"{device.platform} ({device.device_kind})",
        "cpu_count": os.cpu_count(),
        "versions": {"python": platform.python_version()}
        | versions
        | {"radazo_jax": zo.__version__},
        "seconds": round(time.perf_counter() - _BEGIN),
    }


def numbers(values: Any) -> Any:
    """Arrays as nested lists of five significant digits; non-finite ones as None."""
    if isinstance(values, dict):
        return {name: numbers(value) for name, value in values.items()}
    if isinstance(values, (list, tuple, np.ndarray, jax.Array)):
        return [numbers(value) for value in values]
    if isinstance(values, (str, bool)) or values is None:
        return values
    if isinstance(values, (int, np.integer)):
        return int(values)
    return float(f"{float(values):.5g}") if np.isfinite(values) else None


def finish(
    path: Path,
    content: dict[str, Any],
    tables: Callable[[dict[str, Any]], Sequence[Table]],
) -> None:
    """Writes the record, and prints the tables.

    The record has the tables' rows, so that a page can show them if the tools are not
    installed.
    """
    rows = [
        {"table": str(i), **dict(zip(table.headers, row, strict=True))}
        for i, table in enumerate(tables(content))
        for row in table.rows
    ]
    made = provenance()
    content = made | numbers(content | {"rows": rows}) | made
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    # The innermost lists are on one line each.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
    text = text.replace("[ ", "[").replace(" ]", "]") + "\n"
    path.with_suffix(".json").write_text(text, encoding="utf-8")
    for table in tables(content):
        print(f"\n{table.caption}\n\n{table.format()}")
    print(f"\nWrote {path}.json")


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)


def mean_std(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± standard deviation, to `digits` significant digits of the mean."""
    # Equal values have one of 1e-16: their mean is rounded.
    varies = len(set(values)) > 1
    std = np.std(values, ddof=1) if varies else 0.0
    return f"{significant(float(np.mean(values)), digits)} ± {significant(std, 2)}"


def significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}" if abs(value) >= 1e-3 else f"{value:.{digits - 1}e}"
