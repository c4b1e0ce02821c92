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
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from tensorboardX import SummaryWriter
from tqdm import tqdm

from examples.apps.llm.data import Batch, batch_at
from examples.apps.llm.model import LanguageModel
from examples.apps.llm.train import Settings, State, evaluate, start, train_step
from examples.common import checkpoint
from examples.common.cli import UserError

METRICS = "metrics.jsonl"
# Settings that may change when a run is resumed: none of the steps depends on them.
FREE = ("num_steps", "checkpoint_every")


class Result(NamedTuple):
    """What a run returns."""

    model: LanguageModel
    state: State
    evaluations: list[dict[str, Any]]  # Of the whole run, also after a resumption.


def run(
    settings: Settings,
    model: LanguageModel,
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
        "base model": checkpoint.checksum(_heads(nnx.state(model))),
        "data": checkpoint.checksum(_heads((train, dev))),
    }
    job, state = start(settings, model)
    # On a device by name, as what is restored is: both then take one program.
    job, state = jax.device_put((job, state), jax.devices()[0])
    data, end, rows = jax.device_put((train, dev)), settings.num_steps, []
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
            if saved is not None:
                state, rows = saved, checkpoint.notes(checkpoints)
        first = int(state.step)
        bar = stack.enter_context(
            tqdm(desc=label, initial=first, total=end, unit="step")
        )
        shown: dict[str, str] = {}
        path = f"{folder}/{METRICS}" if folder else os.devnull
        # What follows the checkpoint is of a run that was cut.
        file = stack.enter_context(open(path, "w", encoding="utf-8", buffering=1))
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
        board = SummaryWriter(
            f"{folder}/tensorboard", purge_step=first, write_to_disk=folder is not None
        )
        stack.enter_context(board)

        def report(step: int, values: dict[str, float]) -> None:
            rows.append({"step": step} | values)
            print(json.dumps(rows[-1]), file=file)
            for name, value in values.items():
                board.add_scalar(name, value, step)
                if name in ("loss", "train_loss"):
                    shown[name] = f"{value:.4f}"

        for step in range(first, end + 1):
            # What was done before a checkpoint is not done again after it.
            at_end, resumed = step == end, step == first > 0
            if not resumed and (step % settings.eval_every == 0 or at_end):
                report(step, _measure(settings, job, state, data))
            due = step > first and (step % settings.checkpoint_every == 0 or at_end)
            if checkpoints is not None and due:
                notes = list(rows)  # Written in the background, while rows grows.
                checkpoint.save(checkpoints, step, state, description, notes)
            if at_end:
                break
            batch = batch_at(train, settings.seed, step, settings.batch_size)
            state, loss = train_step(job, state, batch)
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the loss must be finite; got {loss} at step {step}: a smaller "
                    "learning rate may help."
                )
            report(step, {"loss": float(loss)})
            rate = settings.num_evaluations * (bar.format_dict["rate"] or 0.0)
            shown["tokens/s"] = f"{rate * batch.tokens.size:,.0f}"
            shown["evaluations/s"] = f"{rate:.3g}"
            bar.set_postfix(shown, refresh=False)
            bar.update()
    model = nnx.merge(job.graphdef, state.params, job.rest)
    return Result(model, state, [row for row in rows if "train_loss" in row])


@jax.jit
def _heads(tree: Any) -> Any:
    """The first numbers of every array: they tell models and data apart."""

    def head(leaf: jax.Array) -> jax.Array:
        numbers = jnp.ravel(leaf)[:4096]
        small = numbers.dtype in (jnp.int4, jnp.uint4)  # They have no bytes.
        return numbers.astype(jnp.int8) if small else numbers

    return jax.tree.map(head, tree)


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
