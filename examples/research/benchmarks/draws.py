"""Times the draw of an element by every distribution, here and at another revision.

CPU time of the process for each element of K directions of d parameters, drawn as a
step of a vectorized estimator draws and stores them, and, for `low_rank`, for each
element of the factors of a square matrix. The revisions take turns of many calls,
because the clock of CPU time is coarse.

    python -m benchmarks.draws 8ff34b0 --output records/benchmarks/draws.json
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import jax
import jax.numpy as jnp
from tabulate import tabulate

import radazo_jax
from benchmarks.against import package_at
from benchmarks.timing import by_turns
from common import options
from common.record import record, write

MEASURED = ("sphere", "gaussian", "rademacher", "coordinate", "orthonormal", "low_rank")
NUM_DIRECTIONS, SHAPE = 8, (256, 256)
CALLS = 50


def elements(name: str) -> int:
    """The number of random numbers of a step."""
    rows, columns = SHAPE
    return NUM_DIRECTIONS * (rows + columns if name == "low_rank" else rows * columns)


def draw_of(zo: ModuleType, name: str) -> Callable[[jax.Array], Any]:
    """Draws and stores the directions of a step: a compiled function of a key."""
    estimator = zo.forward_difference(getattr(zo, name)(), NUM_DIRECTIONS, 1e-3)
    evaluator, params = zo.vectorized(), jnp.zeros(SHAPE)

    @jax.jit
    def draw(key: jax.Array) -> Any:
        drawn = zo.estimators.Draw.once(key)
        return evaluator.cache(estimator.points(drawn, params, ())[0])

    return draw


def cpu_seconds(draw: Callable[[jax.Array], Any]) -> Iterator[float]:
    """The CPU time of a call, on average over a turn."""
    key = jax.block_until_ready(jax.random.key(0))
    while True:
        start = time.process_time()
        for _ in range(CALLS):
            jax.block_until_ready(draw(key))
        yield (time.process_time() - start) / CALLS


@options.command(__doc__)
@click.argument("revision")
@click.option("--repeats", type=options.COUNT, default=15)
@options.output
def main(revision: str, repeats: int, output: Path | None) -> None:
    rows = []
    with package_at(revision) as before:
        for name in MEASURED:
            draws = {"now": draw_of(radazo_jax, name), "then": draw_of(before, name)}
            times = {k: cpu_seconds(draw) for k, draw in draws.items()}
            found = by_turns(times, repeats)
            each = {f"{k}_ns": 1e9 * v / elements(name) for k, v in found.items()}
            ratio = found["now"] / found["then"]
            rows.append({"distribution": name, **each, "now/then": ratio})
            print(tabulate(rows[-1:], tablefmt="plain", floatfmt=".2f"), flush=True)
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    if output:
        write(output, record(rows))


if __name__ == "__main__":
    main()
