"""All methods, each at its best learning rate (not in the paper).

    python -m paper.tuned

The paper compares at equal η. Here every method gets the η, of a grid of eleven, at
which it needs the fewest evaluations, and R-AdaZO and ZO-AdaMM get two β₁ as well.
Counted are evaluations of the loss until it first reaches fixed targets, fractions of
its value at the start. An advantage that remains is a better direction; one that
vanishes was a larger step.

The problems: the paper's four functions and a quadratic with curvatures log-spaced over
10⁴, in 10³ dimensions, a tenth of the dimensions of `synthetic.py`, so that 77 runs fit
side by side; and a classifier of handwritten digits like the quickstart's, in
minibatches of 64. K=10 and μ=5e-3. All runs of a seed share start, directions and
minibatches.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import radazo_jax as zo
from common import figures
from common.record import array
from common.tables import Table
from paper import common, functions
from paper.common import COLORS, METHODS

DIMENSION = 1000
NUM_DIRECTIONS = 10  # K
EVALUATIONS = NUM_DIRECTIONS + 1  # Of the loss, a step.
SMOOTHING = 5e-3  # μ
POWERS = np.arange(11)
BATCH_SIZE = 64
HIDDEN = 32


class Config(NamedTuple):
    """A method, and its β₁ if it has one."""

    method: str
    b1: float | None = None

    def optimizer(self, learning_rate: jax.Array) -> optax.GradientTransformation:
        options = {} if self.b1 is None else {"b1": self.b1}
        return METHODS[self.method](learning_rate, **options)

    @property
    def name(self) -> str:
        return self.method if self.b1 is None else f"{self.method}, β₁={self.b1}"


CONFIGS = (
    Config("R-AdaZO", 0.9),
    Config("R-AdaZO", 0.99),
    Config("ZO-AdaMM", 0.9),
    Config("ZO-AdaMM", 0.99),
    Config("ZO-RMSProp"),
    Config("ZO-SGD"),
    Config("ZO-signSGD"),
)


class Problem(NamedTuple):
    init: Callable[[jax.Array], Any]  # key -> params.
    loss: Callable[[Any, Any], jax.Array]  # (params, minibatch) -> scalar.
    sample: Callable[[jax.Array], Any]  # key -> minibatch.
    full_loss: Callable[[Any], jax.Array]  # params -> scalar.
    every: int = 1  # How many steps lie between two looks at the full loss.
    targets: tuple[float, float] = (0.1, 0.01)  # Fractions of the loss at the start.
    curvature: float = 1  # The mean at the start, roughly: ZO-SGD's η goes with 1/it.
    steps: int = 1000


# Function, and the targets, curvature and steps of its problem.
FUNCTIONS = {
    "Quadratic": (functions.quadratic, (0.1, 0.01), 1, 1500),
    "Cubic": (functions.cubic, (0.1, 0.01), 4, 1500),
    "Levy": (functions.levy, (0.4, 0.25), 1, 2000),
    "Rosenbrock": (functions.rosenbrock, (0.1, 0.03), 600, 2500),
    "Ill-conditioned": (functions.ellipsoid, (0.1, 0.01), 1086, 4000),
}


def digits() -> Problem:
    images, labels = load_digits(return_X_y=True)
    images = jnp.asarray((images - images.mean(axis=0)) / 8, jnp.float32)
    labels = jnp.asarray(labels, jnp.int32)

    def init(key: jax.Array) -> Any:
        draw = jax.nn.initializers.lecun_normal()
        keys = jax.random.split(key)
        return {
            "hidden": (draw(keys[0], (64, HIDDEN)), jnp.zeros(HIDDEN)),
            "output": (draw(keys[1], (HIDDEN, 10)), jnp.zeros(10)),
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        (w1, b1), (w2, b2) = params["hidden"], params["output"]
        logits = jax.nn.silu(images[batch] @ w1 + b1) @ w2 + b2
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[batch])
        return losses.mean()

    return Problem(
        init=init,
        loss=loss,
        sample=lambda key: jax.random.randint(key, (BATCH_SIZE,), 0, len(labels)),
        full_loss=functools.partial(loss, batch=jnp.arange(len(labels))),
        every=20,
        targets=(0.2, 0.05),
        curvature=0.1,
        steps=1500,
    )


def problems(dimension: int) -> dict[str, Problem]:
    def make(fun: Any, targets: Any, curvature: float, steps: int) -> Problem:
        return Problem(
            init=lambda key: functions.uniform_start(key, dimension),
            loss=lambda params, batch: fun(params),
            sample=lambda key: (),
            full_loss=fun,
            targets=targets,
            curvature=curvature * dimension / 1000,
            steps=steps,
        )

    made = {name: make(*options) for name, options in FUNCTIONS.items()}
    return made | {"Digits": digits()}


def grid(config: Config, curvature: float) -> np.ndarray:
    """Eleven learning rates, each twice the one before.

    Steps of ZO-SGD go with the size of the gradient, so its grid is placed by the
    curvature: it diverges at about the third largest of its rates. The other grids do
    not depend on the curvature.
    """
    if config.method == "ZO-SGD":
        return 2 * NUM_DIRECTIONS / 1000 / curvature * 2.0 ** (POWERS - 8)
    return 1e-4 * 2.0**POWERS


def sweep(
    name: str, problem: Problem, steps: int, seeds: int
) -> tuple[np.ndarray, np.ndarray]:
    """Steps to the targets [configs, rates, seeds, targets]; losses at the start."""
    estimator = zo.forward_difference(zo.sphere(), NUM_DIRECTIONS, SMOOTHING)
    rates = jnp.asarray([grid(c, problem.curvature) for c in CONFIGS], jnp.float32)
    targets = jnp.asarray(problem.targets)

    def step(key: jax.Array, t: jax.Array, state: Any) -> tuple[Any, None]:
        """Takes a step of all runs of a seed: leaves are [configs, rates, ...]."""
        first, params, states, reached = state
        batch_key, direction_key = jax.random.split(key)
        batch = problem.sample(batch_key)
        estimate = zo.value_and_grad(lambda p: problem.loss(p, batch), estimator)
        # The key is not mapped over: all runs share directions, drawn once.
        shared = jax.vmap(jax.vmap(estimate, (None, 0)), (None, 0))
        losses, grads = shared(direction_key, params)
        if problem.every > 1:
            losses = jax.lax.cond(
                t % problem.every == 0,
                lambda: jax.vmap(jax.vmap(problem.full_loss))(params),
                lambda: jnp.full(rates.shape, jnp.inf),
            )
        hit = losses[..., None] <= first * targets
        reached = jnp.where(hit, jnp.minimum(reached, t.astype(jnp.float32)), reached)
        moved, new_states = [], []
        for i, (config, state) in enumerate(zip(CONFIGS, states, strict=True)):

            def update(rate: jax.Array, grad: Any, state: Any, params: Any, c=config):
                updates, state = c.optimizer(rate).update(grad, state, params)
                return optax.apply_updates(params, updates), state

            pick = functools.partial(jax.tree.map, lambda leaf, i=i: leaf[i])
            new, state = jax.vmap(update)(rates[i], pick(grads), state, pick(params))
            moved.append(new)
            new_states.append(state)
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *moved)
        return (first, params, tuple(new_states), reached), None

    def start(key: jax.Array) -> Any:
        one = problem.init(key)
        params = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (*rates.shape, *leaf.shape)), one
        )
        states = tuple(
            jax.vmap(lambda rate, c=c: c.optimizer(rate).init(one))(row)
            for c, row in zip(CONFIGS, rates, strict=True)
        )
        reached = jnp.full((*rates.shape, len(problem.targets)), jnp.inf)
        return problem.full_loss(one), params, states, reached

    def report(state: Any, out: None) -> str:
        done = np.isfinite(np.asarray(state[3])[..., 0]).all(axis=0).any(axis=-1)
        return f"{done.sum()} of {len(CONFIGS)} at the first target"

    keys = jax.vmap(jax.random.split)(common.seed_keys(seeds))
    state, chunk = jax.jit(jax.vmap(start))(keys[:, 0]), max(1, steps // 50)
    state, _ = common.run(step, keys[:, 1], state, steps, chunk, name, report)
    return np.moveaxis(np.asarray(state[3]), 0, 2), np.asarray(state[0])


class Best(NamedTuple):
    """A method at its best learning rate for a target."""

    rate: float
    evaluations: np.ndarray  # [seeds], infinite if no rate is good for all seeds.
    near: np.ndarray  # Rates that need at most twice the evaluations of the best.


def best(problem: dict[str, Any], config: str, target: int) -> Best:
    run = problem["runs"][config]
    counts = EVALUATIONS * array(run["steps"])[..., target]  # [rates, seeds]
    means, rates = counts.mean(axis=1), np.asarray(run["learning_rates"])
    i = int(means.argmin())
    near = rates[means <= 2 * means[i]] if np.isfinite(means[i]) else rates[:0]
    return Best(rates[i], counts[i], near)


def tables(content: dict[str, Any]) -> list[Table]:
    def shown(found: Best) -> tuple[str, str, str]:
        if not np.isfinite(found.evaluations).all():
            return "", "not reached", ""
        width = f"{found.near[0]:.2g} … {found.near[-1]:.2g}"
        return f"{found.rate:.2g}", common.mean_std(found.evaluations), width

    result = []
    for name, problem in content["problems"].items():
        rows = [
            (config, *shown(best(problem, config, 0)), *shown(best(problem, config, 1)))
            for config in problem["runs"]
        ]
        first, second = (f"{target:.0%}" for target in problem["targets"])
        headers = ["method"]
        for target in (first, second):
            headers += [f"best η, to {target}", "evaluations", "η within 2×"]
        caption = (
            f"{name}, d={problem['dimension']:,}: evaluations to {first} and {second} "
            f"of the loss at the start, {problem['max_steps']:,} steps at most"
        )
        result.append(Table(caption, headers, rows))
    return [summary(content), *result]


def summary(content: dict[str, Any]) -> Table:
    """R-AdaZO against ZO-AdaMM, each at its best η."""
    rows = []
    for name, problem in content["problems"].items():
        for i, target in enumerate(problem["targets"]):
            row = [name, f"{target:.0%}"]
            for b1 in (0.9, 0.99):
                ours = best(problem, f"R-AdaZO, β₁={b1}", i)
                other = best(problem, f"ZO-AdaMM, β₁={b1}", i)
                if np.isfinite([ours.evaluations, other.evaluations]).all():
                    ratio = other.evaluations.mean() / ours.evaluations.mean()
                    row += [f"{ratio:.2f}", f"{other.rate / ours.rate:.3g}×"]
                else:
                    row += ["not reached", ""]
            rows.append(tuple(row))
    headers = ["problem", "target"]
    for b1 in (0.9, 0.99):
        headers += [f"β₁={b1}: evaluations", f"β₁={b1}: best η"]
    caption = (
        "ZO-AdaMM over R-AdaZO, each at its best η: evaluations (above 1, R-AdaZO "
        "needs fewer), and the best η itself (predicted: "
        f"{common.step_ratio(0.9):.2f} and {common.step_ratio(0.99):.1f})"
    )
    return Table(caption, headers, rows)


def plot(content: dict[str, Any]) -> plt.Figure:
    """Evaluations to the first target against η: the sensitivity.

    Lines end if not all seeds arrive: at small η in time, at large η ever.
    """
    columns = min(3, len(content["problems"]))
    rows = -(-len(content["problems"]) // columns)
    size = (4.7 * columns, 3.6 * rows + 0.3)
    figure, all_axes = figures.panels(rows, columns, size)
    for axes in all_axes.flat[len(content["problems"]) :]:
        axes.set_visible(False)
    shown = content["problems"].items()
    for axes, (name, problem) in zip(all_axes.flat, shown, strict=False):
        axes.set(xlabel="η", title=name)
        axes.set_ylabel(f"evaluations to {problem['targets'][0]:.0%}")
        for config in CONFIGS:
            run = problem["runs"][config.name]
            counts = EVALUATIONS * array(run["steps"])[..., 0]
            means = counts.mean(axis=1)
            if np.isfinite(means).any():  # Without any, there is nothing to scale.
                axes.set(xscale="log", yscale="log")
            rates = np.where(np.isfinite(means), run["learning_rates"], np.nan)
            line = "o--" if config.b1 == 0.99 else "o-"
            style = {"color": COLORS[config.method], "label": config.name, "ms": 4}
            axes.plot(rates, means, line, lw=1.6, **style)
    figures.legend(figure, all_axes.flat[0], 7)
    return figure


@common.experiment(__doc__, steps=1000, seeds=5, fast=(15, 2))
def main(size: common.Size) -> None:
    found, every = {}, problems(100 if size.fast else DIMENSION)
    for name in ("Quadratic", "Ill-conditioned", "Digits") if size.fast else every:
        problem = every[name]
        steps = max(1, size.steps * problem.steps // 1000)
        reached, first = sweep(name, problem, steps, size.seeds)
        params = problem.init(jax.random.key(0))
        found[name] = {
            "dimension": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "targets": problem.targets,
            "start": first,
            "max_steps": steps,
            "runs": {
                config.name: {
                    "learning_rates": grid(config, problem.curvature),
                    "steps": reached[i],
                }
                for i, config in enumerate(CONFIGS)
            },
        }
    content = {
        "settings": {
            "num_directions": NUM_DIRECTIONS,
            "smoothing": SMOOTHING,
            "b2": 0.99,
            "batch_size": BATCH_SIZE,
            "seeds": size.seeds,
        },
        "problems": found,
    }
    common.finish(size.output / "tuned", content, tables, plot)


if __name__ == "__main__":
    main()
