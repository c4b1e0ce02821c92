"""The folder of a run: its lock, its settings, and whether a run resumes it."""

import contextlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from radazo_llm.formats import chat_template
from radazo_llm.formats.files import json_object
from radazo_llm.settings import FREE, option_name

JOURNAL, SETTINGS = "journal.jsonl", "settings.json"


class Begun(NamedTuple):
    """A run that starts or resumes.

    Attributes:
      done: The number of steps in its journal.
      ends: The numbers of steps that it was started and continued with.
      measured: The learning rate that was measured before, if one was.
    """

    done: int
    ends: list[int]
    measured: float | None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder, which is made.

    The lock of a process that is killed is gone with it.
    """
    if folder.is_file():
        raise ValueError(f"{folder} must be a folder; got a file.")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / ".lock", timeout=0):
            yield
    except filelock.Timeout:
        raise ValueError(
            f"{folder} is in use by another run. Wait for its end, or choose another "
            "folder (--output)."
        ) from None


def begin(folder: Path, about: dict[str, Any], num_steps: int, resume: bool) -> Begun:
    """Starts the run in a folder, or resumes the one that is there.

    The journal has the values of all steps. If there is none yet, the run starts, so
    that one command serves a job that is restarted.

    Args:
      folder: The folder.
      about: Settings, and what tells models and data apart, by name.
      num_steps: The number of steps now.
      resume: Whether the run in the folder may continue.

    Raises:
      ValueError: If the folder has a run and `resume` is False, or another run.
    """
    path, done = folder / SETTINGS, steps_done(folder)
    check_free(folder, resume)
    if not done:
        begun = Begun(0, [num_steps], None)
        write(folder, about, begun)
        return begun
    before = json_object(path)
    _check_same(path, before, about)
    ends = before["ends"]
    if num_steps > ends[-1]:
        ends = [*ends, num_steps]
    begun = Begun(min(done, num_steps), ends, before["measured"])
    write(folder, about, begun)
    return begun


def check_free(folder: Path, resume: bool) -> None:
    """Raises a ValueError if a folder has a run, and none may continue."""
    if not resume and (done := steps_done(folder)):
        raise ValueError(
            f"{folder} has a run of {done} steps: resume it (--resume), or choose "
            "another folder (--output)."
        )


def started(folder: Path, resume: bool) -> str:
    """The date and the time at which a run began, which chat templates may name."""
    if resume and steps_done(folder):
        notes = json_object(folder / SETTINGS).get("notes")
        if isinstance(notes, dict) and isinstance(notes.get("started"), str):
            return notes["started"]
    return chat_template.present()


def write(folder: Path, about: dict[str, Any], begun: Begun) -> None:
    """Writes the settings of a run."""
    found = {"ends": begun.ends, "measured": begun.measured}
    write_json(folder / SETTINGS, about | found)


def steps_done(folder: Path) -> int:
    """The number of steps in a run's journal."""
    path = folder / JOURNAL
    if not path.exists() or not path.stat().st_size:
        return 0
    return len(zo.runs.History.from_journal(path).step)


def _check_same(path: Path, before: dict[str, Any], about: dict[str, Any]) -> None:
    """Raises a ValueError that names what differs."""
    now = json.loads(json.dumps(about, default=str))
    for part, values in now.items():
        saved = before.get(part, {})
        for name, value in values.items():
            if name not in FREE and saved.get(name) != value:
                shown = option_name(name) if part == "settings" else name
                raise ValueError(
                    f"{shown} must be {saved.get(name)!r:.80}, as in {path}; got "
                    f"{value!r:.80}. Give the same, or choose another folder "
                    "(--output)."
                )


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON, so that the file is whole or as it was before."""
    text = json.dumps(value, indent=1, default=str) + "\n"
    to = path.with_name(path.name + ".part")
    try:
        to.write_text(text, encoding="utf-8")
        to.replace(path)
    except OSError:
        to.unlink(missing_ok=True)
        raise


def checksum(tree: Any) -> int:
    """A number that tells models, or data, apart: of the head of every array."""
    found = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(_heads(tree)):
        found = zlib.crc32(jax.tree_util.keystr(path).encode(), found)
        found = zlib.crc32(np.asarray(leaf).tobytes(), found)
    return found


@jax.jit
def _heads(tree: Any) -> Any:
    """The first numbers of every array."""

    def head(leaf: jax.Array) -> jax.Array:
        numbers = jnp.ravel(leaf)[:4096]
        small = numbers.dtype in (jnp.int4, jnp.uint4)  # They have no bytes.
        return numbers.astype(jnp.int8) if small else numbers

    return jax.tree.map(head, tree)
