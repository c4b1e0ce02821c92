"""Shared code of the paper's experiments."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from tqdm import tqdm

import radazo_jax as zo
from common import OUTPUT, figures, options
from common.record import array, numbers, record, write
from common.tables import Table

METHODS: dict[str, Callable[..., optax.GradientTransformation]] = {
    # b1=0.9 and b2=0.99 are the defaults, if a method has them.
    "R-AdaZO": zo.radazo,
    "ZO-AdaMM": zo.zo_adamm,
    "ZO-RMSProp": zo.zo_rmsprop,
    "ZO-SGD": zo.zo_sgd,
    "ZO-signSGD": zo.zo_signsgd,
}


def step_ratio(b1: float) -> float:
    """The ratio of step lengths, R-AdaZO to ZO-AdaMM: √((1 + β₁)/(1 − β₁)).

    At the same learning rate, m and β₂ the two methods divide m by √v. If the noise of
    g dominates v, R-AdaZO's v is smaller by (1 − β₁)/(1 + β₁). So ZO-AdaMM at a
    learning rate this many times higher takes steps of the same length.

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eqs. (17), (19) and (20): the factors of Σ².
    """
    return math.sqrt((1 + b1) / (1 - b1))


# Not a method of the paper: ZO-AdaMM with steps as long as R-AdaZO's.
STRETCH = step_ratio(0.9)
STRETCHED = f"ZO-AdaMM, {STRETCH:.2f} η"

# The paper's settings of synthetic functions: d, K, η, μ.
DIMENSION, NUM_DIRECTIONS, LEARNING_RATE, SMOOTHING = 10_000, 10, 1e-3, 5e-3


def settings(dimension: int, seeds: int, **more: Any) -> dict[str, Any]:
    """The settings in the record of an experiment on a synthetic function."""
    return {
        "dimension": dimension,
        "num_directions": NUM_DIRECTIONS,
        "learning_rate": LEARNING_RATE,
        "smoothing": SMOOTHING,
        **more,
        "start": "uniform in [-1, 1)",
        "seeds": seeds,
    }


# By Okabe and Ito, whose colors all kinds of color vision tell apart.
COLORS = {
    "R-AdaZO": "#D55E00",
    "ZO-AdaMM": "#0072B2",
    "ZO-RMSProp": "#009E73",
    "ZO-SGD": "#777777",
    "ZO-signSGD": "#CC79A7",
    STRETCHED: "#56B4E9",
}


def optimizers(
    learning_rate: float, names: Iterable[str] = METHODS
) -> dict[str, optax.GradientTransformation]:
    """Methods at one learning rate, and ZO-AdaMM with steps as long as R-AdaZO's."""
    result = {name: METHODS[name](learning_rate) for name in names}
    return result | {STRETCHED: zo.zo_adamm(STRETCH * learning_rate)}


class Size(NamedTuple):
    """The size of an experiment, and the folder of its results."""

    steps: int
    seeds: int
    fast: bool
    output: Path


def experiment(
    doc: str, *, steps: int, seeds: int, fast: tuple[int, int]
) -> Callable[[Callable[..., None]], click.Command]:
    """A command with the options that all experiments have.

    Args:
      doc: The docstring of the module.
      steps: Number of steps, by default.
      seeds: Number of seeds, by default.
      fast: Steps and seeds with `--fast`.
    """
    shared = [
        click.option("--steps", type=options.COUNT, help=f"By default, {steps}."),
        click.option("--seeds", type=options.COUNT, help=f"By default, {seeds}."),
        click.option("--fast", is_flag=True, help="Runs little, to see that it works."),
        click.option(
            "--output",
            type=click.Path(file_okay=False, path_type=Path),
            default=OUTPUT / "paper",
            help="A folder for the JSON and the PNG.",
        ),
    ]

    def decorated(run: Callable[..., None]) -> click.Command:
        @functools.wraps(run)
        def main(
            steps: int | None, seeds: int | None, fast: bool, output: Path, **own: Any
        ) -> None:
            usual = quick if fast else full
            run(Size(steps or usual[0], seeds or usual[1], fast, output), **own)

        full, quick = (steps, seeds), fast
        return options.command(doc)(functools.reduce(lambda f, o: o(f), shared, main))

    return decorated


def seed_keys(seeds: int) -> jax.Array:
    """The keys of the seeds: fewer seeds have the first keys of more seeds."""
    fold = functools.partial(jax.random.fold_in, jax.random.key(0))
    return jax.vmap(fold)(jnp.arange(seeds, dtype=jnp.uint32))


def compiled(step: Callable[..., tuple[Any, Any]], chunk: int) -> Callable[..., Any]:
    """`chunk` steps of all seeds as one program, as `run` says."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run_chunk(states: Any, keys: jax.Array, start: jax.Array, *shared: Any) -> Any:
        def all_seeds(states: Any, t: jax.Array) -> tuple[Any, Any]:
            folded = jax.vmap(jax.random.fold_in, (0, None))(keys, t)
            in_axes = (0, None, 0, *(None for _ in shared))
            return jax.vmap(step, in_axes)(folded, t, states, *shared)

        times = start + jnp.arange(chunk, dtype=jnp.uint32)
        states, outs = jax.lax.scan(all_seeds, states, times)
        return states, jax.tree.map(lambda out: out.mean(axis=0), outs)

    return run_chunk


def run(
    step: Callable[[jax.Array, jax.Array, Any], tuple[Any, Any]],
    keys: jax.Array,
    states: Any,
    num_steps: int,
    chunk: int,
    label: str,
    at_chunk: Callable[[Any, Any], str],
) -> tuple[Any, Any]:
    """Runs all seeds side by side, in compiled chunks of steps, under a progress bar.

    Args:
      step: `(key, t, state) -> (state, out)` of one seed, with t = 0, 1, … and a key
        for each; outs are trees of small arrays, whose means over a chunk are kept.
      keys: A key for each seed.
      states: States of the first steps, with a leading axis of seeds.
      num_steps: Number of steps, rounded up to whole chunks.
      chunk: Number of steps per chunk.
      label: Text before the bar.
      at_chunk: Called after each chunk with its last states and its out; its result
        is shown after the bar.

    Returns:
      The last states, and the outs, stacked: arrays [chunks, seeds, ...].
    """
    outs, run_chunk = [], compiled(step, chunk)
    states = jax.tree.map(jnp.copy, states)  # The chunks work in place.
    with tqdm(total=math.ceil(num_steps / chunk) * chunk, desc=label, unit="step") as b:
        for start in range(0, num_steps, chunk):
            states, out = run_chunk(states, keys, jnp.uint32(start))
            outs.append(jax.tree.map(np.asarray, out))
            b.set_postfix_str(at_chunk(states, outs[-1]), refresh=False)
            b.update(chunk)
    return states, jax.tree.map(lambda *leaves: np.stack(leaves), *outs)


def finish(
    path: Path,
    content: dict[str, Any],
    tables: Callable[[dict[str, Any]], Sequence[Table]],
    plot: Callable[[dict[str, Any]], plt.Figure] | None = None,
) -> None:
    """Writes the record and its figure, and prints the tables."""
    content = record() | numbers(content)
    write(path.with_name(f"{path.name}.json"), content)
    for table in tables(content):
        table.show()
    if plot is not None:
        figures.save(plot(content), path.with_name(f"{path.name}.png"))
    print(f"Wrote {path}.json")


def mean_std(values: Any, digits: int = 3) -> str:
    """Mean ± standard deviation, to `digits` significant digits of the mean."""
    values = array(values)
    if not values.size:
        return ""
    std = values.std(ddof=1) if values.size > 1 else 0.0
    return f"{significant(values.mean(), digits)} ± {significant(std, 2)}"


def significant(value: float, digits: int) -> str:
    if not np.isfinite(value):
        return "∞"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}" if abs(value) >= 1e-3 else f"{value:.{digits - 1}e}"
