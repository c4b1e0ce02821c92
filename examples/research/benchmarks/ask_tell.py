"""Times `ask` and `tell` of a step on a black box, in turn with pycma.

    python -m benchmarks.ask_tell --output ask_tell.json

pycma (of the extra `benchmarks`) has the same population. Above 10³ dimensions its
covariance is diagonal, because a full one takes minutes to factor. A second table has a
function that sleeps for 10 ms, on eight threads: the time of a step over the sleep of
its points, and the time of the executor alone.
"""

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import click
import numpy as np

import radazo_jax as zo
from benchmarks.timing import by_turns
from common import options
from common.record import record, write

DIMENSIONS = (10**2, 10**3, 10**4, 10**5)
FULL_COVARIANCE = 10**3
SLEEP, THREADS, SLEEPERS = 0.01, 8, 10**3  # Seconds; threads; dimensions.
POINTS = (16, 32, 64)


def values(points: Any) -> list[float]:
    return [float(np.sum(x[:5] ** 2)) for x in points]


def ours(dimension: int) -> Iterator[float]:
    """The seconds of ask and tell, step by step."""
    start = np.ones(dimension, np.float32)
    run = zo.ask_tell(start, zo.radazo(1e-3), zo.forward_difference())
    while True:
        begin = time.perf_counter()
        points = run.ask()
        asked = time.perf_counter()
        found = values(points)
        told = time.perf_counter()
        run.tell(found)
        yield asked - begin + time.perf_counter() - told


def pycma(dimension: int) -> Iterator[float]:
    import cma

    settings = {"popsize": 11, "verbose": -9}
    settings["CMA_diagonal"] = dimension > FULL_COVARIANCE
    search = cma.CMAEvolutionStrategy(np.ones(dimension), 0.1, settings)
    while True:
        begin = time.perf_counter()
        points = search.ask()
        asked = time.perf_counter()
        found = values(points)
        told = time.perf_counter()
        search.tell(points, found)
        yield asked - begin + time.perf_counter() - told


def sleeping(x: np.ndarray) -> float:
    time.sleep(SLEEP)
    return float(np.sum(x**2))


def with_steps(executor: Executor, points: int, repeats: int) -> float:
    """The seconds of a step of `minimize_black_box`, median."""
    ends: list[float] = []
    zo.minimize_black_box(
        sleeping,
        np.ones(SLEEPERS, np.float32),
        zo.radazo(1e-3),
        zo.forward_difference(num_directions=points - 1),
        num_steps=repeats,
        executor=executor,
        progress=False,
        callback=lambda report: ends.append(time.perf_counter()),
    )
    return statistics.median(np.diff(ends))


def without_steps(executor: Executor, points: int, repeats: int) -> float:
    """The seconds that the executor takes for as many points, median."""
    ends = [time.perf_counter()]
    for _ in range(repeats):
        candidates = np.ones((points, SLEEPERS), np.float32)
        wait([executor.submit(sleeping, x) for x in candidates])
        ends.append(time.perf_counter())
    return statistics.median(np.diff(ends))


@options.command(__doc__)
@options.output
@click.option("--repeats", type=options.COUNT, default=30)
def main(output: Path | None, repeats: int) -> None:
    rows: list[dict[str, Any]] = []
    for d in DIMENSIONS:
        times = by_turns({"ours": ours(d), "pycma": pycma(d)}, repeats)
        row = {"table": "ask_tell", "d": d, "ask_tell_ms": 1e3 * times["ours"]}
        rows.append(row | {"pycma/ours": times["pycma"] / times["ours"]})
        print(rows[-1])
    with ThreadPoolExecutor(THREADS) as executor:
        for points in POINTS:
            sleep = points / THREADS * SLEEP
            steps = with_steps(executor, points, repeats) / sleep
            alone = without_steps(executor, points, repeats) / sleep
            row = {"table": "threads", "points": points, "overhead": steps - 1}
            rows.append(row | {"executor_alone": alone - 1})
            print(rows[-1])
    if output:
        write(output, record(rows))


if __name__ == "__main__":
    main()
