"""Checkpoints of a run, which Orbax reads and writes in all processes together.

    python examples/tpu/checkpoint.py FOLDER FOLDER

compares the latest checkpoints in two folders bit by bit.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import filelock
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

_KEPT = 2


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Keeps other runs out of a folder, which it makes; a bucket cannot be locked.

    The lock of a process that is killed is gone with it.
    """
    if Path(folder).is_file():
        raise click.ClickException(f"{folder} must be a folder; got a file")
    with contextlib.ExitStack() as stack:
        held = True
        if jax.process_index() == 0 and "://" not in folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(filelock.FileLock(f"{folder}/.lock", timeout=0))
            except filelock.Timeout:
                held = False
        if not multihost_utils.process_allgather(np.array(held)).all():
            raise click.ClickException(
                f"{folder} is in use by another run; wait for its end, or use "
                "another folder"
            )
        yield


def manager(folder: str) -> ocp.CheckpointManager:
    """Returns Orbax's manager of the checkpoints in a folder or a bucket."""
    # Orbax logs every save, and raises its errors besides.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    return ocp.CheckpointManager(
        folder if "://" in folder else Path(folder).absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=_KEPT),
        item_handlers={
            "state": ocp.StandardCheckpointHandler(),
            "settings": ocp.JsonCheckpointHandler(),
        },
    )


def save(
    to: ocp.CheckpointManager, step: int, state: Any, settings: dict[str, Any]
) -> None:
    """Writes the state with its settings, in the background.

    The folder of a step gets its name when all processes have written their part.
    """
    items = {
        "state": ocp.args.StandardSave(state),
        "settings": ocp.args.JsonSave(settings),
    }
    with writing(to):
        to.save(step, args=ocp.args.Composite(**items))


@contextlib.contextmanager
def writing(to: ocp.CheckpointManager) -> Iterator[None]:
    """Reports in one line why a checkpoint, this one or one before, was not written."""
    try:
        yield
    except Exception as error:  # A full disk is reported in several classes.
        raise click.ClickException(
            f"a checkpoint in {to.directory} cannot be written ({_line(error)})"
        ) from error


def restore(
    source: ocp.CheckpointManager, state: Any, settings: dict[str, Any]
) -> Any | None:
    """Returns the latest state, or None if there is none.

    Args:
      source: The manager to read from.
      state: A tree of `jax.ShapeDtypeStruct` with the shardings of the result.
        Those of the saved state may be others.
      settings: Settings with which the saved run must have been started.
    """
    step = source.latest_step()
    if step is None:
        return None
    saved = _read(source, step, "settings", ocp.args.JsonRestore())
    for name, now in settings.items():
        if saved.get(name) != now:
            raise click.ClickException(
                f"{name} must be {saved.get(name)!r}, as in the checkpoint "
                f"{source.directory / str(step)}; got {now!r}"
            )
    return _read(source, step, "state", ocp.args.StandardRestore(state))


def _read(source: ocp.CheckpointManager, step: int, item: str, how: Any) -> Any:
    try:
        return source.restore(step, args=ocp.args.Composite(**{item: how}))[item]
    except Exception as error:  # Any error means that the files cannot be read.
        raise click.ClickException(
            f"the checkpoint {source.directory / str(step)} cannot be read "
            f"({_line(error)}); move it away to resume from the one before"
        ) from error


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def _latest(folder: str) -> tuple[int, dict[str, np.ndarray]]:
    """Returns the step of the latest checkpoint, and its arrays by their paths."""
    with manager(folder) as source:
        step = source.latest_step()
        if step is None:
            raise click.ClickException(f"{folder} has no checkpoint")
        # On one device, because the run may have had others.
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        whole = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one),
            source.item_metadata(step)["state"].tree,
        )
        state = _read(source, step, "state", ocp.args.StandardRestore(whole))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return step, {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def compare(first: str, second: str) -> str:
    """Describes the difference between the latest checkpoints of two folders."""
    (step, a), (other, b) = _latest(first), _latest(second)
    if (step, a.keys()) != (other, b.keys()):
        raise click.ClickException(
            f"{first} is at step {step} of another run than {second}"
        )
    different = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    if not different:
        return f"step {step}: equal, bit for bit"
    return f"step {step}: not equal; {', '.join(different)} differ"


@click.command(help=__doc__.splitlines()[0])
@click.argument("first")
@click.argument("second")
def main(first: str, second: str) -> None:
    print(compare(first, second))


if __name__ == "__main__":
    main()
