"""A run: the loop, and the files that it writes.

A run is a function of its settings, its model and its data: step i draws its
directions with `fold_in(key, i)` and reads the batch `batch_at(data, seed, i)`. So it
can be cut at any step and go on from a checkpoint to the same end, bit for bit, the
file of metrics included.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from filelock import FileLock, Timeout
from flax import nnx
from tensorboardX import SummaryWriter
from tqdm import tqdm

from examples.llm.data import Batch, batch_at
from examples.llm.model import OPT
from examples.llm.train import Settings, State, evaluate, start, train_step

METRICS = "metrics.jsonl"
# Settings that may change when a run is resumed: none of the steps depends on them.
FREE = ("num_steps", "checkpoint_every")


class RunError(ValueError):
    """A run that cannot be started or resumed in its folder."""


class Result(NamedTuple):
    """What a run returns."""

    model: OPT
    state: State
    evaluations: list[dict[str, Any]]  # Of the whole run, also after a resumption.


def run(
    settings: Settings,
    model: OPT,
    train: Batch,
    dev: Batch,
    *,
    folder: Path | None = None,
    resume: bool = False,
    label: str = "",
) -> Result:
    """Trains a model.

    Args:
      settings: What to do.
      model: What to train. It is consumed.
      train: The examples to train on; the training loss is that of all of them.
      dev: The examples whose accuracy is measured.
      folder: Where checkpoints and metrics go; nothing is written without.
      resume: Whether to go on from the last checkpoint in the folder, if there is one.
      label: What the progress bar says.

    Raises:
      ValueError: If the batch is larger than the data.
      RunError: If the folder has a run and `resume` is False, or another run than the
        one to resume, or damaged files.
      FloatingPointError: If the loss is not finite.
    """
    if settings.batch_size > len(train.label):
        raise ValueError(
            f"batch_size must be at most {len(train.label)}, the number of examples; "
            f"got {settings.batch_size}."
        )
    description = dataclasses.asdict(settings) | {
        "base model": _fingerprint(nnx.state(model, nnx.Param)),
        "data": _fingerprint((train, dev)),
    }
    job, state = start(settings, model)
    data, end = jax.device_put((train, dev)), settings.num_steps
    with contextlib.ExitStack() as stack:
        checkpoints, progress = None, Progress()
        if folder is not None:
            checkpoints = stack.enter_context(_checkpoints(folder))
            state, progress = restore(checkpoints, state, description, resume)
        first = int(state.step)
        bar = stack.enter_context(
            tqdm(desc=label, initial=first, total=end, unit="step")
        )
        metrics = Metrics(folder, progress, first, bar)
        stack.enter_context(contextlib.closing(metrics))
        for step in range(first, end + 1):
            # What was done before a checkpoint is not done again after it.
            at_end, resumed = step == end, step == first > 0
            if not resumed and (step % settings.eval_every == 0 or at_end):
                metrics.evaluated(step, _measure(settings, job, state, data))
            due = step > first and (step % settings.checkpoint_every == 0 or at_end)
            if checkpoints is not None and due:
                save(checkpoints, step, state, description, metrics.progress())
            if at_end:
                break
            batch = batch_at(train, settings.seed, step, settings.batch_size)
            state, loss = train_step(job, state, batch)
            evaluations = 2 * settings.num_directions
            metrics.stepped(step, loss, evaluations, evaluations * batch.tokens.size)
        evaluations = metrics.progress().evaluations
    model = nnx.merge(job.graphdef, state.params, job.rest)
    return Result(model, state, evaluations)


def _fingerprint(tree: Any) -> str:
    """A checksum of the first numbers of every array: tells models and data apart."""
    crc = 0
    for leaf in jax.tree.leaves(tree):
        head = np.asarray(jnp.ravel(leaf)[:4096])
        crc = zlib.crc32(head.tobytes() + str((leaf.shape, leaf.dtype)).encode(), crc)
    return f"crc32 {crc:08x}"


def _measure(
    settings: Settings, job: Any, state: State, data: tuple[Batch, Batch]
) -> dict[str, float]:
    """Loss and accuracy on the examples to train on, and on those held back."""
    result = {}
    for name, examples in zip(("train", "dev"), data, strict=True):
        size = settings.eval_batch_size
        loss, accuracy = evaluate(job, state.params, examples, batch_size=size)
        result |= {f"{name}_loss": float(loss), f"{name}_accuracy": float(accuracy)}
    return result


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder; the lock of a killed process is gone with it.

    Raises:
      RunError: If another run is writing there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise RunError(
            f"{folder} is in use by another run: wait for it to end, or choose another "
            "folder (--output)."
        ) from None


class Progress(NamedTuple):
    """What a checkpoint holds of the metrics."""

    position: int = 0  # The length of the file, all of which is on the disk.
    evaluations: Sequence[dict[str, Any]] = ()


class Metrics:
    """Writes lines of JSON and TensorBoard's files, in the order of the steps.

    A line holds nothing that depends on the clock.

    Args:
      folder: Where the files go; None writes nothing.
      progress: Where to go on; what follows in the file is of a run that was cut.
      step: The step to go on from.
      bar: A progress bar, in steps.

    Raises:
      RunError: If the file ends before the position.
    """

    def __init__(
        self, folder: Path | None, progress: Progress, step: int, bar: tqdm
    ) -> None:
        self._evaluations, self._bar = list(progress.evaluations), bar
        self._pending: tuple[int, jax.Array] | None = None
        self._shown: dict[str, str] = {}
        path = folder and folder / METRICS
        size = path.stat().st_size if path and path.exists() else 0
        if size < progress.position:
            raise RunError(
                f"{path} must have at least {progress.position} bytes, as when its "
                f"checkpoint was made; got {size}."
            )
        self._file = path.open("ab") if path else tempfile.TemporaryFile()  # noqa: SIM115
        self._file.truncate(progress.position)
        self._board = SummaryWriter(
            f"{folder}/tensorboard", purge_step=step, write_to_disk=folder is not None
        )

    def close(self) -> None:
        self._file.close()
        self._board.close()

    def stepped(
        self, step: int, loss: jax.Array, evaluations: int, tokens: int
    ) -> None:
        """Takes the loss of a step that may still run, and writes the one before.

        Waiting for it at once would leave the device idle until the next is sent.
        """
        self._flush()
        self._pending = step, loss
        rate = self._bar.format_dict["rate"] or 0.0  # Steps a second.
        self._shown["tokens/s"] = f"{rate * tokens:,.0f}"
        self._shown["evaluations/s"] = f"{rate * evaluations:.3g}"
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update()

    def evaluated(self, step: int, values: dict[str, float]) -> None:
        self._flush()
        self._evaluations.append({"step": step} | values)
        self._write(step, values)

    def progress(self) -> Progress:
        self._flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        return Progress(self._file.tell(), self._evaluations)

    def _flush(self) -> None:
        """Writes the loss that is waited for, if any."""
        if self._pending is not None:
            (step, loss), self._pending = self._pending, None
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the loss must be finite; got {loss} at step {step}: a smaller "
                    "learning rate may help."
                )
            self._write(step, {"loss": float(loss)})

    def _write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step} | values).encode() + b"\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
            if name in ("loss", "train_loss"):
                self._shown[name] = f"{value:.4f}"


# --- Checkpoints ------------------------------------------------------------------
#
# One holds the tuned parameters, the state of the optimizer, the key, the step, the
# progress, and a description of the run. Saving goes on in the background, and a
# checkpoint is there when it is whole: a run that is killed leaves the one before.


def _checkpoints(folder: Path) -> ocp.CheckpointManager:
    # Orbax reports every save; what goes wrong is raised besides.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    return ocp.CheckpointManager(folder.resolve() / "checkpoints", options=options)


def save(
    checkpoints: ocp.CheckpointManager,
    step: int,
    state: State,
    description: Mapping[str, Any],
    progress: Progress,
) -> None:
    leaves = _leaves(state)
    record = {"description": description} | progress._asdict()
    record["checksum"] = _checksum(leaves, record)
    items = {"state": ocp.args.PyTreeSave(leaves), "run": ocp.args.JsonSave(record)}
    checkpoints.save(step, args=ocp.args.Composite(**items))


def restore(
    checkpoints: ocp.CheckpointManager,
    state: State,
    description: Mapping[str, Any],
    resume: bool,
) -> tuple[State, Progress]:
    """The last state, and the progress until then.

    Args:
      checkpoints: Of the run.
      state: The start, which is returned if there is no checkpoint yet, so that a job
        that is killed early can be restarted by the same command.
      description: What the run is, as JSON has it.
      resume: Whether there may be a checkpoint.

    Raises:
      RunError: If the checkpoint is not wanted, damaged, or of another run.
    """
    step, folder = checkpoints.latest_step(), Path(checkpoints.directory)
    if step is None:
        return state, Progress()
    if not resume:
        raise RunError(
            f"{folder.parent} has a run of {step} steps: resume it (--resume), or "
            "choose another folder (--output)."
        )
    record = _read(checkpoints, step, "run", ocp.args.JsonRestore())
    for name, now in description.items():
        saved = record.get("description", {}).get(name)
        if saved != now and name not in FREE:
            raise RunError(
                f"{name} must be {saved!r}, as in the run in {folder.parent}; got "
                f"{now!r}."
            )
    # One after another, as NumPy's arrays: where one of many reads that Orbax does at
    # the same time fails, the others end in noise on the terminal.
    found = {}
    for name, like in _leaves(state).items():
        arguments = ocp.args.PyTreeRestore(
            item={name: like},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        found[name] = _read(checkpoints, step, "state", arguments)[name]
    if _checksum(found, record) != record.get("checksum"):
        raise _damaged(checkpoints, step, "its checksum is another one")
    key = jax.random.wrap_key_data(jnp.asarray(found.pop("key")))
    treedef = jax.tree.structure(state._replace(key=None))
    state = jax.tree.unflatten(treedef, map(jnp.asarray, found.values()))
    progress = Progress(*(record[name] for name in Progress._fields))
    return state._replace(key=key), progress


def _read(checkpoints: ocp.CheckpointManager, step: int, item: str, how: Any) -> Any:
    try:
        return checkpoints.restore(step, args=ocp.args.Composite(**{item: how}))[item]
    except Exception as error:  # Whatever it is, the files cannot be read.
        raise _damaged(checkpoints, step, str(error)) from error


def _damaged(checkpoints: ocp.CheckpointManager, step: int, reason: str) -> RunError:
    line = reason.splitlines()[0][:200] if reason else "for no reason given"
    return RunError(
        f"{Path(checkpoints.directory) / str(step)} cannot be read ({line}): delete it "
        "to resume from the checkpoint before it."
    )


def _leaves(state: State) -> dict[str, jax.Array]:
    """The leaves by number, and the key as its data."""
    leaves = enumerate(jax.tree.leaves(state._replace(key=None)))
    return {str(i): x for i, x in leaves} | {"key": jax.random.key_data(state.key)}


def _checksum(leaves: Mapping[str, Any], record: Mapping[str, Any]) -> int:
    covered = {name: value for name, value in record.items() if name != "checksum"}
    crc = zlib.crc32(json.dumps(covered, sort_keys=True).encode())
    for name in sorted(leaves):
        # Through bytes, for NumPy's buffers know no bfloat16.
        crc = zlib.crc32(np.asarray(leaves[name]).reshape(-1).view(np.uint8), crc)
    return crc
