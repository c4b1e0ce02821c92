"""Checkpoints of a run."""

import contextlib
import functools
import json
import logging
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from radazo_llm.formats.files import check_within

_KEPT = 2


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Keeps other runs out of a folder, which is made; a bucket cannot be locked.

    The lock of a process that is killed is gone with it.
    """
    if Path(folder).is_file():
        raise ValueError(f"{folder} must be a folder; got a file")
    with contextlib.ExitStack() as stack:
        held = True
        if jax.process_index() == 0 and "://" not in folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(filelock.FileLock(f"{folder}/.lock", timeout=0))
            except filelock.Timeout:
                held = False
        if not multihost_utils.process_allgather(np.array(held)).all():
            raise ValueError(
                f"{folder} is in use by another run; wait for its end, or take "
                "another folder"
            )
        yield


def manager(folder: str, create: bool = True) -> ocp.CheckpointManager:
    """Returns the manager of the checkpoints in a folder or a bucket."""
    # Orbax reports every save; what goes wrong is raised besides.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    if getattr(sys.unraisablehook, "func", None) is not _told:
        sys.unraisablehook = functools.partial(_told, sys.unraisablehook)
    return ocp.CheckpointManager(
        folder if "://" in folder else Path(folder).absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=_KEPT, create=create),
        item_handlers={
            "state": ocp.PyTreeCheckpointHandler(),
            "about": ocp.JsonCheckpointHandler(),
        },
    )


def _told(tell: Callable[[Any], None], raised: Any) -> None:
    """Reports an exception that nothing can catch, except late writes.

    If one of many writes fails, TensorStore's threads cannot report the end of the
    other writes: each prints a traceback, followed by the one line of the error itself.
    """
    if str(raised.exc_value) != "Event loop is closed":
        tell(raised)


def save(
    to: ocp.CheckpointManager,
    step: int,
    state: Any,
    settings: dict[str, Any],
    notes: Any = None,
) -> None:
    """Writes the state with its settings and notes, in the background.

    The folder of a step gets its name when all processes have written their part.
    """
    leaves = _leaves(state)
    about = {"settings": settings, "checksums": _checksums(leaves), "notes": notes}
    about["checksum"] = _checksum_of(about)
    items = {"state": ocp.args.PyTreeSave(leaves), "about": ocp.args.JsonSave(about)}
    with writing(to):
        to.save(step, args=ocp.args.Composite(**items))


@contextlib.contextmanager
def writing(to: ocp.CheckpointManager) -> Iterator[None]:
    """Says in one line why a checkpoint, this one or one before, was not written."""
    try:
        yield
    except Exception as error:  # A full disk is reported in several classes.
        raise ValueError(
            f"a checkpoint in {to.directory} cannot be written ({_line(str(error))})"
        ) from error


def restore(
    source: ocp.CheckpointManager,
    state: Any,
    settings: dict[str, Any],
    free: Collection[str] = (),
) -> Any | None:
    """The latest state, or None if there is none.

    Args:
      source: The manager to read from.
      state: A tree of arrays, or of `jax.ShapeDtypeStruct`, with the shardings that
        are wanted, whichever those were that it was saved with.
      settings: Settings with which the run must have been started.
      free: Those of the settings that may be others now.
    """
    step = source.latest_step()
    if step is None:
        return None
    about = _about(source, step)
    for name, now in settings.items():
        saved = about["settings"].get(name)
        if saved != now and name not in free:
            raise ValueError(
                f"{name} must be {saved!r}, as in the checkpoint "
                f"{source.directory / str(step)}; got {now!r}"
            )
    wanted = _leaves(state)
    found = _read_leaves(source, step, wanted)
    if _checksums(found) != about["checksums"]:
        raise _damaged(source, step, "its checksum is another one")

    def place(name: str) -> jax.Array:
        like, array = wanted[name], found[name]
        return jax.make_array_from_callback(
            like.shape, like.sharding, array.__getitem__
        )

    return jax.tree.unflatten(jax.tree.structure(state), map(place, wanted))


def notes(source: ocp.CheckpointManager) -> Any:
    """Returns the notes that were written with the latest state."""
    return _about(source, source.latest_step())["notes"]


def _about(source: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """Returns the settings, notes and checksums that were written with a state."""
    _check_links(source, step)
    about = _read(source, step, "about", ocp.args.JsonRestore())
    checksum = about.pop("checksum", None) if isinstance(about, dict) else None
    if checksum != _checksum_of(about):
        raise _damaged(source, step, "the checksum of its settings is another one")
    return about


def _checksum_of(about: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _check_links(source: ocp.CheckpointManager, step: int) -> None:
    """Raises if a part of a checkpoint is a link to elsewhere."""
    folder = source.directory / str(step)
    if "://" in str(folder):
        return  # A bucket has no links.
    inside = Path(folder).resolve()
    for path in inside.rglob("*"):
        try:
            check_within(path, inside)
        except ValueError as error:
            raise _damaged(source, step, str(error)) from None


def _leaves(state: Any) -> dict[str, Any]:
    """The leaves by their paths."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


@jax.jit
def _sums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A sum of each leaf's bits, in which every place has another odd weight.

    Integers have the same sum whichever device has which of them.
    """

    def total(leaf: jax.Array) -> jax.Array:
        unsigned = f"uint{8 * leaf.dtype.itemsize}"
        bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
        places = jnp.arange(leaf.size, dtype=jnp.uint32).reshape(leaf.shape)
        return jnp.sum(bits * (2 * places + 1), dtype=jnp.uint32)

    return jax.tree.map(total, leaves)


def checksum(tree: Any) -> int:
    """Returns a number that tells arrays from others of the same shapes."""
    return zlib.crc32(json.dumps(_checksums(_leaves(tree))).encode())


def _checksums(leaves: dict[str, jax.Array]) -> dict[str, int]:
    return {name: int(value) for name, value in _sums(leaves).items()}


def _read(source: ocp.CheckpointManager, step: int, item: str, how: Any) -> Any:
    try:
        return source.restore(step, args=ocp.args.Composite(**{item: how}))[item]
    except Exception as error:  # Any error means that the files cannot be read.
        raise _damaged(source, step, str(error)) from error


def _read_leaves(
    source: ocp.CheckpointManager, step: int, names: Iterable[str]
) -> dict[str, np.ndarray]:
    """The leaves of the state, whole.

    One after another, as NumPy's arrays: if one of many simultaneous reads of Orbax
    fails, the other reads end in noise on the terminal.
    """
    found = {}
    for name in names:
        how = ocp.args.PyTreeRestore(
            item={name: 0},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        found |= _read(source, step, "state", how)
    return found


def _damaged(source: ocp.CheckpointManager, step: int, reason: str) -> ValueError:
    return ValueError(
        f"the checkpoint {source.directory / str(step)} cannot be read "
        f"({_line(reason)}); move it away to go on from the one before"
    )


def _line(reason: str) -> str:
    return next(iter(reason.splitlines()), "for no reason given")[:200]


def _latest(folder: str) -> tuple[int, dict[str, np.ndarray]]:
    """The step and the leaves of the latest checkpoint, on one device."""
    with manager(folder, create=False) as source:
        step = source.latest_step()
        if step is None:
            raise ValueError(f"there is no checkpoint in {folder}")
        _check_links(source, step)
        names = source.item_metadata(step)["state"].tree
        return step, _read_leaves(source, step, names)


def compare(first: str, second: str) -> str:
    """Describes the difference between the latest checkpoints of two folders."""
    (step, a), (other, b) = _latest(first), _latest(second)
    if (step, a.keys()) != (other, b.keys()):
        raise ValueError(f"{first} is at step {step} of another run than {second}")
    different = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    if not different:
        return f"step {step}: equal, bit for bit"
    return f"step {step}: not equal; {', '.join(different)} differ"
