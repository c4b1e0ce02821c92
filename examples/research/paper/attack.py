"""Iterations to a successful black-box attack (the paper's table of that name).

    python -m paper.attack

The attack makes a convolutional network read the digit y + 1 instead of y (0 after
9), and changes no pixel by more than 0.2. The loss is the maximum over j ≠ t of
log p_j − log p_t for the target t. If it is below zero, the attack has succeeded.
K=2, η=0.01, μ=0.005, β₁=0.9, β₂=0.99, as in the paper.

Two settings. *Mapped*: the variable lies in [0, 10] and is mapped linearly to the box
of the perturbation, as in the public code of the set-up that the paper cites, so that a
step of η in it moves a pixel by η/25. *Unmapped*: the variable is the perturbation.

The images are scikit-learn's, enlarged to 28×28.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from tqdm import tqdm

import radazo_jax as zo
from common import figures
from common.record import array
from common.tables import Table
from paper import common, network

BOX = 0.2  # How far a pixel may change.
LEARNING_RATE = 1e-2  # η
SMOOTHING = 5e-3  # μ
COMPARED = ("ZO-RMSProp", "ZO-AdaMM", "R-AdaZO")
NUM_DIRECTIONS = 2  # K
CHUNK = 100
IMAGES = 6  # How many are attacked.
# Setting -> what one unit of the variable is in pixels.
SETTINGS = {"mapped": 2 * BOX / 10, "unmapped": 1.0}
UNMAPPED = 4  # How many times fewer iterations this setting gets: its steps are longer.


class State(NamedTuple):
    variable: jax.Array  # [28, 28, 1], zero if no pixel is changed.
    optimizer_state: Any
    iterations: jax.Array  # (), int32: until success, or so far.
    succeeded: jax.Array  # (), bool.


class Case(NamedTuple):
    image: jax.Array  # [28, 28, 1]
    target: jax.Array  # (), int32.
    unit: jax.Array  # (), what one unit of the variable is in pixels.


def adversarial(case: Case, variable: jax.Array) -> jax.Array:
    return jnp.clip(case.image + case.unit * variable, 0, 1)


def attack_step(params: network.Params, optimizer: optax.GradientTransformation) -> Any:
    """Takes a step, which changes nothing for a seed that has succeeded.

    The variable is centered, from -5 to 5 instead of [0, 10] as in the paper, which is
    the same to any of the methods. It is clipped to its box after each step.
    """
    estimator = zo.forward_difference(zo.sphere(), NUM_DIRECTIONS, SMOOTHING)

    def loss(variable: jax.Array, case: Case) -> jax.Array:
        image = adversarial(case, variable)
        rows = network.log_probabilities(params, image[None])[0]
        others = jnp.where(jnp.arange(10) == case.target, -jnp.inf, rows)
        return others.max() - rows[case.target]

    value_and_grad = zo.value_and_grad(loss, estimator)

    def step(key: jax.Array, t: jax.Array, state: State, case: Case) -> Any:
        value, grad = value_and_grad(key, state.variable, case)
        updates, optimizer_state = optimizer.update(
            grad, state.optimizer_state, state.variable
        )
        limit = BOX / case.unit
        moved = jnp.clip(state.variable + updates, -limit, limit)
        succeeded = state.succeeded | (value < 0)
        variable = jnp.where(succeeded, state.variable, moved)
        iterations = state.iterations + jnp.where(succeeded, 0, 1)
        return State(variable, optimizer_state, iterations, succeeded), succeeded

    return step


def attack(
    run_chunk: Callable[..., tuple[Any, Any]],
    optimizer: optax.GradientTransformation,
    cases: Sequence[Case],
    keys: jax.Array,
    max_steps: int,
    chunk: int,
    label: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Iterations [cases, seeds], inf without success; variables [cases, …]."""
    iterations, variables = [], []
    for case in (bar := tqdm(cases, desc=label, unit="image")):
        zeros = jnp.zeros((len(keys), *case.image.shape))
        nothing = jnp.zeros(len(keys), jnp.int32)
        moments = jax.vmap(optimizer.init)(zeros)
        states = State(zeros.copy(), moments, nothing, nothing.astype(bool))
        for start in range(0, max_steps, chunk):
            states, succeeded = run_chunk(states, keys, jnp.uint32(start), case)
            bar.set_postfix(iteration=start + chunk)
            # The mean over the chunk is above zero if its last step succeeded.
            if (succeeded > 0).all():
                break
        iterations.append(np.where(states.succeeded, states.iterations, np.inf))
        variables.append(np.asarray(states.variable))
    return np.stack(iterations), np.stack(variables)


def tables(content: dict[str, Any]) -> list[Table]:
    result = []
    for setting, runs in content["iterations"].items():
        baseline = array(runs["ZO-RMSProp"])
        rows = []
        for method, values in runs.items():
            iterations = array(values)
            hit = np.isfinite(iterations)
            both, speedup = hit & np.isfinite(baseline), ""
            if both.any():
                speedup = f"{baseline[both].mean() / iterations[both].mean():.2f}×"
            successes = f"{hit.sum()} of {hit.size}"
            rows.append((method, common.mean_std(iterations[hit]), speedup, successes))
        limit = content["settings"]["max_iterations"][setting]
        caption = (
            f"Iterations to a successful attack, {setting}, of {limit:,} at most: mean "
            "of the successes; speedup over ZO-RMSProp, if both succeed"
        )
        headers = ("method", "iterations", "speedup", "successes")
        result.append(Table(caption, headers, rows))
    return result


def picture(
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
    seen_before: Sequence[int],
    seen_after: Sequence[int],
) -> plt.Figure:
    """Image, perturbation and adversarial image, of R-AdaZO's first seed.

    Not drawn from the record, which has no images.
    """
    count = len(before)
    figure, all_axes = figures.panels(3, count, (1.9 * count + 0.6, 6))
    gray = {"cmap": "gray", "vmin": 0, "vmax": 1}
    signed = {"cmap": "RdBu", "vmin": -BOX, "vmax": BOX}
    for i in range(count):
        shown = (
            (f"seen as {seen_before[i]}", before[i], gray),
            ("perturbation", after[i] - before[i], signed),
            (f"seen as {seen_after[i]}", after[i], gray),
        )
        for axes, (title, pixels, style) in zip(all_axes[:, i], shown, strict=True):
            drawn = axes.imshow(pixels[..., 0], **style)
            axes.set_title(title, fontsize=10)
            axes.set(xticks=[], yticks=[])
            if style is signed and i == count - 1:
                figure.colorbar(drawn, ax=axes, shrink=0.8)
    return figure


class Images(NamedTuple):
    """Test images that the network reads right, and what it must see instead."""

    images: np.ndarray
    targets: np.ndarray

    def cases(self, unit: float) -> list[Case]:
        return [
            Case(jnp.asarray(image), jnp.asarray(target), jnp.float32(unit))
            for image, target in zip(self.images, self.targets, strict=True)
        ]


def attacked(
    params: network.Params, images: Images, size: common.Size
) -> tuple[dict[str, Any], np.ndarray]:
    """Iterations by setting and method, and the variables of R-AdaZO's first seed."""
    limits = max_iterations(size)
    keys, chunk = common.seed_keys(size.seeds), min(CHUNK, limits["unmapped"])
    iterations: dict[str, dict[str, np.ndarray]] = {name: {} for name in SETTINGS}
    variables: dict[tuple[str, str], np.ndarray] = {}
    for method, optimizer in common.optimizers(LEARNING_RATE, COMPARED).items():
        run_chunk = common.compiled(attack_step(params, optimizer), chunk)
        for name, unit in SETTINGS.items():
            iterations[name][method], variables[name, method] = attack(
                run_chunk,
                optimizer,
                images.cases(unit),
                keys,
                limits[name],
                chunk,
                f"{method}, {name}",
            )
    return iterations, variables["mapped", "R-AdaZO"][:, 0]


def max_iterations(size: common.Size) -> dict[str, int]:
    return {"mapped": size.steps, "unmapped": max(1, size.steps // UNMAPPED)}


@common.experiment(__doc__, steps=14_000, seeds=5, fast=(40, 2))
def main(size: common.Size) -> None:
    epochs = 1 if size.fast else 12
    read = network.load()
    params = network.train(read, epochs)
    predicted = network.predict(params, read.test_images)
    right = predicted == read.test_labels
    print(f"The network reads {right.mean():.1%} of the {right.size:,} test images.")
    indices = np.flatnonzero(right)[: 1 if size.fast else IMAGES]
    labels = read.test_labels[indices]
    images = Images(read.test_images[indices], (labels + 1) % 10)
    iterations, pictured = attacked(params, images, size)
    changed = np.stack(
        list(map(adversarial, images.cases(SETTINGS["mapped"]), pictured))
    )
    after = network.predict(params, changed)
    seen = zip(indices, labels, images.targets, after, strict=True)
    content = {
        "settings": {
            "data": "digits",
            "train_images": len(read.train_images),
            "test_accuracy": right.mean(),
            "epochs": epochs,
            "box": BOX,
            "num_directions": NUM_DIRECTIONS,
            "learning_rate": LEARNING_RATE,
            "smoothing": SMOOTHING,
            "b1": 0.9,
            "b2": 0.99,
            "start": "no perturbation",
            "max_iterations": max_iterations(size),
            "seeds": size.seeds,
        },
        "images": [
            {"index": index, "label": y, "target": t, "seen_after": z}
            for index, y, t, z in seen
        ],
        "iterations": iterations,
    }
    drawn = picture(list(images.images), changed, predicted[indices], after)
    common.finish(size.output / "attack", content, tables, lambda _: drawn)


if __name__ == "__main__":
    main()
