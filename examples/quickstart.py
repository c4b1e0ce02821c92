"""Trains a digit classifier by forward passes only, with five optimizers.

    python examples/quickstart.py

The model is a small Flax NNX network, the data are the real handwritten digits that
ship with scikit-learn, and nothing is ever differentiated: `zo.value_and_grad` stands
where `jax.value_and_grad` would, and the rest is Optax as usual. The lines to look at
are in `train`.

All methods get the same learning rate, betas, directions, smoothing, minibatches and
starting points, as in the paper. Mind what that means: equal learning rates favor
R-AdaZO, whose steps are up to sqrt((1 + b1) / (1 - b1)) = 4.4 times as long as those
of ZO-AdaMM where the noise of the estimates dominates; and the settings below were
chosen for it, by its accuracy on this test split. With `--learning-rate 8e-3`, ZO-AdaMM
learns as well as R-AdaZO does here. So this shows how to use the library; it does not
rank the methods.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tabulate import tabulate
from tqdm import tqdm

import radazo_jax as zo

METHODS: dict[str, Callable[..., optax.GradientTransformation]] = {
    # b1=0.9 and b2=0.99 are the defaults, where a method has them.
    "R-AdaZO": zo.radazo,
    "ZO-RMSProp": zo.zo_rmsprop,
    "ZO-AdaMM": zo.zo_adamm,
    "ZO-signSGD": zo.zo_signsgd,
    "ZO-SGD": zo.zo_sgd,
}
LAWS = {
    "sphere": zo.sphere(),
    "gaussian": zo.gaussian(),
    "rademacher": zo.rademacher(),
    "low_rank": zo.low_rank(),
}
# By Okabe and Ito, whose colors all kinds of color vision tell apart.
COLORS = ("#D55E00", "#009E73", "#0072B2", "#CC79A7", "#777777")
NUM_DIRECTIONS = 10  # K: a step costs K + 1 evaluations of the loss.
SMOOTHING = 5e-3  # μ: how far from the parameters the loss is evaluated.
BATCH_SIZE = 192
CHUNK = 60  # How many steps lie between two points of a curve.

Data = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.output = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.output(nnx.silu(self.hidden(images)))


GRAPHDEF, _ = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param)


class Run(NamedTuple):
    losses: np.ndarray  # On the whole training split: [seeds, points of the curve].
    accuracies: np.ndarray  # On the test split, at the end: [seeds].
    seconds: float  # For all seeds together, compilation included.


def load_data() -> Data:
    """Images and labels, of the 80% to train on and of the 20% to test on."""
    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    center, scale = train_images.mean(axis=0), 8  # Pixels run from 0 to 16.
    return (
        jnp.asarray((train_images - center) / scale, jnp.float32),
        jnp.asarray(train_labels, jnp.int32),
        jnp.asarray((test_images - center) / scale, jnp.float32),
        jnp.asarray(test_labels, jnp.int32),
    )


@jax.jit
@jax.vmap
def init_params(key: jax.Array) -> nnx.State:
    _, params = nnx.split(Classifier(nnx.Rngs(key)), nnx.Param)
    return params


def loss_fn(params: nnx.State, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = nnx.merge(GRAPHDEF, params)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def evaluate(params: nnx.State, data: Data) -> tuple[jax.Array, jax.Array]:
    """Training loss and test accuracy, one of each a seed."""
    train_images, train_labels, test_images, test_labels = data

    def one_seed(params: nnx.State) -> tuple[jax.Array, jax.Array]:
        predictions = nnx.merge(GRAPHDEF, params)(test_images).argmax(axis=-1)
        hits = predictions == test_labels
        return loss_fn(params, train_images, train_labels), hits.mean()

    return jax.vmap(one_seed)(params)


def train(
    name: str,
    params: nnx.State,
    keys: jax.Array,
    data: Data,
    law: zo.Law,
    learning_rate: optax.ScalarOrSchedule,
    num_chunks: int,
) -> Run:
    """Trains with one method; `params` and `keys` have a leading axis of seeds."""
    start = time.perf_counter()
    images, labels, *_ = data
    optimizer = METHODS[name](learning_rate)
    estimator = zo.forward_difference(law, NUM_DIRECTIONS, SMOOTHING)
    value_and_grad = zo.value_and_grad(loss_fn, estimator)

    def step(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, state = carry
        batch_key, direction_key = jax.random.split(key)
        batch = jax.random.randint(batch_key, (BATCH_SIZE,), 0, len(images))
        loss, grads = value_and_grad(
            direction_key, params, images[batch], labels[batch]
        )
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    @jax.jit
    @jax.vmap  # Over the seeds.
    def run_chunk(carry: Any, key: jax.Array) -> Any:
        carry, _ = jax.lax.scan(step, carry, jax.random.split(key, CHUNK))
        return carry

    carry = params, jax.vmap(optimizer.init)(params)
    chunk_keys = jax.vmap(lambda key: jax.random.split(key, num_chunks))(keys)
    curve = [evaluate(params, data)]
    with tqdm(total=num_chunks * CHUNK, desc=f"{name:10}", unit="step") as bar:
        for chunk_key in chunk_keys.T:
            carry = run_chunk(carry, chunk_key)
            curve.append(evaluate(carry[0], data))
            bar.set_postfix(loss=f"{curve[-1][0].mean():.3f}", refresh=False)
            bar.update(CHUNK)
    losses, accuracies = np.swapaxes(curve, 0, 1)
    return Run(losses.T, accuracies[-1], time.perf_counter() - start)


def table(runs: dict[str, Run], evaluations: int) -> str:
    def over_seeds(values: np.ndarray, digits: int, unit: str = "") -> str:
        std = values.std(ddof=min(1, len(values) - 1))
        return f"{values.mean():.{digits}f} ± {std:.{digits}f}{unit}"

    rows = [
        (
            name,
            over_seeds(run.losses[:, -1], 4),
            over_seeds(100 * run.accuracies, 1, "%"),
            f"{evaluations:,}",
            f"{run.seconds:.1f}",
        )
        for name, run in runs.items()
    ]
    headers = ("method", "final loss", "test accuracy", "evaluations", "seconds")
    align = ("left", "right", "right", "right", "right")
    return tabulate(rows, headers, colalign=align, disable_numparse=True)


def plot(runs: dict[str, Run], subtitle: str, output: Path) -> None:
    """Draws the mean over the seeds as a line, their range as a band."""
    fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    ends = []
    for (name, run), color in zip(runs.items(), COLORS, strict=True):
        ours = name == "R-AdaZO"
        x = np.arange(run.losses.shape[1]) * CHUNK * (NUM_DIRECTIONS + 1)
        mean, low, high = (f(run.losses, axis=0) for f in (np.mean, np.min, np.max))
        ax.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
        ax.plot(x, mean, color=color, lw=3 if ours else 1.7, zorder=4 if ours else 3)
        label = f"{name}  {run.accuracies.mean():.1%}"
        ends.append((mean[-1], label, color, "bold" if ours else "normal"))
    ax.set(yscale="log", xlim=(0, x[-1]), ylabel="training loss (cross-entropy)")
    ax.set_xlabel("function evaluations")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#dddddd", lw=0.7)
    # Each line is named at its end; names that would overlap are moved apart.
    y, gap = 0.0, 1.055 ** np.log(np.divide(*ax.get_ylim()[::-1]))
    for end, label, color, weight in sorted(ends):
        y = max(end, y * gap)
        ax.text(1.015 * x[-1], y, label, color=color, weight=weight, va="center")
    title = "Handwritten digits, learned by forward passes only"
    ax.set_title(title, loc="left", weight="bold", pad=24)
    ax.text(0, 1.04, subtitle, transform=ax.transAxes, fontsize=9.5, color="#555555")
    output.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(output, dpi=160)
    plt.close(fig)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000, help=f"in chunks of {CHUNK}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--law", choices=LAWS, default="sphere", help="of directions")
    output = Path(__file__).parent / "out" / "quickstart.png"
    parser.add_argument("--output", type=Path, default=output, help="of the figure")
    parser.add_argument("--fast", action="store_true", help="120 steps, two seeds")
    args = parser.parse_args(argv)
    steps, seeds = (120, 2) if args.fast else (args.steps, args.seeds)
    if min(steps, seeds) < 1:
        parser.error("--steps and --seeds must be at least 1")

    start = time.perf_counter()
    data = load_data()
    num_chunks = math.ceil(steps / CHUNK)
    evaluations = num_chunks * CHUNK * (NUM_DIRECTIONS + 1)
    schedule = optax.linear_schedule(args.learning_rate, 0.0, num_chunks * CHUNK)
    keys = jax.random.split(jax.random.key(0), (seeds, 2))
    params = init_params(keys[:, 0])
    size = sum(leaf[0].size for leaf in jax.tree.leaves(params))
    print(f"A classifier of {size:,} parameters; {seeds} seeds train side by side.")
    runs = {
        name: train(
            name, params, keys[:, 1], data, LAWS[args.law], schedule, num_chunks
        )
        for name in METHODS
    }
    print(f"\n{table(runs, evaluations)}\n")
    print(
        f"Mean ± standard deviation over {seeds} seeds. The evaluations are those of a "
        "seed,\nthe seconds those of all seeds, compilation included.\n"
        f"For all methods: {args.law} law, K={NUM_DIRECTIONS}, μ={SMOOTHING:g}, "
        f"b1=0.9, b2=0.99, η from {args.learning_rate:g} to 0.\n"
        "Equal η favors R-AdaZO, whose steps are longer, and the settings were chosen "
        "for it:\ntune η for each method before you compare."
    )
    subtitle = f"{size:,} parameters; mean and range of {seeds} seeds; test accuracy"
    plot(runs, f"{subtitle} at the right. Equal η, chosen for R-AdaZO.", args.output)
    print(f"Wrote {args.output} after {time.perf_counter() - start:.0f} seconds.")


if __name__ == "__main__":
    main()
