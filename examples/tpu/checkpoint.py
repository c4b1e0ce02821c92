"""Checkpoints of a run, read and written by all of its processes together.

    python examples/tpu/checkpoint.py FOLDER FOLDER

tells whether the latest checkpoints in two folders hold the same numbers.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from cluster import UserError

_KEPT = 2


def manager(folder: Path) -> ocp.CheckpointManager:
    """What reads and writes the checkpoints in a folder."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--checkpoint must be a folder; got the file {folder}")
    return ocp.CheckpointManager(
        folder.absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=_KEPT),
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
    about = source.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))
    where = Path(source.directory) / str(step)
    saved = about["about"]
    _check_equal(where, saved["tree"], _describe(state))
    _check_equal(where, saved["settings"], settings)
    args = ocp.args.Composite(state=ocp.args.StandardRestore(state))
    return source.restore(step, args=args)["state"]


def _describe(tree: Any) -> dict[str, str]:
    """Shapes and dtypes by path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            f"{leaf.dtype}{list(leaf.shape)}"
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _check_equal(where: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in [*saved, *wanted]:
        there, here = saved.get(name, "nothing"), wanted.get(name, "nothing")
        if there != here:
            raise UserError(
                f"the checkpoint {where} is of another run: {name} is {there} there "
                f"and {here} here; take its settings, or another folder"
            )


def _read(folder: Path) -> tuple[int, dict[str, np.ndarray]]:
    """The step and the leaves of the latest checkpoint, on one device."""
    source = manager(folder)
    step = source.latest_step()
    if step is None:
        raise UserError(f"there is no checkpoint in {folder}")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = source.item_metadata(step)["state"].tree
    shapes = jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=device), shapes
    )
    args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
    state = source.restore(step, args=args)["state"]
    source.close()
    return step, {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def compare(first: Path, second: Path) -> str:
    """What distinguishes the latest checkpoints of two folders, in words."""
    (step, a), (other_step, b) = _read(first), _read(second)
    if step != other_step:
        return f"step {step} and step {other_step}"
    _check_equal(first, _describe(a), _describe(b))
    if all(a[name].tobytes() == b[name].tobytes() for name in a):
        return f"step {step}: equal, bit for bit"

    def distance(name: str) -> float:
        x, y = (np.asarray(jnp.asarray(t[name], jnp.float32)) for t in (a, b))
        return float(np.linalg.norm(x - y) / max(np.linalg.norm(x), 1e-30))

    params = [name for name in a if name.startswith("params")]
    worst = max(params, key=distance)
    return (
        f"step {step}: different; of the parameters most in {worst}, by "
        f"{distance(worst):.1e} of its norm"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    args = parser.parse_args()
    try:
        print(compare(args.first, args.second))
    except UserError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
