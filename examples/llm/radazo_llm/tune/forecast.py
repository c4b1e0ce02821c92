"""The time, the memory and the disk of a run, from its compiled step."""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from radazo_llm.tune import checkpoint
from radazo_llm.tune.data import Batch
from radazo_llm.tune.settings import Settings
from radazo_llm.tune.train import Job, State, train_step

MIB = 2**20
# Seconds of a step that is not timed again. Others are faster the second time.
_SLOW = 20.0


def line(
    settings: Settings,
    job: Job,
    state: State,
    feed: Any,
    measured: Mapping[str, Sequence[Batch]],
    folder: Path | None,
) -> str:
    """Returns a line on a run, after a step on copies of what is tuned.

    Args:
      settings: The settings of the run.
      job: The data of the steps.
      state: The state before the first step, which is left as it is.
      feed: The batches of the steps.
      measured: The examples that an evaluation measures, by split.
      folder: The folder of the run.
    """
    batch = feed(0)
    seconds, memory = timed(job, state, batch)
    # A token of an evaluation takes as long as one of a pass of the step.
    passes = settings.num_evaluations
    each = seconds / (passes * _tokens(batch))
    steps = sum(
        passes * int(size) * _tokens(feed.parts[bucket]) / len(feed.parts[bucket].label)
        for size, bucket in zip(feed.sizes, feed.which, strict=True)
    )
    evaluations = 1 + -(-settings.num_steps // settings.eval_every)
    often = sum(_tokens(p) for n in ("train", "dev") for p in measured[n])
    twice = sum(_tokens(part) for part in measured.get("test", ()))
    total = each * (steps + evaluations * often + 2 * twice)
    disk = checkpoint.KEPT * num_bytes(state)
    return (
        f"A step takes {seconds:.3g} s: {duration(total)} for {settings.num_steps:,} "
        f"steps and {evaluations} evaluations. {fits(settings, memory, disk, folder)}"
    )


def fits(
    settings: Settings, memory: int, disk: int, folder: Path | None, of: str = "a step"
) -> str:
    """Says whether there is memory and disk for a run, and what takes less."""
    room, free = available_memory(), free_disk(folder or Path())
    text = f"Memory: {_size(memory)} for {of}"
    text += f" of {_size(room)}" if room is not None else ""
    text += f". Disk: {_size(disk)} for checkpoints, of {_size(free)} free."
    if room is not None and memory > room:
        text += f" The step does not fit: try {_smaller(settings)}."
    if disk > free:
        text += " The checkpoints do not fit: choose another disk (--output)."
    return text


def _smaller(settings: Settings) -> str:
    """The options that make a step smaller, the most effective first."""
    found = []
    if settings.tune == "full":
        found.append("--tune lora")
    if settings.quantize == "no":
        found.append("--quantize int8 (or int4)")
    if settings.batch_size > 1:
        found.append(f"--batch-size {max(settings.batch_size // 4, 1)}")
    if not settings.last_layers and settings.tune == "lora":
        found.append("--last-layers 4")
    return ", ".join([*found, "--dtype bfloat16"])


def timed(job: Job, state: State, batch: Batch) -> tuple[float, int]:
    """Seconds of a step once it is compiled, and the bytes that it holds."""
    compiled = train_step.lower(job, state, batch).compile()
    took = []
    while not took or (len(took) < 2 and took[0] < _SLOW):
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        begun = time.perf_counter()
        jax.block_until_ready(train_step(job, copy, batch))
        took.append(time.perf_counter() - begun)
    return took[-1], held(compiled.memory_analysis())


def held(memory: Any) -> int:
    """The memory of a program: arguments, other results, temporary buffers."""
    found = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return found - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def num_bytes(tree: Any) -> int:
    return sum(
        leaf.size * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )


def available_memory() -> int | None:
    """Bytes of the device, or of the machine's memory; None if nothing tells."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def free_disk(folder: Path) -> int:
    """Free bytes of the disk of a folder, which need not exist."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def duration(seconds: float) -> str:
    """About how long it takes, in a unit that suits it."""
    if seconds < 90:
        return f"about {seconds:.0f} seconds"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} minutes"
    return f"about {seconds / 3600:.1f} hours"


def _tokens(batch: Batch) -> int:
    """The tokens of the sequences of some examples, cached outputs included."""
    examples, sequences, length = batch.tokens.shape[:3]
    return examples * sequences * length


def _size(number: int) -> str:
    if number < 10 * MIB:
        return f"{number / MIB:.1f} MiB"
    return f"{number / MIB:,.0f} MiB"
