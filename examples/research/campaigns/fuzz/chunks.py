"""Many programs in several processes, chunk by chunk."""

import contextlib
import gc
import io
import itertools
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from . import run as one

# Programs, and chunks whose programs are kept when they are compiled.
CHUNK, KEPT = 50, 60
_chunks = itertools.count(1)
empty = one.empty


def configure() -> None:
    """Configures JAX as `tests/conftest.py` does, with two devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    gc.set_threshold(200_000, 20, 100)  # A trace makes many objects, and few cycles.


def run(seeds: range, processes: int) -> Iterator[dict[str, Any]]:
    """The reports of all chunks, in order."""
    parts = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    configure()
    if processes == 1:
        yield from map(chunk, parts)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, configure) as pool:
        yield from pool.imap(chunk, parts)


def chunk(seeds: range) -> dict[str, Any]:
    # Programs that were compiled once are met again, but not all fit into memory.
    if next(_chunks) % KEPT == 0:
        jax.clear_caches()
    # What programs print is of no interest.
    with contextlib.redirect_stdout(io.StringIO()):
        return one.run(seeds)


def merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: dict(sorted((Counter(a[key]) + Counter(b[key])).items()))
        for key in ("checks", "primitives")
    }
    return both | {
        "programs": a["programs"] + b["programs"],
        "failures": a["failures"] + b["failures"],
    }
