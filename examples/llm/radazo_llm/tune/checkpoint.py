"""Checkpoints of a run, by Orbax.

Orbax writes in the background, names a folder once it is complete, and notices flipped
bits in arrays. It does not notice them in JSON, so settings and notes have a checksum.
Its errors have many classes and lines; here each is one line.
"""

import contextlib
import functools
import json
import logging
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import filelock
import jax
import numpy as np
import orbax.checkpoint as ocp

KEPT = 2  # Checkpoints of a run.


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


@contextlib.contextmanager
def opened(folder: Path, *, create: bool = True) -> Iterator[ocp.CheckpointManager]:
    """The checkpoints in a folder; at the end, all of them are written."""
    # Orbax reports every save. Errors are raised besides.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    if getattr(sys.unraisablehook, "func", None) is not _told:
        sys.unraisablehook = functools.partial(_told, sys.unraisablehook)
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=create)
    kinds = ocp.PyTreeCheckpointHandler(), ocp.JsonCheckpointHandler()
    handlers = dict(zip(("state", "about"), kinds, strict=True))
    made = ocp.CheckpointManager(
        folder.absolute(), options=options, item_handlers=handlers
    )
    try:
        yield made
        with _one_line(f"a checkpoint in {folder} cannot be written"):
            made.wait_until_finished()
    finally:
        with contextlib.suppress(Exception):  # It was reported.
            made.close()


def save(
    to: ocp.CheckpointManager, step: int, state: Any, settings: Any, notes: Any
) -> None:
    """Writes a state in the background, with settings and notes that JSON can hold."""
    about = {"settings": settings, "notes": notes}
    about["checksum"] = _checksum_of(about)
    arrays = ocp.args.PyTreeSave(_leaves(state))
    items = {"state": arrays, "about": ocp.args.JsonSave(about)}
    # An error of the previous save is raised too.
    with _one_line(f"a checkpoint in {to.directory} cannot be written"):
        to.save(step, args=ocp.args.Composite(**items))


def restore(
    source: ocp.CheckpointManager,
    state: Any,
    settings: dict[str, Any],
    free: Collection[str] = (),
) -> tuple[Any, Any] | None:
    """The latest state and its notes, or None if there is no checkpoint.

    Args:
      source: The checkpoints.
      state: A tree of arrays, like those to read.
      settings: The settings that the run must have been started with.
      free: Names of settings that may be others now.

    Raises:
      ValueError: If the checkpoint is damaged, or of another run.
    """
    step = source.latest_step()
    if step is None:
        return None
    path = source.directory / str(step)
    with _one_line(f"{path} is damaged; move it away to continue from the one before"):
        about = _read(source, step, "about", ocp.args.JsonRestore())
        if about.pop("checksum") != _checksum_of(about):
            raise ValueError("the settings have another checksum")
    for name, now in settings.items():
        saved = about["settings"].get(name)
        if saved != now and name not in free:
            raise ValueError(
                f"{name} must be {saved!r}, as in the checkpoint {path}; got {now!r}."
            )
    with _one_line(f"{path} is damaged; move it away to continue from the one before"):
        leaves = [_read_leaf(source, step, *item) for item in _leaves(state).items()]
    return jax.tree.unflatten(jax.tree.structure(state), leaves), about["notes"]


def _read_leaf(
    source: ocp.CheckpointManager, step: int, name: str, like: jax.Array
) -> jax.Array:
    """An array of a state.

    If one of many reads fails that Orbax does at once, the others print tracebacks.
    """
    how = ocp.args.PyTreeRestore(
        item={name: 0},
        restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
        partial_restore=True,
    )
    found = _read(source, step, "state", how)[name]
    if (found.shape, found.dtype) != (like.shape, like.dtype):
        raise ValueError(f"{name} has the shape {found.shape} and dtype {found.dtype}")
    return jax.device_put(found, like.sharding)


def checksum(tree: Any) -> int:
    """Returns a number that tells arrays from others."""
    found = 0
    for name, leaf in _leaves(tree).items():
        found = zlib.crc32(name.encode(), found)
        found = zlib.crc32(np.asarray(leaf).tobytes(), found)
    return found


def _checksum_of(about: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _read(source: ocp.CheckpointManager, step: int, item: str, how: Any) -> Any:
    return source.restore(step, args=ocp.args.Composite(**{item: how}))[item]


def _leaves(tree: Any) -> dict[str, Any]:
    """The leaves by their paths, in the order of the tree."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _told(tell: Callable[[Any], None], raised: Any) -> None:
    """Reports an exception that nothing can catch, except late writes.

    If one of many writes fails, TensorStore's threads cannot report the end of the
    other writes: each prints a traceback, followed by the one line of the error itself.
    """
    if str(raised.exc_value) != "Event loop is closed":
        tell(raised)


@contextlib.contextmanager
def _one_line(problem: str) -> Iterator[None]:
    """Says in one line what an error is about, whatever its class."""
    try:
        yield
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{problem} ({reason:.200}).") from error
