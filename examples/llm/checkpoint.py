"""Checkpoints of a run: what it takes to go on as if nothing had happened.

One holds the tuned parameters, the state of the optimizer, the key, the step, where the
file of metrics ended, and a description of the run, which must be that of the run that
goes on from it.
"""

import contextlib
import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from filelock import FileLock, Timeout

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint that is not there, not readable, or of another run."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder; the lock of a killed process is gone with it.

    Raises:
      CheckpointError: If another run is writing there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise CheckpointError(
            f"{folder} is in use by another run: wait for it to end, or choose another "
            "folder (--output)."
        ) from None


class Checkpoints:
    """The checkpoints in a folder, the last two of which are kept.

    Saving goes on in the background, and a checkpoint is there when it is whole: a run
    that is killed leaves the one before.

    Args:
      folder: The folder of the run; the checkpoints go to `checkpoints` in it.
      description: What the run is, as JSON has it.
      free: Names of the description that may differ between a run and its resumption.
    """

    def __init__(
        self,
        folder: Path,
        description: Mapping[str, Any],
        *,
        free: Sequence[str] = (),
    ) -> None:
        self._folder = folder.resolve() / "checkpoints"
        self._description = dict(description)
        self._free = free
        # Orbax reports every save; what goes wrong is raised besides.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    def refuse_if_any(self) -> None:
        """Raises `CheckpointError` if the folder has a run, which would be lost."""
        step = self._manager.latest_step()
        if step is not None:
            raise CheckpointError(
                f"{self._folder.parent} has a run of {step} steps: resume it "
                "(--resume), or choose another folder (--output)."
            )

    def save(self, step: int, state: Any, metrics_position: int) -> None:
        leaves = _flat(state)
        run = {
            "description": self._description,
            "metrics_position": metrics_position,
        }
        run |= {"checksum": _checksum(leaves, run)}
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(leaves), run=ocp.args.JsonSave(run)
        )
        self._manager.save(step, args=items)

    def restore(self, start: T) -> tuple[T, int]:
        """The last state, and where the file of metrics ended.

        Args:
          start: A tree like the state; it is returned if there is no checkpoint yet,
            so that a job that is killed early can be restarted by the same command.

        Raises:
          CheckpointError: If the checkpoint is damaged or of another run.
        """
        step = self._manager.latest_step()
        if step is None:
            return start, 0
        run = self._read(step, run=ocp.args.JsonRestore())["run"]
        try:
            checksum = run.pop("checksum")
            description, position = run["description"], int(run["metrics_position"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(step, repr(error)) from error
        self._compare(description)
        leaves = self._read_leaves(step, _flat(start))
        if _checksum(leaves, run) != checksum:
            raise self._damaged(step, "its checksum is another one")
        return _unflat(leaves, start), position

    def _read_leaves(
        self, step: int, like: Mapping[str, jax.Array]
    ) -> dict[str, np.ndarray]:
        # One after another, as NumPy's arrays: where one of many reads that Orbax does
        # at the same time fails, the others end in noise on the terminal.
        leaves = {}
        for name in like:
            arguments = ocp.args.PyTreeRestore(
                item={name: like[name]},
                restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
                partial_restore=True,
            )
            leaves[name] = self._read(step, state=arguments)["state"][name]
        return leaves

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Whatever it is, the files cannot be read.
            raise self._damaged(step, str(error)) from error

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        line = reason.splitlines()[0][:200] if reason else "for no reason given"
        return CheckpointError(
            f"{self._folder / str(step)} cannot be read ({line}): delete it to resume "
            "from the checkpoint before it."
        )

    def _compare(self, description: Mapping[str, Any]) -> None:
        ours = json.loads(json.dumps(self._description))
        for name in {**description, **ours}:
            saved, now = description.get(name), ours.get(name)
            if saved != now and name not in self._free:
                raise CheckpointError(
                    f"{name} must be {saved!r}, as in the run in "
                    f"{self._folder.parent}, got {now!r}."
                )


def _flat(tree: Any) -> dict[str, jax.Array]:
    """The leaves by their paths, keys as their data."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for path, leaf in leaves
    }


def _unflat(leaves: Mapping[str, np.ndarray], like: T) -> T:
    """The tree that `_flat` takes apart, with the structure of `like`."""

    def restored(path: Any, leaf: jax.Array) -> jax.Array:
        found = jnp.asarray(leaves[jax.tree_util.keystr(path)])
        if _is_key(leaf):
            return jax.random.wrap_key_data(found, impl=jax.random.key_impl(leaf))
        return found

    return jax.tree.map_with_path(restored, like)


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _checksum(leaves: Mapping[str, Any], run: Mapping[str, Any]) -> int:
    crc = zlib.crc32(json.dumps(run, sort_keys=True).encode())
    for name in sorted(leaves):
        # Through bytes, for NumPy's buffers know no bfloat16.
        crc = zlib.crc32(np.asarray(leaves[name]).reshape(-1).view(np.uint8), crc)
    return crc
