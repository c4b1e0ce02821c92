"""What the scripts of the paper's experiments share."""

import argparse
import datetime
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from tabulate import tabulate
from tqdm import tqdm

import radazo_jax as zo
from radazo_jax import theory

METHODS: dict[str, Callable[..., optax.GradientTransformation]] = {
    # b1=0.9 and b2=0.99 are the defaults, where a method has them.
    "R-AdaZO": zo.radazo,
    "ZO-AdaMM": zo.zo_adamm,
    "ZO-RMSProp": zo.zo_rmsprop,
    "ZO-SGD": zo.zo_sgd,
    "ZO-signSGD": zo.zo_signsgd,
}
# Not a method of the paper: ZO-AdaMM with steps as long as those of R-AdaZO.
STRETCH = theory.step_ratio(0.9)
STRETCHED = f"ZO-AdaMM, {STRETCH:.2f} η"

# By Okabe and Ito, whose colors all kinds of color vision tell apart.
COLORS = {
    "R-AdaZO": "#D55E00",
    "ZO-AdaMM": "#0072B2",
    "ZO-RMSProp": "#009E73",
    "ZO-SGD": "#777777",
    "ZO-signSGD": "#CC79A7",
    STRETCHED: "#56B4E9",
}
OUTPUT = Path(__file__).resolve().parents[1] / "out" / "paper"
PACKAGES = ("jax", "jaxlib", "optax", "numpy", "scikit-learn")


class Table(NamedTuple):
    """Rows of texts, as they are printed and as they stand in the docs."""

    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def format(self, style: str = "simple") -> str:
        align = ("left", *("right" for _ in self.headers[1:]))
        return tabulate(
            self.rows, self.headers, style, colalign=align, disable_numparse=True
        )


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def parser(doc: str, *, steps: int, seeds: int, fast: tuple[int, int]) -> Parser:
    """The options that all scripts have; `fast` is steps and seeds of --fast."""
    result = Parser(description=doc.splitlines()[0])
    result.add_argument("--steps", type=at_least_one, help=f"default {steps}")
    result.add_argument("--seeds", type=at_least_one, help=f"default {seeds}")
    result.add_argument(
        "--fast", action="store_true", help="a small run: to see that it works"
    )
    result.add_argument(
        "--output", type=Path, default=OUTPUT, help="folder of the JSON and the PNG"
    )
    result.set_defaults(defaults=(steps, seeds), fast_defaults=fast)
    return result


def parse(result: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    args = result.parse_args(argv)
    steps, seeds = args.fast_defaults if args.fast else args.defaults
    args.steps = steps if args.steps is None else args.steps
    args.seeds = seeds if args.seeds is None else args.seeds
    return args


def at_least_one(text: str) -> int:
    """An argument that counts something."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"must be an integer of at least 1, got {text}"
        )
    return value


def seed_keys(seeds: int) -> jax.Array:
    """The seeds' keys: those of fewer seeds are the first of those of more."""
    fold = functools.partial(jax.random.fold_in, jax.random.key(0))
    return jax.vmap(fold)(jnp.arange(seeds, dtype=jnp.uint32))


def compiled(
    step: Callable[[Any, jax.Array], tuple[Any, Any]], chunk: int
) -> Callable[[Any, jax.Array], tuple[Any, Any]]:
    """`chunk` steps as one program: `(carry, first t) -> (carry, mean out)`."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run_chunk(carry: Any, start: jax.Array) -> tuple[Any, Any]:
        times = start + jnp.arange(chunk, dtype=jnp.uint32)
        carry, outs = jax.lax.scan(step, carry, times)
        return carry, jax.tree.map(lambda out: out.mean(axis=0), outs)

    return run_chunk


def run(
    step: Callable[[Any, jax.Array], tuple[Any, Any]],
    carry: Any,
    num_steps: int,
    chunk: int,
    label: str,
    at_chunk: Callable[[Any, Any], str] = lambda carry, out: "",
) -> tuple[Any, Any]:
    """Scans `step` in compiled chunks, under a progress bar.

    Args:
      step: `(carry, t) -> (carry, out)`, with t = 0, 1, …; each out is a tree of small
        arrays, of which the mean over a chunk is kept.
      carry: What the first step gets.
      num_steps: How many steps, rounded up to whole chunks.
      chunk: How many steps a chunk has.
      label: What stands before the bar.
      at_chunk: Called after each chunk with its last carry and its out; what it returns
        stands behind the bar.

    Returns:
      The last carry, and the outs, stacked: arrays [chunks, ...].
    """

    outs, run_chunk = [], compiled(step, chunk)
    carry = jax.tree.map(jnp.copy, carry)  # The chunks work in place.
    with tqdm(total=math.ceil(num_steps / chunk) * chunk, desc=label, unit="step") as b:
        for start in range(0, num_steps, chunk):
            carry, out = run_chunk(carry, jnp.uint32(start))
            outs.append(jax.tree.map(np.asarray, out))
            b.set_postfix_str(at_chunk(carry, outs[-1]), refresh=False)
            b.update(chunk)
    return carry, jax.tree.map(lambda *leaves: np.stack(leaves), *outs)


def provenance(start: float) -> dict[str, Any]:
    """How a file came about: command, versions, device, date, and seconds taken.

    Args:
      start: `time.perf_counter()` when the script began.
    """
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    versions["radazo_jax"] = zo.__version__
    device = jax.devices()[0]
    script = os.path.relpath(sys.argv[0])
    return {
        "command": " ".join(["python", script, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": f"{device.platform} ({device.device_kind}), {os.cpu_count()} cores",
        "versions": versions,
        "seconds": round(time.perf_counter() - start),
        "cpu_seconds": round(time.process_time()),
    }


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


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON, with the innermost lists on one line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(
        r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text
    )
    path.write_text(text.replace("[ ", "[").replace(" ]", "]") + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def finish(
    tables: Sequence[Table], figure: plt.Figure, output: Path, name: str
) -> None:
    """Prints the tables and saves the figure."""
    for table in tables:
        print(f"\n{table.caption}\n\n{table.format()}")
    save(figure, output / f"{name}.png")
    print(f"\nWrote {output / name}.json and {output / name}.png")


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)


def mean_std(values: Any, digits: int = 3) -> str:
    """Mean ± standard deviation, to `digits` significant digits of the mean."""
    values = np.asarray(values, dtype=np.float64)
    std = values.std(ddof=1) if values.size > 1 else 0.0
    return f"{significant(values.mean(), digits)} ± {significant(std, 2)}"


def significant(value: float, digits: int) -> str:
    if not np.isfinite(value):
        return "∞"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}" if abs(value) >= 1e-3 else f"{value:.{digits - 1}e}"


def tidy(axes: plt.Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", lw=0.7)
