"""Timing by turns, and its picture."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax

from examples.common import figures


def medians(
    runs: Mapping[str, Callable[[], Any]], repeats: int = 7
) -> dict[str, float]:
    """Median seconds of each run, taken by turns so that drifts hit all alike.

    Args:
      runs: Named functions that return arrays, or ``None`` when they are done.
      repeats: How many times each is timed, after one run that is not.

    Returns:
      The median of each.
    """
    for run in runs.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def scanned(
    step: Callable[[Any, jax.Array], Any], carry: Any, num_steps: int
) -> Callable[[], Any]:
    """A run of ``num_steps`` steps ``(carry, i) -> carry`` as one program."""

    @jax.jit
    def run(carry: Any) -> Any:
        numbers = jnp.arange(num_steps, dtype=jnp.uint32)
        return lax.scan(lambda c, i: (step(c, i), None), carry, numbers)[0]

    return functools.partial(run, carry)


def bars(rows: Mapping[str, Mapping[str, Any]], columns: Sequence[str]) -> plt.Figure:
    """Ratios as bars on a logarithmic scale, a group of them for each row."""
    height = 0.8 / len(columns)
    figure, [[axes]] = figures.panels(1, 1, (8, 1 + 0.3 * len(rows)))
    for i, column in enumerate(columns):
        places = np.arange(len(rows)) + i * height
        lengths = [row.get(column, np.nan) for row in rows.values()]
        axes.barh(places, lengths, height, label=column, color=f"C{i}", left=0)
    axes.axvline(1, color="black", lw=0.8)
    axes.set(xscale="log", xlabel="ratio, logarithmic scale")
    axes.set_yticks(np.arange(len(rows)) + 0.4 - height / 2, list(rows))
    axes.invert_yaxis()
    axes.legend()
    return figure
