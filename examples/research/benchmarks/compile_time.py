"""Measures the programs of a first call and their parts, here and at another revision.

Each measurement is a new Python process without a compilation cache, and the revisions
take turns, so that other work of the machine slows both alike. Processor seconds count
all threads of the compiler. Of each figure, the table has the median:

* ``programs``: the programs that the call compiles;
* ``trace_s``, ``lower_s``, ``compile_s``: JAX's own clocks of the three parts;
* ``wall_s`` and ``cpu_s``: the whole call, and ``least_cpu_s`` the lowest of these;
* ``step_us``: a step, or a later call, of the compiled program, the lowest of all.

    python -m benchmarks.compile_time d127522 --output compile_time.json
"""

import collections
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
from tabulate import tabulate

import radazo_jax as zo
from benchmarks.models import decoder
from benchmarks.revisions import extract
from common import ROOT, options
from common.record import record, write

_PARTS = {
    "trace_s": "/jax/core/compile/jaxpr_trace_duration",
    "lower_s": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "compile_s": "/jax/core/compile/backend_compile_duration",
}
_LEARNING_RATE = 1e-3


class Problem(NamedTuple):
    """A first call.

    Attributes:
      start: Makes the parameters and the loss, which is not part of the call.
      call: ``call(loss, params, num_steps)``.
      num_steps: The number of steps of a later call, which is timed.
    """

    start: Callable[[], tuple[Any, Any]]
    call: Callable[[Any, Any, int], Any]
    num_steps: int


def _quadratic() -> tuple[Any, Any]:
    scales = np.linspace(1, 10, 50, dtype=np.float32)
    return jax.device_put(np.zeros_like(scales)), lambda x: jnp.sum(
        scales * (x - 1) ** 2
    )


def _transformer() -> tuple[Any, Any]:
    model = decoder(2, 32, 2, 64, 16, 2, jnp.float32, one_by_one=False)
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda p: jax.device_put(random.normal(0, 0.1, p.shape).astype(p.dtype)),
        model.params,
    )
    tokens = random.integers(0, 64, model.batch.shape, model.batch.dtype)
    return params, lambda params: model.loss(params, tokens)


def _by_radazo(loss: Any, params: Any, num_steps: int) -> Any:
    method = zo.radazo(_LEARNING_RATE), zo.forward_difference()
    return zo.minimize(loss, params, *method, num_steps=num_steps, progress=False)


def _by_default(loss: Any, params: Any, num_steps: int) -> Any:
    return zo.minimize(loss, params, num_steps=num_steps, progress=False)


def _value_and_grad(loss: Any, params: Any, num_steps: int) -> Any:
    value_and_grad = zo.value_and_grad(loss, zo.forward_difference())
    for seed in range(num_steps):
        found = value_and_grad(seed, params)
    return jax.block_until_ready(found)


PROBLEMS = {
    "quadratic, R-AdaZO": Problem(_quadratic, _by_radazo, 2000),
    "quadratic, default": Problem(_quadratic, _by_default, 2000),
    "transformer, R-AdaZO": Problem(_transformer, _by_radazo, 20),
    "quadratic, value_and_grad": Problem(_quadratic, _value_and_grad, 20),
}


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(problem: Problem) -> dict[str, float]:
    """The first call of this process, and a later one."""
    found: dict[str, float] = collections.defaultdict(float)
    params, loss = problem.start()

    def saw(event: str, seconds: float, **others: Any) -> None:
        del others
        for name, each in _PARTS.items():
            found[name] += seconds * (event == each)
        found["programs"] += event == _PARTS["compile_s"]

    jax.monitoring.register_event_duration_secs_listener(saw)
    used, begun = _processor_seconds(), time.perf_counter()
    problem.call(loss, params, 1)
    found["wall_s"] = time.perf_counter() - begun
    found["cpu_s"] = _processor_seconds() - used
    first = dict(found)
    # The first later call compiles what the first call has not needed.
    problem.call(loss, params, problem.num_steps)
    steps = []
    for _ in range(3):
        begun = time.perf_counter()
        problem.call(loss, params, problem.num_steps)
        steps.append(time.perf_counter() - begun)
    return first | {"step_us": 1e6 * min(steps) / problem.num_steps}


def measured_by(folder: Path, name: str) -> dict[str, float]:
    """The measurement of a new process with the package of a folder."""
    paths = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    environment = os.environ | {
        "PYTHONPATH": paths,
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [sys.executable, "-m", "benchmarks.compile_time", "--here", name]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(each: list[dict[str, float]]) -> dict[str, float]:
    """Medians, or the lowest: other work of the machine can only add to it."""
    found = {name: median(row[name] for row in each) for name in each[0]}
    found["least_cpu_s"] = min(row["cpu_s"] for row in each)
    found["step_us"] = min(row["step_us"] for row in each)
    return found


@options.command(__doc__)
@click.argument("revision", default="")
@click.option("--repeats", type=options.COUNT, default=5)
@click.option("--only", default="", help="A part of the names of problems.")
@click.option("--here", default="", help="Measure this problem in this process.")
@options.output
def main(
    revision: str, repeats: int, only: str, here: str, output: Path | None
) -> None:
    if here:
        print(json.dumps(measure(PROBLEMS[here])))
        return
    with tempfile.TemporaryDirectory() as folder:
        extract(revision, folder)
        folders = {"before": Path(folder), "after": Path(ROOT)}
        found: dict[tuple[str, str], list[dict[str, float]]]
        found = collections.defaultdict(list)
        for done in range(1, repeats + 1):
            for name in (name for name in PROBLEMS if only in name):
                for when, path in folders.items():
                    found[name, when].append(measured_by(path, name))
            rows = [
                {"problem": name, "revision": when} | summary(each)
                for (name, when), each in found.items()
            ]
            if output:
                content = record(rows)
                write(output, content | {"before": revision, "repeats": done})
    print(tabulate(rows, headers="keys", floatfmt=".3f"))


if __name__ == "__main__":
    main()
