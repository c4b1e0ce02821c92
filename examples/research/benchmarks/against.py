"""Times steps of the package and of another revision, in one process.

The other revision is taken from git under another name. Both take the steps of
`step_time.py` and `layer_time.py` by turns, so that other work of the machine slows
both alike; a ratio above 1 means that this tree is slower.

    python -m benchmarks.against fc4a317
"""

import contextlib
import importlib
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import optax
from tabulate import tabulate

import radazo_jax
from benchmarks import layer_time, step_time
from benchmarks.revisions import extract
from benchmarks.timing import Loss, Step, key_of, scanned
from common import options
from paper.functions import rosenbrock

_NAME = "radazo_jax_then"


@contextlib.contextmanager
def package_at(revision: str) -> Iterator[ModuleType]:
    """The package as it was, imported under another name."""
    with tempfile.TemporaryDirectory() as folder:
        extract(revision, folder)
        root = pathlib.Path(folder, "radazo_jax").rename(pathlib.Path(folder, _NAME))
        for path in root.rglob("*.py"):
            path.write_text(path.read_text().replace("radazo_jax", _NAME))
        sys.path.insert(0, folder)
        try:
            yield importlib.import_module(_NAME)
        finally:
            sys.path.remove(folder)


def step_of(zo: ModuleType, loss: Loss, estimator: Any, rate: float) -> Step:
    """A whole R-AdaZO step by what both revisions have."""
    value_and_grad, optimizer = zo.value_and_grad(loss, estimator), zo.radazo(rate)

    def step(carry: Any, i: jax.Array) -> Any:
        params, state = carry
        _, gradient = value_and_grad(key_of(i), params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return step


class Case(NamedTuple):
    """A case that is timed: a step, its start, and the number of steps."""

    name: str
    step: Step
    start: Any
    count: int


def cases(zo: ModuleType) -> Iterator[Case]:
    """The steps of both benchmarks, by a revision of the package."""
    rate = step_time.LEARNING_RATE
    for dimension in step_time.DIMENSIONS:
        x = jnp.full((dimension,), 0.5)
        for name in step_time.ESTIMATORS:
            for distribution in step_time.MEASURED:
                k = step_time.POPULATION // (2 if name == "central" else 1)
                make = getattr(zo, f"{name}_difference")
                estimator = make(getattr(zo, distribution)(), k, step_time.SMOOTHING)
                step = step_of(zo, rosenbrock, estimator, rate)
                count = step_time.steps_of_run(dimension)
                start = (x, zo.radazo(rate).init(x))
                yield Case(f"{dimension:,} {name} {distribution}", step, start, count)
    for work_name, make in layer_time.WORKS.items():
        work = make()
        for distribution in layer_time.MEASURED:
            estimator = zo.forward_difference(
                getattr(zo, distribution)(),
                layer_time.NUM_DIRECTIONS,
                layer_time.SMOOTHING,
            )

            def loss(params: Any, work: layer_time.Work = work) -> jax.Array:
                return work.loss(params, work.x)

            step = step_of(zo, loss, estimator, layer_time.LEARNING_RATE)
            start = (work.params, zo.radazo(rate).init(work.params))
            yield Case(f"{work_name} {distribution}", step, start, work.num_steps)


def seconds_to_compile(step: Step, start: Any) -> float:
    """Traces and compiles one step anew."""
    jax.clear_caches()
    begin = time.perf_counter()
    jax.jit(step).lower(start, jnp.uint32(0)).compile()
    return time.perf_counter() - begin


def timed(run: Any) -> float:
    """The seconds that a run takes."""
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def compared(now: Case, then: Case, repeats: int) -> dict[str, float]:
    """Microseconds a step and seconds to compile it, and their ratios."""
    pair = now, then
    compiling = [
        [seconds_to_compile(case.step, case.start) for case in pair]
        for _ in range(repeats)
    ]
    runs = [scanned(case.step, case.start, case.count) for case in pair]
    for run in runs:
        timed(run)
    running = []
    for turn in range(repeats):
        order = (0, 1) if turn % 2 else (1, 0)
        seconds = {i: timed(runs[i]) for i in order}
        running.append([seconds[0], seconds[1]])
    return {
        "step_us": 1e6 * median(row[0] for row in running) / now.count,
        "now/then": median(a / b for a, b in running),
        "compile_s": median(row[0] for row in compiling),
        "compile now/then": median(a / b for a, b in compiling),
    }


@options.command(__doc__)
@click.argument("revision")
@click.option("--repeats", type=options.COUNT, default=7)
@click.option("--only", default="", help="A part of the names of cases.")
@options.output
def main(revision: str, repeats: int, only: str, output: pathlib.Path | None) -> None:
    rows = []
    with package_at(revision) as before:
        for now, then in zip(cases(radazo_jax), cases(before), strict=True):
            if only in now.name:
                row = {"step": now.name} | compared(now, then, repeats)
                rows.append(row)
                print(tabulate([row], tablefmt="plain", floatfmt=".3f"), flush=True)
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    if output:
        output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
