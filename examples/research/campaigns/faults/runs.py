"""Runs of a training program whose writes fail, or that is killed at one of them.

The program is the script `examples/tpu/train.py`. Each run is a new process, because a
forked process may hang if JAX was imported before. It has `shim.c` preloaded, which
counts the changes of the files in a folder.
"""

import ctypes
import functools
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

import radazo_jax  # noqa: F401
from common import ROOT

SCRIPT = ROOT / "examples" / "tpu" / "train.py"
OPTIONS = (
    *("--layers", "1", "--width", "16", "--vocabulary", "16", "--length", "8"),
    *("--batch-size", "8", "--num-directions", "2"),
    *("--steps", "6", "--checkpoint-every", "2", "--checkpoint"),
)
NOTHING, KILL, FULL, COPY = 0, 1, 2, 3
MINUTES = 5 * 60


class Ended(NamedTuple):
    """A process that has ended.

    Attributes:
      code: Its exit code; below 0, the signal.
      said: The lines that it wrote to stderr, without progress bars.
      point: The last change of a file that it began.
      seconds: Its duration, without what it imported.
    """

    code: int
    said: list[str]
    point: str
    seconds: float


def train(folder: Path) -> int:
    """Runs the script with its checkpoints in a folder, and returns its exit code."""
    sys.argv = [str(SCRIPT), *OPTIONS, str(folder)]
    sys.path.insert(0, str(ROOT))  # The script imports its neighbors by their folder.
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def in_process(
    do: Callable[[], int],
    folder: Path,
    at: int = -1,
    mode: int = NOTHING,
    kind: str | None = None,
    kill_after: float = MINUTES,
) -> Ended:
    """Does something in a process of its own.

    Args:
      do: The function that it calls, which is pickled; the result is the exit code.
      folder: The folder whose changes are counted. The process's output and log are
        written next to it.
      at: The change at which it is killed, or the disk is full.
      mode: The kind of fault.
      kind: The kind of changes that `at` counts; by default, all.
      kill_after: The seconds after which it is killed from outside, counted from the
        call of the function.
    """
    log = folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    process = multiprocessing.get_context("spawn").Process(
        target=_inside, args=(do, folder, at, mode, kind)
    )
    process.start()
    # The log is made right before the call. What the process imports takes longer.
    while process.is_alive() and not log.exists():
        time.sleep(0.005)
    start = time.monotonic()
    process.join(min(kill_after, MINUTES))
    process.kill()
    process.join()
    seconds = time.monotonic() - start
    text = folder.with_suffix(".out").read_text(encoding="utf-8", errors="replace")
    lines = text.replace("\r", "\n").splitlines()
    bar = re.compile(r"it/s|\d+%\||step/s|s/step")
    said = [line for line in lines if line.strip() and not bar.search(line)]
    changes = logged(folder)
    point = changes[-1] if changes else "before the first"
    return Ended(process.exitcode or 0, said, point, seconds)


def _inside(
    do: Callable[[], int], folder: Path, at: int, mode: int, kind: str | None
) -> None:
    """Runs in the new process, and ends it."""
    code = 1
    try:
        out = folder.with_suffix(".out")
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        names = str(folder).encode(), str(folder.with_suffix(".log")).encode()
        wanted = None if kind is None else described(kind, folder).encode()
        ctypes.CDLL(None).fault_arm(*names, ctypes.c_long(at), mode, wanted)
        code = do()
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def logged(folder: Path) -> list[str]:
    """The changes of the files in a folder, in their order."""
    log = folder.with_suffix(".log").read_text(encoding="utf-8")
    return [normal(line, folder) for line in log.splitlines()]


def normal(change: str, folder: Path) -> str:
    """A change of a file, without what differs from run to run."""
    _, name, path = change.split(" ", 2)
    path = path.removeprefix(str(folder)).lstrip("/")
    path = re.sub(r"(?<=tfevents\.).*|[0-9a-f]{32}|(?<=-tmp-).*|\.__lock$", "*", path)
    path = re.sub(r"orbax-checkpoint-tmp[-.0-9]*", "tmp", path)
    return f"{name} {re.sub('[0-9]+', 'N', path)}"


def described(kind: str, folder: Path) -> str:
    """The POSIX expression of the changes whose normal form is `kind`."""
    name, path = kind.split(" ", 1)
    path = re.sub(r"([][\\.^$+?(){}|])", r"\\\1", path)
    path = path.replace("*", ".*").replace("N", "(N|[0-9]+)")
    path = path.replace("tmp", "(tmp|orbax-checkpoint-tmp[-.0-9]*)")
    return f"^[0-9]+ {name} {re.escape(str(folder))}{'/' * bool(path)}{path}$"


def latest_step(folder: Path) -> int | None:
    """The step of the latest checkpoint, if there is one."""
    with ocp.CheckpointManager(folder.absolute()) as manager:
        return manager.latest_step()


def latest(folder: Path) -> tuple[int | None, dict[str, bytes]]:
    """The step of the latest checkpoint, and its arrays as bytes."""
    step = latest_step(folder)
    arrays = {}
    for item in (folder.absolute() / str(step)).iterdir():
        if (item / "_METADATA").exists():
            tree = ocp.PyTreeCheckpointer().restore(item)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                name = item.name + jax.tree_util.keystr(path)
                arrays[name] = np.asarray(leaf).tobytes()
    return step, arrays


def resume(folder: Path, whole: Path) -> int:
    """Runs the script again in a folder, and compares its end with another's."""
    return train(folder) or (0 if latest(folder) == latest(whole) else 77)


def verdict(folder: Path, whole: Path) -> str:
    """The outcome if a run is started again in its folder."""
    ended = in_process(functools.partial(resume, folder, whole), folder)
    if ended.code == 0:
        return "same end"
    if ended.code == 2 and len(ended.said) == 1:
        return "one error"
    return f"failed: {ended.code} {ended.said[-3:]!r:.600}"


def disturbed(folder: Path, whole: Path, **how: Any) -> dict[str, Any]:
    """The outcome of a disturbed run, and of the next one in its folder."""
    shutil.rmtree(folder, ignore_errors=True)
    ended = in_process(functools.partial(train, folder), folder, **how)
    if how.get("mode") != FULL:
        first = {-signal.SIGKILL: "killed", 0: "had ended"}.get(ended.code, "failed")
    elif ended.code == 0:
        first = "went on"
    else:
        told = [": error: " in line for line in ended.said]
        first = "one error" if ended.code == 2 and told == [True] else "failed"
    row = {"first": first, "point": ended.point}
    if first == "failed":
        row["said"] = f"{ended.code} {ended.said[-3:]!r:.600}"
    return row | {"then": verdict(folder, whole)}


class Whole(NamedTuple):
    """A run that was not disturbed: its changes of files, and its seconds."""

    changes: list[str]
    seconds: float


def whole_run(folder: Path, mode: int = NOTHING) -> Whole:
    """Runs the program in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    ended = in_process(functools.partial(train, folder), folder, mode=mode)
    if ended.code != 0:
        raise RuntimeError(f"{SCRIPT} must run undisturbed; got {ended.said[-3:]}")
    return Whole(logged(folder), ended.seconds)
