"""Reads files that were changed, and says what became of each."""

import collections
import os
import pathlib
import random
import resource
import shutil
import signal
import tempfile
import time
from typing import Any

from .mutate import mutated
from .targets import TARGETS

SECONDS = 60  # That a file may take, on a machine that does much else.


def hang(*_: Any) -> None:
    raise TimeoutError(f"it took more than {SECONDS} seconds")


def outcome(name: str, folder: pathlib.Path, right: Any) -> str:
    """The outcome of a folder: "same" or "another", as which it was
    read, "refused" in one line, or "failed: ..."."""
    target = TARGETS[name]
    signal.alarm(SECONDS)
    try:
        found = target.read(folder)
    except (ValueError, FileNotFoundError) as error:
        lines = str(error).splitlines()
        return "refused" if len(lines) == 1 else f"failed: {lines!r:.500}"
    except BaseException as error:  # A panic of Rust's is no Exception.
        return f"failed: {error!r:.500}"
    finally:
        signal.alarm(0)
    if target.same is None:
        return "another"
    return "same" if target.same(found, right) else f"failed: read as {found!r:.500}"


def run(
    name: str, number: int, seed: int = 0, keep: pathlib.Path | None = None
) -> tuple[collections.Counter[str], float]:
    """The outcomes of so many files of a target, and the seconds of the slowest."""
    target = TARGETS[name]
    counts: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    previous = signal.signal(signal.SIGALRM, hang)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "copy"
        folder.mkdir()
        target.make(folder)
        right = target.read(folder)
        contents = {
            path: path.read_bytes()
            for path in sorted(folder.glob(target.files))
            if path.is_file() and path.stat().st_size
        }
        for i in range(number):
            rng = random.Random(f"{seed} {name} {i}")
            path = rng.choice(list(contents))
            path.write_bytes(target.after(mutated(contents[path], rng)))
            start = time.perf_counter()
            found = outcome(name, folder, right)
            slowest = max(slowest, time.perf_counter() - start)
            counts[found] += 1
            if found.startswith("failed") and keep is not None:
                shutil.copytree(folder, keep / f"{os.getpid()}-{name[:7]}-{seed}-{i}")
            path.write_bytes(contents[path])
    signal.signal(signal.SIGALRM, previous)
    return counts, slowest


def part(
    name: str, number: int, seed: int, keep: pathlib.Path | None
) -> tuple[str, collections.Counter[str], float, float]:
    """Returns the results of `run` with the name and the peak MiB of the process."""
    counts, slowest = run(name, number, seed, keep)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return name, counts, slowest, peak
