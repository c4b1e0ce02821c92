"""Checkpoints of a run, read and written by all of its processes together.

    python examples/common/checkpoint.py FOLDER FOLDER

tells whether the latest checkpoints in two folders hold the same numbers.
"""

from pathlib import Path
from typing import Any

import filelock
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from examples.common import cli
from examples.common.cli import UserError

_KEPT = 2


def absolute(folder: str) -> str:
    """A folder by its absolute path, or a bucket as it is."""
    if "://" in folder:
        return folder
    if Path(folder).exists() and not Path(folder).is_dir():
        raise UserError(f"--checkpoint must be a folder; got the file {folder}")
    return str(Path(folder).absolute())


def lock(folder: str) -> filelock.FileLock | None:
    """Keeps other runs out of the folder, as long as what it returns is referred to.

    A bucket cannot be locked.
    """
    lock, held = None, True
    folder = absolute(folder)
    if jax.process_index() == 0 and "://" not in folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(Path(folder) / ".lock", blocking=False)
        try:
            lock.acquire()
        except filelock.Timeout:
            held = False
    if not multihost_utils.process_allgather(np.array(held)).all():
        raise UserError(
            f"--checkpoint {folder} is in use by another run; wait for its end, or "
            "take another folder"
        )
    return lock


def manager(folder: str, create: bool = True) -> ocp.CheckpointManager:
    """What reads and writes the checkpoints in a folder, or a bucket."""
    return ocp.CheckpointManager(
        absolute(folder),
        options=ocp.CheckpointManagerOptions(max_to_keep=_KEPT, create=create),
        item_handlers={
            "state": ocp.StandardCheckpointHandler(),
            "about": ocp.JsonCheckpointHandler(),
        },
    )


def save(
    to: ocp.CheckpointManager, step: int, state: Any, settings: dict[str, Any]
) -> None:
    """Writes the state beside its settings, in the background.

    The folder of a step gets its name when all processes have written their part.
    """
    about = {"settings": settings, "tree": _describe(state)}
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about)
    )
    to.save(step, args=args)


def restore(
    source: ocp.CheckpointManager, state: Any, settings: dict[str, Any]
) -> Any | None:
    """The latest state, or None if there is none.

    Args:
      source: Where from.
      state: A tree of `jax.ShapeDtypeStruct` with the shardings that are wanted,
        whichever those were that it was saved with.
      settings: What the run must have been started with.
    """
    step = source.latest_step()
    if step is None:
        return None
    where = f"the checkpoint {source.directory / str(step)}"
    about = _read(source, step, "about", ocp.args.JsonRestore(), where)
    _check_equal(where, about["tree"], _describe(state))
    _check_equal(where, about["settings"], settings)
    return _read(source, step, "state", ocp.args.StandardRestore(state), where)


def _read(
    source: ocp.CheckpointManager, step: int, item: str, args: Any, where: str
) -> Any:
    try:
        return source.restore(step, args=ocp.args.Composite(**{item: args}))[item]
    except (KeyError, OSError, ValueError) as error:
        raise UserError(
            f"{where} cannot be read ({str(error).splitlines()[0]:.200}); move it "
            "away to go on from the one before"
        ) from error


def _describe(tree: Any) -> dict[str, str]:
    """Shapes and dtypes by path."""
    return {
        _name(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _check_equal(where: str, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in [*saved, *wanted]:
        there, here = saved.get(name, "nothing"), wanted.get(name, "nothing")
        if there != here:
            raise UserError(
                f"{where} is of another run: {name} is {there} there "
                f"and {here} here; take its settings, or another folder"
            )


def _latest(folder: str) -> tuple[int, dict[str, np.ndarray]]:
    """The step and the leaves of the latest checkpoint, on one device."""
    source = manager(folder, create=False)
    step = source.latest_step()
    if step is None:
        raise UserError(f"there is no checkpoint in {folder}")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=device),
        source.item_metadata(step)["state"].tree,
    )
    state = _read(source, step, "state", ocp.args.StandardRestore(shapes), folder)
    source.close()
    return step, {
        _name(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def compare(first: str, second: str) -> str:
    """What distinguishes the latest checkpoints of two folders, in words."""
    (step, a), (other, b) = _latest(first), _latest(second)
    if step != other:
        raise UserError(f"{first} is at step {step} and {second} at step {other}")
    _check_equal(first, _describe(a), _describe(b))
    if all(a[name].tobytes() == b[name].tobytes() for name in a):
        return f"step {step}: equal, bit for bit"

    def distance(name: str) -> float:
        x, y = (np.asarray(leaf[name], np.float64) for leaf in (a, b))
        return float(np.linalg.norm(x - y) / np.linalg.norm(x))

    worst = max((name for name in a if name.startswith("params")), key=distance)
    return (
        f"step {step}: not equal; of the parameters, {worst} differs most, by "
        f"{distance(worst):.1e} of its norm"
    )


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("folders", nargs=2)
    try:
        print(compare(*parser.parse_args().folders))
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
