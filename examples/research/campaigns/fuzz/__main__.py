"""Runs the fuzzer of programs, and writes down what it met.

    python -m campaigns.fuzz --programs 100000 --output records/trust/fuzz.json

``--seed 12 --programs 1`` checks one program. A failing program is printed as a test.
"""

import contextlib
import functools
import gc
import io
from typing import Any

import click
import jax

from common import options
from common.campaign import Campaign, campaign

from .report import derived, failures
from .run import run

CHUNK = 100  # Programs.


def configure() -> None:
    """Configures JAX as `tests/conftest.py` does, with two devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    gc.set_threshold(200_000, 20, 100)  # A trace makes many objects, and few cycles.


def chunk(seeds: range) -> dict[str, Any]:
    jax.clear_caches()
    # What programs print is of no interest.
    with contextlib.redirect_stdout(io.StringIO()):
        return run(seeds)


@campaign(__doc__)
@click.option("--programs", type=options.COUNT, default=100)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, help="Of the first program."
)
def main(programs: int, seed: int) -> Campaign:
    configure()
    seeds = range(seed, seed + programs)
    parts = [seeds[i : i + CHUNK] for i in range(0, programs, CHUNK)]
    cases = (
        ({"first": part[0], "last": part[-1]}, functools.partial(chunk, part))
        for part in parts
    )
    return Campaign(cases, derived, failed=failures)


if __name__ == "__main__":
    main()
