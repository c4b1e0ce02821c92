"""The time, the memory and the disk that a run takes, and that are left."""

import os
import resource
import shutil
import sys
from pathlib import Path

import jax

from radazo_llm.settings import Settings

MIB = 2**20
# The limit of a container, and what it uses, of both versions of Linux's groups.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def tell(settings: Settings, seconds: float, step: int, folder: Path) -> None:
    """Prints the time that is left and the memory so far, once a step was timed."""
    left = settings.num_steps - step
    print(
        f"A step takes {seconds:.3g} s: {duration(seconds * left)} for {left:,} more "
        f"steps, without evaluations. {memory(settings)} "
        f"Disk: {size(shutil.disk_usage(folder).free)} free.",
        flush=True,
    )


def memory(settings: Settings) -> str:
    """Says what the process has taken, and what it may take."""
    taken, free = peak(), available()
    text = f"Memory: {size(taken)} so far"
    text += f", and {size(free)} are free." if free is not None else "."
    if free is not None and free < taken // 10:
        text += f" If it runs out, try {smaller(settings)}."
    return text


def smaller(settings: Settings) -> str:
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


def peak() -> int:
    """Bytes that the device, or else this process, has held at most."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available() -> int | None:
    """Bytes that are free: of the device, or of the container and the machine."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    found = [_of_machine()]
    for limit, used in _GROUPS:
        try:
            numbers = [int(Path(path).read_text("utf-8")) for path in (limit, used)]
        except (OSError, ValueError):
            continue  # There is no limit.
        found.append(numbers[0] - numbers[1])
    known = [number for number in found if number is not None]
    return max(min(known), 0) if known else None


def _of_machine() -> int | None:
    """The free memory of the machine."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        (line,) = (x for x in lines if x.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def duration(seconds: float) -> str:
    """About how long it takes, in a unit that suits it."""
    if seconds < 90:
        return f"about {seconds:.0f} seconds"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} minutes"
    return f"about {seconds / 3600:.1f} hours"


def size(number: int) -> str:
    """Bytes in MiB."""
    return (
        f"{number / MIB:,.1f} MiB" if number < 10 * MIB else f"{number / MIB:,.0f} MiB"
    )
