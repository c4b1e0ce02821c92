"""Iterations to a successful black-box attack (the paper's table of that name).

    python examples/paper/attack.py
    python examples/paper/attack.py --data folder/with/MNIST

A convolutional network that reads digits is to see the digit y + 1 where it sees y
(0 after 9), by a change of no pixel by more than 0.2. The loss is
max over j ≠ t of log p_j, less log p_t, for the target t: below zero, the attack has
succeeded. K=2, η=0.01, μ=0.005, β₁=0.9, β₂=0.99, as in the paper.

Two settings. *Mapped*: the variable lies in [0, 10] and is mapped linearly to the box
of the perturbation, as in the public code of the set-up that the paper cites, so that a
step of η in it moves a pixel by η/25. *Unmapped*: the variable is the perturbation.

The images are those of scikit-learn, enlarged to 28×28, or MNIST's, from IDX files.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import network
import numpy as np
import optax
from common import METHODS, STRETCH, STRETCHED, Table
from tqdm import tqdm

import radazo_jax as zo

BOX = 0.2  # How far a pixel may change.
LEARNING_RATE = 1e-2  # η
SMOOTHING = 5e-3  # μ
NUM_DIRECTIONS = 2  # K
CHUNK = 100
PICTURED = 6  # How many images the picture shows at most.
# Setting -> what one unit of the variable is in pixels.
SETTINGS = {"mapped": 2 * BOX / 10, "unmapped": 1.0}
UNMAPPED = 4  # How many times fewer iterations this setting gets: its steps are longer.


class State(NamedTuple):
    variable: jax.Array  # [28, 28, 1], zero where no pixel is changed.
    optimizer_state: Any
    iterations: jax.Array  # (), int32: until success, or so far.
    succeeded: jax.Array  # (), bool.


class Case(NamedTuple):
    image: jax.Array  # [28, 28, 1]
    target: jax.Array  # (), int32.
    unit: jax.Array  # (), what one unit of the variable is in pixels.


def optimizers() -> dict[str, optax.GradientTransformation]:
    result = {
        name: METHODS[name](LEARNING_RATE)
        for name in ("ZO-RMSProp", "ZO-AdaMM", "R-AdaZO")
    }
    return result | {STRETCHED: METHODS["ZO-AdaMM"](STRETCH * LEARNING_RATE)}


def adversarial(case: Case, variable: jax.Array) -> jax.Array:
    return jnp.clip(case.image + case.unit * variable, 0, 1)


def attack_step(params: network.Params, optimizer: optax.GradientTransformation) -> Any:
    """One step of all seeds, which does nothing to those that have succeeded.

    The variable is centered, from -5 to 5 where the paper's lies in [0, 10]: the same
    to any of the methods. It is clipped to its box after each step.
    """
    estimator = zo.forward_difference(zo.sphere(), NUM_DIRECTIONS, SMOOTHING)

    def loss(variable: jax.Array, case: Case) -> jax.Array:
        image = adversarial(case, variable)
        rows = network.log_probabilities(params, image[None])[0]
        others = jnp.where(jnp.arange(10) == case.target, -jnp.inf, rows)
        return others.max() - rows[case.target]

    value_and_grad = zo.value_and_grad(loss, estimator)

    def step(key: jax.Array, state: State, case: Case) -> State:
        value, grad = value_and_grad(key, state.variable, case)
        updates, optimizer_state = optimizer.update(
            grad, state.optimizer_state, state.variable
        )
        limit = BOX / case.unit
        moved = jnp.clip(state.variable + updates, -limit, limit)
        succeeded = state.succeeded | (value < 0)
        variable = jnp.where(succeeded, state.variable, moved)
        iterations = state.iterations + jnp.where(succeeded, 0, 1)
        return State(variable, optimizer_state, iterations, succeeded)

    def all_seeds(carry: Any, t: jax.Array) -> tuple[Any, jax.Array]:
        keys, states, case = carry
        folded = jax.vmap(jax.random.fold_in, (0, None))(keys, t)
        states = jax.vmap(step, (0, 0, None))(folded, states, case)
        return (keys, states, case), states.succeeded.all().astype(jnp.float32)

    return all_seeds


def attack(
    run_chunk: Callable[[Any, jax.Array], tuple[Any, Any]],
    optimizer: optax.GradientTransformation,
    cases: Sequence[Case],
    keys: jax.Array,
    max_steps: int,
    chunk: int,
    label: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Iterations [cases, seeds], inf where not successful; variables [cases, …]."""
    iterations, variables = [], []
    with tqdm(total=len(cases), desc=label, unit="image") as bar:
        for case in cases:
            zeros = jnp.zeros((len(keys), *case.image.shape))
            nothing = jnp.zeros(len(keys), jnp.int32)
            states = State(
                zeros, jax.vmap(optimizer.init)(zeros), nothing, nothing.astype(bool)
            )
            # The chunks work in place on their carry.
            carry: Any = jax.tree.map(jnp.copy, (keys, states, case))
            for start in range(0, max_steps, chunk):
                carry, all_done = run_chunk(carry, jnp.uint32(start))
                bar.set_postfix(iteration=start + chunk)
                # The mean over the chunk is above zero if its last step says so.
                if all_done > 0:
                    break
            states = carry[1]
            done = np.asarray(states.succeeded)
            iterations.append(np.where(done, states.iterations, np.inf))
            variables.append(np.asarray(states.variable))
            bar.update()
    return np.stack(iterations), np.stack(variables)


def tables(content: dict[str, Any]) -> list[Table]:
    result = []
    for setting, runs in content["iterations"].items():
        baseline = common.array(runs["ZO-RMSProp"])
        rows = []
        for method, values in runs.items():
            iterations = common.array(values)
            hit = np.isfinite(iterations)
            both = hit & np.isfinite(baseline)
            speedup = (
                baseline[both].mean() / iterations[both].mean() if both.any() else 0
            )
            rows.append(
                (
                    method,
                    common.mean_std(iterations[hit]) if hit.any() else "",
                    f"{speedup:.2f}×" if both.any() else "",
                    f"{hit.sum()} of {hit.size}",
                )
            )
        limit = content["settings"]["max_iterations"][setting]
        caption = (
            f"Iterations to a successful attack, {setting}, of {limit:,} at most: mean "
            "of the successes; speedup over ZO-RMSProp, where both succeed"
        )
        headers = ("method", "iterations", "speedup", "successes")
        result.append(Table(caption, headers, rows))

        names = list(runs)
        rows = []
        for i, image in enumerate(content["images"]):
            means = {name: common.array(runs[name])[i].mean() for name in names}
            other, ours = means["ZO-AdaMM"], means["R-AdaZO"]
            both = np.isfinite([other, ours]).all()
            rows.append(
                (
                    f"{image['index']}: {image['label']} → {image['target']}",
                    *(common.significant(means[name], 4) for name in names),
                    f"{other / ours:.2f}" if both else "",
                )
            )
        caption = (
            f"Image by image, {setting}: mean iterations of the seeds (∞ where one "
            "did not succeed), and those of ZO-AdaMM over those of R-AdaZO"
        )
        result.append(Table(caption, ("test image", *names, "ratio"), rows))
    return result


def plot(
    cases: Sequence[Case], variables: np.ndarray, seen: Sequence[tuple[int, int]]
) -> plt.Figure:
    """Image, perturbation and adversarial image, of R-AdaZO's first seed."""
    figure, all_axes = plt.subplots(
        3, len(cases), figsize=(1.9 * len(cases) + 0.6, 6), layout="constrained"
    )
    all_axes = np.reshape(all_axes, (3, len(cases)))
    for column, (case, variable) in enumerate(zip(cases, variables, strict=True)):
        before, after = seen[column]
        changed = adversarial(case, variable[0])
        shown = (
            (f"seen as {before}", case.image, {"cmap": "gray", "vmin": 0, "vmax": 1}),
            (
                "perturbation",
                changed - case.image,
                {"cmap": "RdBu", "vmin": -BOX, "vmax": BOX},
            ),
            (f"seen as {after}", changed, {"cmap": "gray", "vmin": 0, "vmax": 1}),
        )
        for axes, (title, pixels, style) in zip(
            all_axes[:, column], shown, strict=True
        ):
            drawn = axes.imshow(pixels[..., 0], **style)
            axes.set_title(title, fontsize=10)
            axes.set(xticks=[], yticks=[])
            if title == "perturbation" and column == len(cases) - 1:
                figure.colorbar(drawn, ax=axes, shrink=0.8)
    return figure


def choose(
    args: Any, parser: common.Parser, data: network.Data, predicted: np.ndarray
) -> list[int]:
    """The indices of the test images to attack."""
    labels = data.test_labels
    if args.image is None:
        right = np.flatnonzero(predicted == labels)
        right = (
            right[labels[right] != args.target] if args.target is not None else right
        )
        if right.size < args.images:
            parser.error(
                f"argument --images: only {right.size} test images can be attacked, "
                f"got {args.images}"
            )
        return right[: args.images].tolist()
    for index in args.image:
        if not 0 <= index < len(labels):
            parser.error(
                f"argument --image: must be from 0 to {len(labels) - 1}, got {index}"
            )
        if predicted[index] != labels[index]:
            parser.error(
                f"argument --image: the network already takes image {index}, a "
                f"{labels[index]}, for a {predicted[index]}: choose another"
            )
        if args.target == labels[index]:
            parser.error(
                f"argument --target: {args.target} is already the label of image "
                f"{index}: choose another digit"
            )
    return args.image


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__, steps=14_000, seeds=5, fast=(40, 2))
    parser.add_argument("--data", type=Path, help="folder with MNIST's IDX files")
    parser.add_argument(
        "--images", type=common.at_least_one, help="how many of the test images"
    )
    parser.add_argument("--image", type=int, nargs="+", help="which, by their indices")
    parser.add_argument(
        "--target", type=int, choices=range(10), help="the label after y by default"
    )
    parser.add_argument(
        "--epochs", type=common.at_least_one, help="of the network's training"
    )
    parser.add_argument(
        "--cache", type=Path, default=common.OUTPUT, help="folder of the network"
    )
    args = common.parse(parser, argv)
    begin = time.perf_counter()
    args.images = args.images or (1 if args.fast else 6)
    args.epochs = args.epochs or (1 if args.fast else 12 if args.data is None else 2)
    try:
        data = network.load(args.data)
    except network.DataError as error:
        parser.error(str(error))
    params = network.train(data, args.epochs, args.cache)
    predicted = network.predict(params, data.test_images)
    accuracy = float((predicted == data.test_labels).mean())
    print(f"The network reads {accuracy:.1%} of the {len(predicted):,} test images.")
    indices = choose(args, parser, data, predicted)
    labels = data.test_labels[indices]
    targets = (labels + 1) % 10 if args.target is None else 0 * labels + args.target

    cases = {
        setting: [
            Case(
                jnp.asarray(data.test_images[index]),
                jnp.asarray(target),
                jnp.asarray(unit, jnp.float32),
            )
            for index, target in zip(indices, targets, strict=True)
        ]
        for setting, unit in SETTINGS.items()
    }
    limits = {"mapped": args.steps, "unmapped": max(1, args.steps // UNMAPPED)}
    keys, chunk = common.seed_keys(args.seeds), min(CHUNK, limits["unmapped"])
    iterations: dict[str, dict[str, np.ndarray]] = {name: {} for name in SETTINGS}
    for method, optimizer in optimizers().items():
        run_chunk = common.compiled(attack_step(params, optimizer), chunk)
        for setting in SETTINGS:
            label = f"{method}, {setting}"
            iterations[setting][method], variables = attack(
                run_chunk,
                optimizer,
                cases[setting],
                keys,
                limits[setting],
                chunk,
                label,
            )
            if (method, setting) == ("R-AdaZO", "mapped"):
                pictured = variables
    changed = np.stack(
        [
            adversarial(case, variable[0])
            for case, variable in zip(cases["mapped"], pictured, strict=True)
        ]
    )
    after = network.predict(params, changed)
    content = common.provenance(begin) | {
        "settings": {
            "data": data.name,
            "train_images": len(data.train_images),
            "test_accuracy": round(accuracy, 4),
            "epochs": args.epochs,
            "box": BOX,
            "num_directions": NUM_DIRECTIONS,
            "learning_rate": LEARNING_RATE,
            "smoothing": SMOOTHING,
            "b1": 0.9,
            "b2": 0.99,
            "start": "no perturbation",
            "max_iterations": limits,
            "seeds": args.seeds,
        },
        "images": [
            {"index": index, "label": int(y), "target": int(t), "seen_after": int(z)}
            for index, y, t, z in zip(indices, labels, targets, after, strict=True)
        ],
        "iterations": common.numbers(iterations),
    }
    common.write(args.output / "attack.json", content)
    seen = [(int(predicted[i]), int(z)) for i, z in zip(indices, after, strict=True)]
    figure = plot(cases["mapped"][:PICTURED], pictured[:PICTURED], seen)
    common.finish(tables(content), figure, args.output, "attack")


if __name__ == "__main__":
    main()
