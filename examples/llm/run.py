"""A run: the loop, and the files that it writes.

A run is a function of its settings, its model and its data: step i draws its
directions with `fold_in(key, i)` and reads the batch `batch_at(data, seed, i)`. So it
can be cut at any step and go on from a checkpoint to the same end, bit for bit, the
file of metrics included.
"""

import contextlib
import dataclasses
import json
import math
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tensorboardX import SummaryWriter
from tqdm import tqdm

from examples.common import checkpoint
from examples.common.cli import UserError
from examples.llm.data import Batch, batch_at
from examples.llm.model import OPT
from examples.llm.train import Settings, State, evaluate, start, train_step

METRICS = "metrics.jsonl"
# Settings that may change when a run is resumed: none of the steps depends on them.
FREE = ("num_steps", "checkpoint_every")


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
      resume: Whether to go on from the last checkpoint in the folder. If there is none
        yet, the run starts, so that one command serves a job that is restarted.
      label: What the progress bar says.

    Raises:
      ValueError: If the batch is larger than the data, or the folder has a run and
        `resume` is False, or another run than the one to resume, or damaged files.
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
        checkpoints = None
        if folder is not None:
            manager = checkpoint.manager(f"{folder}/checkpoints")
            checkpoints = stack.enter_context(manager)
            if (last := checkpoints.latest_step()) is not None and not resume:
                raise UserError(
                    f"{folder} has a run of {last} steps: resume it (--resume), or "
                    "choose another folder (--output)."
                )
            saved = checkpoint.restore(checkpoints, state, description, FREE)
            state = state if saved is None else saved
        first = int(state.step)
        bar = stack.enter_context(
            tqdm(desc=label, initial=first, total=end, unit="step")
        )
        metrics = stack.enter_context(Metrics(folder, first, bar))
        for step in range(first, end + 1):
            # What was done before a checkpoint is not done again after it.
            at_end, resumed = step == end, step == first > 0
            if not resumed and (step % settings.eval_every == 0 or at_end):
                metrics.evaluated(step, _measure(settings, job, state, data))
            due = step > first and (step % settings.checkpoint_every == 0 or at_end)
            if checkpoints is not None and due:
                metrics.sync()
                checkpoint.save(checkpoints, step, state, description)
            if at_end:
                break
            batch = batch_at(train, settings.seed, step, settings.batch_size)
            state, loss = train_step(job, state, batch)
            evaluations = 2 * settings.num_directions
            metrics.stepped(step, loss, evaluations, evaluations * batch.tokens.size)
    model = nnx.merge(job.graphdef, state.params, job.rest)
    return Result(model, state, metrics.evaluations)


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


class Metrics(contextlib.AbstractContextManager):
    """Writes lines of JSON and TensorBoard's files, in the order of the steps.

    A line holds nothing that depends on the clock.

    Args:
      folder: Where the files go; None writes nothing.
      step: The step to go on from. What follows in the file is of a run that was cut.
      bar: A progress bar, in steps.
    """

    def __init__(self, folder: Path | None, step: int, bar: tqdm) -> None:
        path = folder / METRICS if folder else Path(os.devnull)
        rows = _cut(path, step) if folder else []
        self.evaluations = [row for row in rows if "train_loss" in row]
        self._bar, self._shown = bar, {}
        self._pending: tuple[int, jax.Array] | None = None
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(
            f"{folder}/tensorboard", purge_step=step, write_to_disk=folder is not None
        )

    def __exit__(self, *error: object) -> None:
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
        self.evaluations.append({"step": step} | values)
        self._write(step, values)

    def sync(self) -> None:
        """Puts all lines on the disk: a checkpoint is not to be ahead of them."""
        self._flush()
        self._file.flush()
        os.fsync(self._file.fileno())

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
        print(json.dumps({"step": step} | values), file=self._file)
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
            if name in ("loss", "train_loss"):
                self._shown[name] = f"{value:.4f}"


def _cut(path: Path, step: int) -> list[dict[str, Any]]:
    """Cuts off the lines that follow the checkpoint of a step, and returns the others.

    Raises:
      UserError: If not all of these are there.
    """
    rows, size = [], 0
    path.touch()
    for line in path.read_bytes().splitlines(keepends=True) if step else ():
        row = json.loads(line) if line.endswith(b"\n") else {"step": math.inf}
        if row["step"] > step or (row["step"] == step and "loss" in row):
            break
        rows.append(row)
        size += len(line)
    losses = sum("loss" in row for row in rows)
    if losses != step:
        raise UserError(
            f"{path} must have {step} losses, as when its checkpoint was made; got "
            f"{losses}."
        )
    os.truncate(path, size)
    return rows
