"""Trains a classifier of handwritten digits by forward passes only.

    python examples/quickstart.py

The model is Flax NNX, the digits are those that ship with scikit-learn, and nothing is
differentiated: `value_and_grad` comes from `radazo_jax`, the rest is Optax as usual.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import radazo_jax as zo
import radazo_jax.nnx as zo_nnx

BATCH_SIZE = 192
# Ten directions: a step is eleven evaluations of the loss, all on one minibatch.
ESTIMATOR = zo.forward_difference(num_directions=10, smoothing=5e-3)


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.output = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.output(nnx.silu(self.hidden(images)))


def loss_fn(model: Classifier, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(
    key: jax.Array, model: Classifier, optimizer: nnx.Optimizer, data: list[jax.Array]
) -> jax.Array:
    batch_key, direction_key = jax.random.split(key)
    batch = jax.random.randint(batch_key, (BATCH_SIZE,), 0, len(data[0]))
    value_and_grad = zo_nnx.value_and_grad(loss_fn, ESTIMATOR)
    loss, gradient = value_and_grad(direction_key, model, *(x[batch] for x in data))
    optimizer.update(model, gradient)
    return loss


def load_data() -> list[jax.Array]:
    """Images of 64 pixels to train and to test on, and the labels of both."""
    images, labels = load_digits(return_X_y=True)
    images = (images - images.mean(axis=0)) / 8
    return [jnp.asarray(x) for x in train_test_split(images, labels, random_state=0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    path = pathlib.Path(__file__).parent / "out" / "quickstart.png"
    parser.add_argument("--output", type=pathlib.Path, default=path, help="a picture")
    args = parser.parse_args()
    images, test_images, labels, test_labels = load_data()
    model = Classifier(nnx.Rngs(0))
    learning_rate = optax.linear_schedule(2e-3, 0.0, args.steps)  # find_learning_rate's
    optimizer = nnx.Optimizer(model, zo.radazo(learning_rate), wrt=nnx.Param)
    losses = []
    for key in (bar := tqdm(jax.random.split(jax.random.key(0), args.steps))):
        losses.append(train_step(key, model, optimizer, [images, labels]))
        if len(losses) % 100 == 0:
            bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
    accuracy = jnp.mean(model(test_images).argmax(axis=-1) == test_labels)
    print(f"Accuracy on {len(test_labels)} digits it has not seen: {accuracy:.1%}")

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(range(11, 11 * args.steps + 1, 11), losses, lw=0.8, color="#D55E00")
    axes.set(yscale="log", xlabel="evaluations of the loss", ylabel="training loss")
    axes.set_title(f"Handwritten digits, by forward passes only: {accuracy:.1%} right")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=160)
    print(f"The picture is {args.output}.")


if __name__ == "__main__":
    main()
