"""Trains a classifier with 16 seeds at 4 learning rates, in one compiled program.

    python examples/many_seeds.py

`solver` makes pure functions, so that a whole run is a `lax.scan`, and all 64 runs are
a `vmap` of it. Each seed has its own start, directions and minibatches.
"""

import argparse

import jax
import jax.numpy as jnp
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import radazo_jax as zo

BATCH_SIZE = 64
RATES = (5e-4, 2e-3, 8e-3, 3.2e-2)
ESTIMATOR = zo.forward_difference(num_directions=10, smoothing=5e-3)


def init(key):
    draw = jax.nn.initializers.lecun_normal()
    hidden, output = jax.random.split(key)
    return {
        "hidden": (draw(hidden, (64, 32)), jnp.zeros(32)),
        "output": (draw(output, (32, 10)), jnp.zeros(10)),
    }


def logits(params, images):
    (w1, b1), (w2, b2) = params["hidden"], params["output"]
    return jax.nn.silu(images @ w1 + b1) @ w2 + b2


def load_data():
    """Images of 64 pixels to train and to test on, and the labels of both."""
    images, labels = load_digits(return_X_y=True)
    images = (images - images.mean(axis=0)) / 8
    split = train_test_split(images, labels, random_state=0)
    return [jnp.asarray(x, x.dtype.kind + "4") for x in split]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=16)
    args = parser.parse_args()
    images, test_images, labels, test_labels = load_data()

    def sample(key):
        return jax.random.randint(key, (BATCH_SIZE,), 0, len(images))

    def loss(params, batch):
        rows = jax.nn.log_softmax(logits(params, images[batch]))
        return -jnp.take_along_axis(rows, labels[batch][:, None], axis=1).mean()

    def run(rate, key):
        """The accuracy of one run on digits that it has not seen."""
        start_key, run_key = jax.random.split(key)
        solver = zo.solver(loss, zo.radazo(rate), ESTIMATOR, sample=sample)
        state, _ = jax.lax.scan(
            lambda state, _: (solver.step(state)[0], None),
            solver.init(init(start_key), run_key),
            length=args.steps,
        )
        found = logits(state.params, test_images).argmax(axis=-1)
        return jnp.mean(found == test_labels)

    all_runs = jax.vmap(jax.vmap(run, (None, 0)), (0, None))
    keys = jax.random.split(jax.random.key(0), args.seeds)
    accuracies = jax.jit(all_runs)(jnp.asarray(RATES), keys)
    print(f"{args.seeds} seeds, {args.steps} steps: accuracy on new digits")
    print("learning rate  median   worst    best")
    for rate, row in zip(RATES, accuracies, strict=True):
        numbers = (jnp.median(row), row.min(), row.max())
        print(f"{rate:13g}" + "".join(f"{number:8.1%}" for number in numbers))


if __name__ == "__main__":
    main()
