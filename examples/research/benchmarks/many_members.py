"""Times steps with many members, each of which is evaluated at one example.

A perceptron takes a forward difference along 2,047 directions of ``low_rank()``. Times
are CPU times of the process, in multiples of one forward pass of 2,048 examples: of the
step, of the draw of its factors, of the evaluations, and of the gradient.

    python -m benchmarks.many_members --output many_members.json
"""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
from tabulate import tabulate

import radazo_jax as zo
from benchmarks.programs import step_of
from benchmarks.timing import by_turns, key_of
from common import options
from common.record import record, write

MEMBERS, SIZES = 2048, (784, 256, 10)
SMOOTHING, LEARNING_RATE = 1e-3, 1e-3
ESTIMATOR = zo.forward_difference(zo.low_rank(), MEMBERS - 1, SMOOTHING)
EVALUATOR = zo.vectorized()


def loss(params: Any, batch: Any) -> jax.Array:
    """The cross-entropy of a perceptron with one hidden layer."""
    (w, b), (v, c) = params
    x, y = batch
    logits = jax.nn.relu(x @ w + b) @ v + c
    found = jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - found)


def cpu_seconds(run: Callable[[jax.Array], Any]) -> Iterator[float]:
    """The CPU time of a run, with another key at each."""
    number = 0
    while True:
        key = jax.block_until_ready(key_of(jnp.uint32(number)))
        start, number = time.process_time(), number + 1
        jax.block_until_ready(run(key))
        yield time.process_time() - start


def runs() -> dict[str, Callable[[jax.Array], Any]]:
    """Compiled functions of a key: a forward pass, a step, and its parts."""
    keys = iter(jax.random.split(jax.random.key(1), len(SIZES)))
    params = [
        (jax.random.normal(next(keys), (n, m)) / n**0.5, jnp.zeros(m))
        for n, m in itertools.pairwise(SIZES)
    ]
    batch = jax.random.normal(next(keys), (MEMBERS, SIZES[0])), jnp.arange(MEMBERS) % 10
    one = jax.tree.map(lambda x: x[:1], batch)
    optimizer = zo.zo_sgd(LEARNING_RATE)
    state = optimizer.init(params)
    step = step_of(loss, ESTIMATOR, optimizer, EVALUATOR)

    def draw(key: jax.Array) -> zo.estimators.Points:
        drawn = zo.estimators.Draw.once(key)
        return EVALUATOR.cache(ESTIMATOR.points(drawn, params, ())[0])

    @jax.jit
    def evaluate(points: zo.estimators.Points) -> Any:
        return EVALUATOR.evaluate(lambda p: loss(p, one), params, points, False)[0]

    @jax.jit
    def gradient(points: zo.estimators.Points) -> Any:
        combined = zo.estimators.LinearCombination(
            points.scales[:, 0], points.directions, points.layout
        )
        return combined.materialize(params)

    draw, forward, step = jax.jit(draw), jax.jit(loss), jax.jit(step)
    points = draw(jax.random.key(0))
    return {
        "forward": lambda key: forward(params, batch),
        "step": lambda key: step(params, state, key, one),
        "draw": draw,
        "evaluations": lambda key: evaluate(points),
        "gradient": lambda key: gradient(points),
    }


def row(repeats: int) -> dict[str, Any]:
    """Multiples of the forward pass."""
    times = {name: cpu_seconds(run) for name, run in runs().items()}
    seconds = by_turns(times, repeats)
    forward = seconds.pop("forward")
    ratios = {f"{name}/forward": value / forward for name, value in seconds.items()}
    return {"members": MEMBERS, "forward_ms": 1e3 * forward} | ratios


@options.command(__doc__)
@options.output
@click.option("--repeats", type=options.COUNT, default=25)
def main(output: Path | None, repeats: int) -> None:
    found = [row(repeats)]
    print(tabulate(found, headers="keys", floatfmt=".2f"))
    if output:
        write(output, record(found))


if __name__ == "__main__":
    main()
