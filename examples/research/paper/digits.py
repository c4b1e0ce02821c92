"""Five methods on the classifier of the quickstart, at the same learning rate.

    python -m paper.digits

All methods get the same learning rate, betas, directions, smoothing, minibatches and
starting points, as in the paper. Equal rates favor R-AdaZO, whose steps are up to
sqrt((1 + b1) / (1 - b1)) = 4.4 times as long as ZO-AdaMM's if the noise of the
estimates dominates, and the rate was chosen for it. With `--learning-rate 8e-3`,
ZO-AdaMM learns as well as R-AdaZO does here: `tuned.py` tunes the rate of each method.
"""

from typing import Any

import click
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import radazo_jax as zo
from common import figures, options
from common.distributions import DISTRIBUTIONS
from common.record import array
from common.tables import Table
from paper import common
from paper.common import COLORS, METHODS

NUM_DIRECTIONS = 10  # K
SMOOTHING = 5e-3  # μ
BATCH_SIZE = 192
CHUNK = 60  # Steps between two points of a curve.


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.output = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.output(nnx.silu(self.hidden(images)))


GRAPHDEF, _ = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param)


def init(key: jax.Array) -> nnx.State:
    return nnx.state(Classifier(nnx.Rngs(key)), nnx.Param)


def loss_fn(params: nnx.State, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = nnx.merge(GRAPHDEF, params)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def load_data() -> list[jax.Array]:
    """Images of 64 pixels to train and to test on, and the labels of both."""
    images, labels = load_digits(return_X_y=True)
    images = (images - images.mean(axis=0)) / 8
    return [jnp.asarray(x) for x in train_test_split(images, labels, random_state=0)]


def train(
    name: str,
    distribution: zo.Distribution,
    learning_rate: float,
    num_steps: int,
    keys: jax.Array,
) -> dict[str, Any]:
    """Losses on all training digits [seeds, points], accuracies at the end [seeds]."""
    images, test_images, labels, test_labels = load_data()
    optimizer = METHODS[name](optax.linear_schedule(learning_rate, 0.0, num_steps))
    estimator = zo.forward_difference(distribution, NUM_DIRECTIONS, SMOOTHING)
    value_and_grad = zo.value_and_grad(loss_fn, estimator)

    @jax.jit
    @jax.vmap
    def start(key: jax.Array) -> Any:
        params = init(key)
        return params, optimizer.init(params)

    def step(key: jax.Array, t: jax.Array, state: Any) -> tuple[Any, None]:
        params, moments = state
        batch_key, direction_key = jax.random.split(key)
        batch = jax.random.randint(batch_key, (BATCH_SIZE,), 0, len(images))
        _, grads = value_and_grad(direction_key, params, images[batch], labels[batch])
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), None

    @jax.jit
    @jax.vmap
    def evaluate(params: nnx.State) -> tuple[jax.Array, jax.Array]:
        hits = nnx.merge(GRAPHDEF, params)(test_images).argmax(axis=-1) == test_labels
        return loss_fn(params, images, labels), hits.mean()

    keys = jax.vmap(jax.random.split)(keys)
    state = start(keys[:, 0])
    curve = [evaluate(state[0])]

    def at_chunk(state: Any, out: None) -> str:
        curve.append(evaluate(state[0]))
        return f"loss={curve[-1][0].mean():.3f}"

    common.run(step, keys[:, 1], state, num_steps, CHUNK, f"{name:10}", at_chunk)
    losses, accuracies = np.swapaxes(curve, 0, 1)
    return {"losses": losses.T, "accuracies": accuracies[-1]}


def tables(content: dict[str, Any]) -> list[Table]:
    settings = content["settings"]
    caption = (
        f"{content['evaluations'][-1]:,} evaluations, {settings['seeds']} seeds, "
        f"{settings['distribution']}, K = {NUM_DIRECTIONS}, μ = {SMOOTHING:g}, "
        f"η from {settings['learning_rate']:g} to 0 for all, chosen for R-AdaZO"
    )
    rows = []
    for name, run in content["runs"].items():
        hits = 100 * array(run["accuracies"])
        accuracy = (
            f"{hits.mean():.1f} ± {hits.std(ddof=1) if hits.size > 1 else 0:.1f} %"
        )
        rows.append((name, common.mean_std(array(run["losses"])[:, -1]), accuracy))
    return [Table(caption, ("method", "final loss", "test accuracy"), rows)]


def plot(content: dict[str, Any]) -> plt.Figure:
    figure, [[axes]] = figures.panels(1, 1, (8, 4.5))
    for name, run in content["runs"].items():
        label = f"{name}, {array(run['accuracies']).mean():.1%}"
        losses = array(run["losses"])
        style = {"color": COLORS[name], "label": label}
        figures.band(axes, content["evaluations"], losses, **style)
    axes.set(yscale="log", xlabel="evaluations of the loss", ylabel="training loss")
    axes.legend(title="test accuracy", frameon=False)
    return figure


@common.experiment(__doc__, steps=3000, seeds=3, fast=(120, 2))
@click.option("--learning-rate", type=options.POSITIVE, default=2e-3)
@click.option(
    "--distribution", type=click.Choice(list(DISTRIBUTIONS)), default="sphere"
)
def main(size: common.Size, learning_rate: float, distribution: str) -> None:
    directions, keys = DISTRIBUTIONS[distribution], common.seed_keys(size.seeds)
    runs = {
        name: train(name, directions, learning_rate, size.steps, keys)
        for name in METHODS
    }
    points = runs["R-AdaZO"]["losses"].shape[1]
    content = {
        "settings": {
            "distribution": distribution,
            "learning_rate": learning_rate,
            "num_directions": NUM_DIRECTIONS,
            "smoothing": SMOOTHING,
            "seeds": size.seeds,
        },
        "evaluations": np.arange(points) * CHUNK * (NUM_DIRECTIONS + 1),
        "runs": runs,
    }
    common.finish(size.output / "digits", content, tables, plot)


if __name__ == "__main__":
    main()
