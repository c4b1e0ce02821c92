"""Measures a step of a small network in multiples of its forward passes.

For every distribution, a whole R-AdaZO step (K + 1 evaluations, estimate, update) is
compared with

* ``floor``: one forward pass over K + 1 times the rows, and the Optax chain's update
  and its application on a gradient that lies ready;
* ``naive``: the same step written by hand, with ``jax.random.normal`` and
  ``tree_map`` copies under ``vmap``;
* ``evosax``: Open_ES with a population of K, and Adam, if it is installed.

    python -m benchmarks.layer_time --output layer_time.json
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import optax
from jax import lax

import radazo_jax as zo
from benchmarks.programs import step_of
from benchmarks.timing import (
    Step,
    evosax,
    key_of,
    medians,
    naive,
    scanned,
)
from common import options
from common.campaign import Campaign, campaign
from common.distributions import DISTRIBUTIONS

NUM_DIRECTIONS = 8
SMOOTHING = 1e-3
LEARNING_RATE = 1e-4
MEASURED = ("low_rank", "gaussian", "sphere", "rademacher")


class Work(NamedTuple):
    """A network and its data.

    Attributes:
      params: Its parameters.
      loss: ``loss(params, x)``, a scalar.
      x: The inputs, [rows, features].
      num_steps: Number of steps per run, large enough to hide the start of the program.
    """

    params: Any
    loss: Callable[[Any, jax.Array], jax.Array]
    x: jax.Array
    num_steps: int


def mlp() -> Work:
    """784-128-10, a batch of 128."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": jax.random.normal(keys[0], (784, 128)) / 28,
        "b1": jnp.zeros(128),
        "w2": jax.random.normal(keys[1], (128, 10)) / 11,
        "b2": jnp.zeros(10),
    }

    def loss(p: Any, x: jax.Array) -> jax.Array:
        logits = jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[:, 0])

    x = jax.random.normal(keys[2], (128, 784))
    return Work(params, loss, x, 100)


def layers() -> Work:
    """Six scanned residual layers of width 512, 64 rows."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "w": jax.random.normal(keys[0], (6, 512, 512)) / 23,
        "b": jnp.zeros((6, 512)),
    }

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, leaf: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ leaf["w"] + leaf["b"]), None

        return jnp.mean(lax.scan(layer, x, p)[0] ** 2)

    return Work(params, loss, jax.random.normal(keys[1], (64, 512)), 30)


WORKS = {"mlp 784-128-10": mlp, "6 scanned layers of 512": layers}


def floor_step(work: Work, tx: optax.GradientTransformationExtraArgs) -> Step:
    rows = jnp.tile(work.x, (NUM_DIRECTIONS + 1, 1))

    def step(carry: Any, i: jax.Array) -> Any:
        params, state = carry
        # Written so that neither the pass nor the gradient is known ahead.
        value = work.loss(params, rows + 1e-9 * i.astype(jnp.float32))
        gradient = jax.tree.map(lambda p: 0.1 * p + 1e-12 * value, params)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return step


def our_step(work: Work, distribution: zo.Distribution) -> Step:
    estimator = zo.forward_difference(distribution, NUM_DIRECTIONS, SMOOTHING)
    step = step_of(work.loss, estimator, zo.radazo(LEARNING_RATE))
    return lambda carry, i: step(*carry, key_of(i), work.x)[:2]


def measure(name: str, repeats: int) -> list[dict[str, Any]]:
    """The rows of one network."""
    work, tx = WORKS[name](), zo.radazo(LEARNING_RATE)

    def loss(params: Any) -> jax.Array:
        return work.loss(params, work.x)

    by_hand = naive(loss, tx, NUM_DIRECTIONS, SMOOTHING)
    steps = {"floor": floor_step(work, tx), "naive": by_hand}
    steps |= {
        distribution: our_step(work, DISTRIBUTIONS[distribution])
        for distribution in MEASURED
    }
    carry = (work.params, tx.init(work.params))
    runs = {key: scanned(step, carry, work.num_steps) for key, step in steps.items()}
    if found := evosax(loss, work.params, LEARNING_RATE, NUM_DIRECTIONS, SMOOTHING):
        runs["evosax"] = scanned(*found, work.num_steps)
    seconds = medians(runs, repeats)
    return [
        {
            "distribution": distribution,
            "step_ms": 1e3 * seconds[distribution] / work.num_steps,
            "step/floor": seconds[distribution] / seconds["floor"],
            **{
                f"{other}/step": seconds[other] / seconds[distribution]
                for other in ("naive", "evosax")
                if other in seconds
            },
        }
        for distribution in MEASURED
    ]


@campaign(__doc__)
@click.option("--repeats", type=options.COUNT, default=7)
def main(repeats: int) -> Campaign:
    return Campaign(
        ({"work": name}, functools.partial(measure, name, repeats)) for name in WORKS
    )


if __name__ == "__main__":
    main()
