"""Times `ask` and `tell` of a step on a black box, in turn with pycma.

    python -m benchmarks.ask_tell --output ask_tell.json

pycma (of the extra `benchmarks`) has the same population. Above 10³ dimensions its
covariance is diagonal, because a full one takes minutes to factor.
"""

import functools
import time
from collections.abc import Iterator
from typing import Any

import click
import numpy as np

import radazo_jax as zo
from benchmarks.timing import by_turns
from common import options
from common.campaign import Campaign, campaign

DIMENSIONS = (10**2, 10**3, 10**4, 10**5)
FULL_COVARIANCE = 10**3


def values(points: Any) -> list[float]:
    return [float(np.sum(x[:5] ** 2)) for x in points]


def library(dimension: int) -> Iterator[float]:
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


def measured(dimension: int, repeats: int) -> dict[str, float]:
    seconds = by_turns(
        {"radazo_jax": library(dimension), "pycma": pycma(dimension)}, repeats
    )
    ratio = seconds["pycma"] / seconds["radazo_jax"]
    return {"ask_tell_ms": 1e3 * seconds["radazo_jax"], "pycma/ours": ratio}


@campaign(__doc__)
@click.option("--repeats", type=options.COUNT, default=30)
def main(repeats: int) -> Campaign:
    return Campaign(
        ({"table": "ask_tell", "d": d}, functools.partial(measured, d, repeats))
        for d in DIMENSIONS
    )


if __name__ == "__main__":
    main()
