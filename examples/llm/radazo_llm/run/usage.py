"""The time, the memory and the disk of a run."""

import resource
import shutil
import sys
from pathlib import Path

import jax

MIB = 2**20


def told(seconds: float, left: int, folder: Path) -> str:
    """A line on the time of some steps, the memory so far, and the free disk.

    Args:
      seconds: The time of a step.
      left: The number of steps.
      folder: The folder of the run.
    """
    free = shutil.disk_usage(folder).free
    return (
        f"A step takes {seconds:.3g} s: {duration(seconds * left)} for {left:,} more "
        f"steps, without evaluations. Memory: {peak() / MIB:,.0f} MiB so far. Disk: "
        f"{free / MIB:,.0f} MiB free."
    )


def peak() -> int:
    """Bytes that the device, or else this process, has held at most."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def duration(seconds: float) -> str:
    """About how long it takes, in a unit that suits it."""
    if seconds < 90:
        return f"about {seconds:.0f} seconds"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} minutes"
    return f"about {seconds / 3600:.1f} hours"
