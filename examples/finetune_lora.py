"""Fine-tunes a network with LoRA adapters by forward passes only, and resumes.

    python examples/finetune_lora.py

A network of handwritten digits is trained for a moment by backpropagation. Then the
digits are mirrored, the network is frozen, and only adapters of rank 4 are tuned, with
R-AdaZO. Orbax writes a checkpoint every 500 steps; the same command resumes from
the latest one, with the same numbers as an uninterrupted run.
"""

import argparse
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import trange

import radazo_jax as zo
import radazo_jax.nnx as zo_nnx

BATCH_SIZE = 128
FROZEN = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))  # A LoRAParam is a Param, too.
ESTIMATOR = zo.forward_difference(num_directions=10, smoothing=1e-2)


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.LoRALinear(64, 256, lora_rank=4, rngs=rngs)
        self.second = nnx.LoRALinear(256, 256, lora_rank=4, rngs=rngs)
        self.output = nnx.LoRALinear(256, 10, lora_rank=4, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.output(nnx.relu(self.second(nnx.relu(self.first(images)))))


def loss_fn(model: Network, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def pretrain_step(
    model: Network, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> None:
    frozen = nnx.DiffState(0, FROZEN)
    optimizer.update(model, nnx.grad(loss_fn, argnums=frozen)(model, images, labels))


@nnx.jit
def tune_step(
    key: jax.Array, model: Network, optimizer: nnx.Optimizer, data: list[jax.Array]
) -> jax.Array:
    batch_key, direction_key = jax.random.split(key)
    batch = jax.random.randint(batch_key, (BATCH_SIZE,), 0, len(data[0]))
    value_and_grad = zo_nnx.value_and_grad(loss_fn, ESTIMATOR, wrt=nnx.LoRAParam)
    loss, gradient = value_and_grad(direction_key, model, *(x[batch] for x in data))
    optimizer.update(model, gradient)
    return loss


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    folder = pathlib.Path(__file__).parent / "out" / "finetune_lora"
    parser.add_argument("--output", type=pathlib.Path, default=folder)
    parser.add_argument("--checkpoint-every", type=int, default=500)
    args = parser.parse_args(argv)

    images, labels = load_digits(return_X_y=True)
    split = train_test_split((images - images.mean(axis=0)) / 8, labels, random_state=0)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    mirrored, test_mirrored = (
        x.reshape(-1, 8, 8)[:, :, ::-1].reshape(-1, 64) for x in (images, test_images)
    )

    def accuracy(images: jax.Array) -> jax.Array:
        return jnp.mean(model(images).argmax(axis=-1) == test_labels)

    model = Network(nnx.Rngs(0))
    # Constant, so below half of the rate at which `zo.find_learning_rate` begins.
    radazo = zo.radazo(6e-4, bias_correction=True)
    optimizer = nnx.Optimizer(model, radazo, wrt=nnx.LoRAParam)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(args.output.absolute(), options=options) as checkpoints:
        first = checkpoints.latest_step() or 0
        if first:
            saved = ocp.args.StandardRestore(nnx.state((model, optimizer)))
            nnx.update((model, optimizer), checkpoints.restore(first, args=saved))
            print(f"Goes on from step {first}.")
        else:
            adam = nnx.Optimizer(model, optax.adam(1e-3), wrt=FROZEN)
            for _ in range(100):
                pretrain_step(model, adam, images, labels)
            print(f"Accuracy on digits: {accuracy(test_images):.1%}")
        print(f"Accuracy on mirrored digits: {accuracy(test_mirrored):.1%}")
        for i in (bar := trange(first, args.steps)):
            key = jax.random.fold_in(jax.random.key(1), i)
            loss = tune_step(key, model, optimizer, [mirrored, labels])
            if (i + 1) % args.checkpoint_every == 0 or i + 1 == args.steps:
                bar.set_postfix(loss=f"{loss:.4f}")
                state = ocp.args.StandardSave(nnx.state((model, optimizer)))
                checkpoints.save(i + 1, args=state)
    print(f"Accuracy on mirrored digits, tuned: {accuracy(test_mirrored):.1%}")


if __name__ == "__main__":
    main()
