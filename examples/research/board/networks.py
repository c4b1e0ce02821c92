"""Networks without gradients at the measured μ and rate, against a searched grid.

    python -m board.networks --output records/board/networks.json

A row is a network of 2,410 parameters on images of digits, 1,000 steps of R-AdaZO with
K = 10 and minibatches of 128. *Searched* is the best μ and rate of a grid, in runs with
another key that are judged by examples of their own. *Measured* is what
`zo.find_learning_rate` returns. *Default μ* is 5e-3 at the measured rate. *Straight
through* is Adam by backpropagation, which takes steps for slopes of smooth functions.
*Lost* is the loss on held-out examples at the end, as a share of what the searched pair
wins. ln(end / best) is the logarithm of its ratio to the searched pair's, which a high
loss at the start does not hide.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import radazo_jax as zo
from board.minibatch_problems import cross_entropy
from board.minibatches import SEARCHED, lost, ratio
from common import options
from common.campaign import Campaign, campaign
from common.record import array, numbers
from common.tables import Table

SEEDS = 3
STEPS, DIRECTIONS, BATCH = 1000, 10, 128
# By how much each parameter is moved, and multiples of the measured rate.
SIZES = tuple(2.0**i for i in (-11, -9, -7, -6, -5, -4))
MULTIPLES = (0.5, 1.0, 2.0, 4.0)
MEASURED, DEFAULT, STRAIGHT = "measured", "default μ", "straight through"

_SEARCH_SEED = 100
_EXAMPLES, _VALIDATION = 1100, 250  # Of 1,797; the rest is held out.
_DEFAULT = 5e-3  # Of estimators.

Forward = Callable[[Any, jax.Array], jax.Array]


def _through(steps: jax.Array, smooth: jax.Array) -> jax.Array:
    """The values of steps, exactly, with the derivative of something smooth."""
    return steps + (smooth - jax.lax.stop_gradient(smooth))


def _sign(x: jax.Array) -> jax.Array:
    return _through(jnp.sign(x), jnp.clip(x, -1, 1))


def _activated(activation: Callable[[jax.Array], jax.Array]) -> Forward:
    def forward(params: Any, x: jax.Array) -> jax.Array:
        hidden = activation(x @ params["a"] + params["b"])
        return hidden @ params["c"] + params["d"]

    return forward


def _spikes(current: jax.Array) -> jax.Array:
    """The rate at which a leaky integrator fires in eight ticks."""

    def tick(voltage: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        voltage = voltage / 2 + current
        fires = (voltage > 1).astype(voltage.dtype)
        spike = _through(fires, jax.nn.sigmoid(4 * (voltage - 1)))
        return voltage - spike, spike

    _, spikes = jax.lax.scan(tick, jnp.zeros_like(current), None, 8)
    return spikes.mean(0)


def _winners(hidden: jax.Array) -> jax.Array:
    """1 at the eight largest, and 0 elsewhere."""
    least = jax.lax.top_k(hidden, 8)[0][..., -1:]
    return _through((hidden >= least).astype(hidden.dtype), jax.nn.sigmoid(hidden))


def _codes(hidden: jax.Array) -> jax.Array:
    """The largest of each four, as a one-hot vector."""
    groups = hidden.reshape(*hidden.shape[:-1], -1, 4)
    codes = jax.nn.one_hot(jnp.argmax(groups, -1), 4)
    return _through(codes, jax.nn.softmax(groups)).reshape(hidden.shape)


def _in_int8(x: jax.Array) -> jax.Array:
    scale = jax.lax.stop_gradient(jnp.max(abs(x))) / 127
    return _through(jnp.round(x / scale) * scale, x)


def _int8(params: Any, x: jax.Array) -> jax.Array:
    """Weights and activations are rounded to 8 bits."""
    hidden = jax.nn.relu(_in_int8(x) @ _in_int8(params["a"]) + params["b"])
    return _in_int8(hidden) @ _in_int8(params["c"]) + params["d"]


def _binary(params: Any, x: jax.Array) -> jax.Array:
    """Weights are replaced by their signs, times their mean size."""
    a, c = (_sign(params[k]) * jnp.mean(abs(params[k])) for k in "ac")
    return jnp.tanh(x @ a + params["b"]) @ c + params["d"]


NETWORKS: dict[str, Forward] = {
    "sign activations": _activated(_sign),
    "spikes": _activated(_spikes),
    "int8": _int8,
    "top-k": _activated(_winners),
    "argmax": _activated(_codes),
    "binary weights": _binary,
    "tanh": _activated(jnp.tanh),
}


def start(seed: int) -> Any:
    """Weights and biases at the start."""
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "a": jax.random.normal(keys[0], (64, 32)) / 8,
        "b": jnp.zeros(32),
        "c": jax.random.normal(keys[1], (32, 10)) / np.sqrt(32),
        "d": jnp.zeros(10),
    }


@functools.cache
def _digits() -> tuple[jax.Array, jax.Array]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return jnp.asarray(x[order] / 16, jnp.float32), jnp.asarray(y[order])


def sample(key: jax.Array) -> Any:
    rows = jax.random.randint(key, (BATCH,), 0, _EXAMPLES)
    return tuple(z[rows] for z in _digits())


def loss_of(network: str) -> Callable[[Any, Any], jax.Array]:
    return cross_entropy(NETWORKS[network])


def accuracy(network: str, params: Any, batch: Any) -> jax.Array:
    """The share of images whose digit is named."""
    return jnp.mean(jnp.argmax(NETWORKS[network](params, batch[0]), -1) == batch[1])


def measured(network: str) -> dict[str, Any]:
    """The row of a network."""
    loss, run = loss_of(network), _program(network)
    held_out = tuple(z[_EXAMPLES + _VALIDATION :] for z in _digits())
    unit = math.sqrt(optax.tree.size(start(0)))

    def found(seed: int) -> zo.runs.LearningRate:
        return zo.find_learning_rate(
            loss,
            start(seed),
            STEPS,
            sample=sample,
            key=seed,
            distribution=zo.orthonormal(),
        )

    pairs = [found(seed) for seed in range(SEEDS)]
    begin = time.perf_counter()
    found(0)
    seconds = time.perf_counter() - begin
    rate = float(np.mean([pair.learning_rate for pair in pairs]))
    grid = [(unit * size, rate * m) for size in SIZES for m in MULTIPLES]
    search = run([(_SEARCH_SEED, *pair) for pair in grid])[0]
    best = grid[int(np.nanargmin(search))]
    ends = {
        MEASURED: [
            (s, pairs[s].smoothing, pairs[s].learning_rate) for s in range(SEEDS)
        ],
        DEFAULT: [(s, _DEFAULT, pairs[s].learning_rate) for s in range(SEEDS)],
        SEARCHED: [(s, *best) for s in range(SEEDS)],
    }
    made = {name: run(runs) for name, runs in ends.items()}
    made[STRAIGHT] = _straight(network)
    return {
        "start": numbers([float(loss(start(s), held_out)) for s in range(SEEDS)]),
        "sizes": numbers([pair.smoothing / unit for pair in pairs]),
        "learning_rates": numbers([pair.learning_rate for pair in pairs]),
        "searched_size": numbers(best[0] / unit),
        "searched_rate": numbers(best[1]),
        "probe_evaluations": pairs[0].num_evaluations,
        "probe_s": numbers(seconds),
        "search": numbers(search.reshape(len(SIZES), -1)),
        "ends": {name: numbers(found[1]) for name, found in made.items()},
        "accuracies": {name: numbers(found[2]) for name, found in made.items()},
    }


_Run = tuple[int, float, float]


def _program(network: str) -> Callable[[Sequence[_Run]], np.ndarray]:
    """Runs by their seeds, μ and rates: their judges, [3, runs]."""
    loss = loss_of(network)
    moments = zo.transforms.scale_by_radazo(bias_correction=True)

    def one(run: tuple[Any, Any, Any, Any]) -> jax.Array:
        params, key, far, rate = run
        estimator = zo.forward_difference(zo.orthonormal(), DIRECTIONS, far)

        def solver(rate: Any) -> Any:
            optimizer = optax.chain(moments, optax.scale(-rate))
            return zo.solver(loss, optimizer, estimator)

        def step(t: jax.Array, state: Any) -> Any:
            batch = sample(jax.random.fold_in(key, t))
            return solver(rate * (1 - t / STEPS))[1](state, batch)[0]

        state = jax.lax.fori_loop(0, STEPS, step, solver(0.0)[0](params, key))
        return _judged(network, state.params)

    program = jax.jit(functools.partial(jax.lax.map, one))

    def ends(runs: Sequence[_Run]) -> np.ndarray:
        made = [
            (start(seed), jax.random.key(seed), jnp.float32(far), jnp.float32(rate))
            for seed, far, rate in runs
        ]
        return np.asarray(program(jax.tree.map(lambda *x: jnp.stack(x), *made))).T

    return ends


def _straight(network: str) -> np.ndarray:
    """Adam on straight-through derivatives, with the steps of the other runs."""
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))

    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        gradient = jax.grad(loss_of(network))(params, sample(key))
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def end(params: Any, key: jax.Array) -> jax.Array:
        begun = params, optimizer.init(params)
        (params, _), _ = jax.lax.scan(step, begun, jax.random.split(key, STEPS))
        return _judged(network, params)

    return np.stack([end(start(s), jax.random.key(s)) for s in range(SEEDS)], 1)


def _judged(network: str, params: Any) -> jax.Array:
    """The loss that judges a search; loss and accuracy on held-out examples."""
    loss, last = loss_of(network), _EXAMPLES + _VALIDATION
    judges, held_out = (
        tuple(z[part] for z in _digits())
        for part in (slice(_EXAMPLES, last), slice(last, None))
    )
    right = accuracy(network, params, held_out)
    return jnp.stack([loss(params, judges), loss(params, held_out), right])


def tables(content: dict[str, Any]) -> list[Table]:
    """The networks: loss by method, and what was lost; settings and the probe."""
    rows = content["rows"]

    def ends(row: dict[str, Any], names: Sequence[str]) -> list[str]:
        return [
            f"{array(row['ends'][name]).mean():.2f} / "
            f"{array(row['accuracies'][name]).mean():.0%}"
            for name in names
        ]

    names = (DEFAULT, MEASURED, SEARCHED, STRAIGHT)
    return [
        Table(
            "Loss and accuracy on held-out images after 1,000 steps, the mean of three "
            "runs; lost by measured μ and rate is a share of what the searched pair "
            "wins",
            ["network", *names, "lost", "ln(end / best)"],
            [
                (
                    row["network"],
                    *ends(row, names),
                    f"{lost(row)[MEASURED].mean():.2f}",
                    f"{ratio(row, MEASURED):.2f}",
                )
                for row in rows
            ],
        ),
        Table(
            "By how much a direction moves each parameter, measured in three runs and "
            "searched; the searched rate as a multiple of the measured one; the "
            "evaluations of the probe, and its seconds once it is compiled",
            ["network", "measured", "searched", "rate", "evaluations", "seconds"],
            [
                (
                    row["network"],
                    ", ".join(f"{size:.2g}" for size in row["sizes"]),
                    f"{row['searched_size']:.2g}",
                    f"{row['searched_rate'] / np.mean(row['learning_rates']):.1f}",
                    str(row["probe_evaluations"]),
                    f"{row['probe_s']:.2f}",
                )
                for row in rows
            ],
        ),
    ]


@campaign(__doc__)
@options.listed("--networks", of=NETWORKS, text="Networks")
def main(networks: Sequence[str]) -> Campaign:
    rows = [({"network": n}, functools.partial(measured, n)) for n in networks]
    return Campaign(rows, tables=tables)


if __name__ == "__main__":
    main()
