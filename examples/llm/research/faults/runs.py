"""Runs whose writes fail, or that are killed at one of them.

A process that has imported everything and computed nothing forks one process a run. It
has `shim.c` preloaded, which counts the changes of the files in a folder.
"""

import ctypes
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from radazo_llm.command import radazo_llm
from radazo_llm.formats import weights
from radazo_llm.models.opt import OPT, Config
from radazo_llm.tune import command  # noqa: F401
from research import corpus
from research.faults.compare import compare

NOTHING, KILL, FULL = 0, 1, 2
MINUTES = 5 * 60
LLM = (
    *("tune", "--task", "sst2", "--batch-size", "4", "--eval-batch-size", "10"),
    *("--lora-rank", "2", "--eval-every", "3", "--checkpoint-every", "2"),
    *("--resume", "--model"),
)


class Example(NamedTuple):
    """A run, and its files that are the same after an undisturbed run.

    Attributes:
      run: Runs it with a folder for its files.
      checkpoints: The folder of its checkpoints.
      files: Those that are the same, byte for byte.
    """

    run: Callable[[str], Any]
    checkpoints: str
    files: Sequence[str] = ()


class Ended(NamedTuple):
    """A process that has ended.

    Attributes:
      code: Its exit code; below 0, the signal.
      said: The lines that it wrote to stderr, without progress bars.
      point: The last change of a file that it began.
      changes: The number of changes that it made.
    """

    code: int
    said: list[str]
    point: str
    changes: int


def example(folder: pathlib.Path, steps: int = 6) -> Example:
    """The run; the files that it reads lie in a folder."""
    model, end = str(folder / "model"), ("--steps", str(steps))

    def run(output: str) -> Any:
        data = ("--data", model, *end, "--output", output)
        try:
            radazo_llm([*LLM, model, *data])
        except SystemExit as error:
            return error.code

    return Example(run, "checkpoints", ["metrics.jsonl"])


def prepare(folder: pathlib.Path) -> None:
    """Writes a tiny model, its tokenizer and its data."""
    from flax import nnx

    folder.mkdir()
    lines = ["a good day. It was great", "a bad day. It was terrible"]
    tokenizer = corpus.train_tokenizer(lines * 10, 300)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = Config(tokenizer.get_vocab_size(), 16, 2, 64, 2, 32)
    weights.save(OPT(config, dtype="float32", rngs=nnx.Rngs(0)), folder)
    rows = ["sentence\tlabel", *("a good day.\t1", "a bad day.\t0") * 5]
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")


def forked(
    do: Callable[[], Any],
    folder: pathlib.Path,
    at: int = -1,
    mode: int = NOTHING,
    kind: str | None = None,
    kill_after: float | None = None,
) -> Ended:
    """Does something in a process of its own.

    Args:
      do: What; its result, if it is a number, is the exit code.
      folder: Whose changes are counted. Beside it go the process's output and log.
      at: The change at which it is killed, or the disk is full.
      mode: The kind of fault.
      kind: The kind of changes that `at` counts; by default, all.
      kill_after: The seconds after which it is killed from outside.
    """
    out, log = folder.with_suffix(".out"), folder.with_suffix(".log")
    child = os.fork()
    if child == 0:
        code: Any = 1
        try:
            descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            shim = ctypes.CDLL(None)
            arguments = str(folder).encode(), str(log).encode()
            wanted = None if kind is None else described(kind, folder).encode()
            shim.fault_arm(*arguments, ctypes.c_long(at), mode, wanted)
            code = do()
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)
    end = time.monotonic() + MINUTES
    killed = time.monotonic() + (MINUTES if kill_after is None else kill_after)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > min(killed, end):
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    text = out.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    said = [line for line in text.splitlines() if line.strip() and "it/s" not in line]
    said = [line for line in said if not re.search(r"\d+%\||step/s|s/step", line)]
    changes = log.read_text(encoding="utf-8").splitlines()
    point = normal(changes[-1], folder) if changes else "before the first"
    return Ended(os.waitstatus_to_exitcode(status), said, point, len(changes))


def normal(change: str, folder: pathlib.Path) -> str:
    """A change of a file, without what differs from run to run."""
    _, name, path = change.split(" ", 2)
    path = path.removeprefix(str(folder)).lstrip("/")
    path = re.sub(r"(?<=tfevents\.).*|[0-9a-f]{32}|(?<=-tmp-).*|\.__lock$", "*", path)
    path = re.sub(r"orbax-checkpoint-tmp[-.0-9]*", "tmp", path)
    return f"{name} {re.sub('[0-9]+', 'N', path)}"


def described(kind: str, folder: pathlib.Path) -> str:
    """The POSIX expression of the changes whose normal form is `kind`."""
    name, path = kind.split(" ", 1)
    path = re.sub(r"([][\\.^$+?(){}|])", r"\\\1", path)
    path = path.replace("*", ".*").replace("N", "(N|[0-9]+)")
    path = path.replace("tmp", "(tmp|orbax-checkpoint-tmp[-.0-9]*)")
    return f"^[0-9]+ {name} {re.escape(str(folder))}/{path}$"


def verdict(example: Example, folder: pathlib.Path, whole: pathlib.Path) -> str:
    """The outcome if a run is started again in its folder."""

    def resume() -> int:
        code = example.run(str(folder))
        if code:
            return code
        pair = whole / example.checkpoints, folder / example.checkpoints
        result = compare(*pair)
        equal = all(
            (whole / name).read_bytes() == (folder / name).read_bytes()
            for name in example.files
        )
        return 0 if equal and result.endswith("equal, bit for bit") else 77

    ended = forked(resume, folder)
    if ended.code == 0:
        return "same end"
    if ended.code == 2 and len(ended.said) == 1:
        return "one error"
    return f"failed: {ended.code} {ended.said[-3:]!r:.600}"


def disturbed(
    example: Example, folder: pathlib.Path, whole: pathlib.Path, **how: Any
) -> dict[str, Any]:
    """The outcome of a disturbed run, and of the next one in its folder."""
    shutil.rmtree(folder, ignore_errors=True)
    ended = forked(lambda: example.run(str(folder)), folder, **how)
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
    return row | {"then": verdict(example, folder, whole)}


class Whole(NamedTuple):
    """A run that was not disturbed: its changes of files, and its seconds."""

    changes: list[str]
    seconds: float


def whole_run(example: Example, folder: pathlib.Path) -> Whole:
    """Runs an example in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    start = time.monotonic()
    ended = forked(lambda: example.run(str(folder)), folder)
    assert ended.code == 0, ended.said
    log = folder.with_suffix(".log").read_text(encoding="utf-8").splitlines()
    return Whole([normal(line, folder) for line in log], time.monotonic() - start)


def occurrence(changes: list[str], i: int) -> dict[str, Any]:
    """A change as the number `at` of its kind, for threads mix the kinds anew."""
    return {"kind": changes[i], "at": changes[:i].count(changes[i])}


def chosen(changes: list[str], number: int, rng: random.Random) -> list[int]:
    """The first and the last change of each kind, and others at random."""
    first = {point: i for i, point in reversed([*enumerate(changes)])}
    last = {point: i for i, point in enumerate(changes)}
    wanted = [*sorted(first.values())]
    wanted += sorted({*last.values()} - {*wanted})
    others = [i for i in range(len(changes)) if i not in wanted]
    rng.shuffle(others)
    return (wanted + others)[:number]
