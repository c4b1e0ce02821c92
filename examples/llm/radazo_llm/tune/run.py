"""A run: the loop, and the files that it writes.

A run is a function of its settings, its model and its data: step i draws its
directions with `fold_in(key, i)` and reads the batch `feed(i)`. So it
can be interrupted at any step and resume from a checkpoint with the same end, bit for
bit, the file of metrics included.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tensorboardX import SummaryWriter
from tqdm import tqdm

from radazo_llm.models.model import LanguageModel
from radazo_llm.tune import checkpoint, forecast, frozen
from radazo_llm.tune.batches import Feed, bounds, buckets, chunks
from radazo_llm.tune.data import Batch
from radazo_llm.tune.interrupts import Interrupts
from radazo_llm.tune.rate import with_rate
from radazo_llm.tune.train import Settings, State, evaluate, start, train_step

METRICS, CHECKPOINTS, SETTINGS = "metrics.jsonl", "checkpoints", "settings.json"
# Settings that may change when a run is resumed: none of the steps depends on them.
# The first may change unless a schedule depends on it.
FREE = ("num_steps", "checkpoint_every", "eval_every")


class Result(NamedTuple):
    """The result of a run."""

    model: LanguageModel  # Its last layers, if no others were tuned.
    state: State
    evaluations: list[dict[str, Any]]  # Of the whole run, also after a resumption.


def run(
    settings: Settings,
    model: LanguageModel,
    train: Batch,
    dev: Batch,
    test: Batch | None = None,
    *,
    folder: Path | None = None,
    resume: bool = False,
    label: str = "",
    eval_first: bool = True,
    eval_examples: int | None = None,
    frozen_folder: Path | None = None,
    clock: Callable[[], float] | None = None,
    announce: bool = False,
    about: Any = None,
) -> Result:
    """Trains a model.

    Args:
      settings: The settings of the run.
      model: The model to train. It is consumed.
      train: The examples to train on.
      dev: The examples whose accuracy is measured.
      test: Examples that are measured before the first step and after the last.
      folder: The folder of checkpoints and metrics; nothing is written without.
      resume: Whether to continue from the last checkpoint in the folder. If there is
        none yet, the run starts, so that one command serves a job that is restarted.
      label: The text of the progress bar.
      eval_first: Whether to measure before the first step.
      eval_examples: The number of examples of `train` that the training loss is
        measured on, a share of each bucket. All by default.
      frozen_folder: The folder for outputs of frozen layers. Several runs can share it.
      clock: The time in seconds. Each row of the metrics then has "cpu_s": the seconds
        of the run so far without its evaluations, also before a resumption.
      announce: Whether to print the time, the memory and the disk that the run takes.
      about: The content of `settings.json`, which is not written without.

    Raises:
      ValueError: If the batch is larger than the data, or the folder has a run and
        `resume` is False, or another run than the one to resume, or damaged files.
      FloatingPointError: If the loss is not finite.
    """
    sizes = _sizes(settings, len(train.label))
    description = _description(settings, model, (train, dev))
    splits = {"train": train, "dev": dev} | ({} if test is None else {"test": test})
    if settings.last_layers and frozen_folder is None:
        frozen_folder = Path(folder or tempfile.mkdtemp()) / "frozen"
    model, parts = prepared(settings, model, splits, frozen_folder)
    share = 1.0 if eval_examples is None else eval_examples / len(train.label)
    measured = parts | {"train": [some(part, share) for part in parts["train"]]}
    feed = Feed(parts["train"], settings.seed, sizes)
    job, state = start(settings, model)
    # On a named device, like restored arrays, so that both use one program.
    job, state = jax.device_put((job, state), jax.devices()[0])
    if announce:
        print(forecast.line(settings, job, state, feed, measured, folder), flush=True)
    settings = with_rate(settings, job, state, parts["train"])
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if folder is not None:
            checkpoints = stack.enter_context(checkpoint.opened(folder / CHECKPOINTS))
            _refuse_another(checkpoints, folder, resume)
            free = _free(settings)
            saved = checkpoint.restore(checkpoints, state, description, free)
            state, rows = saved or (state, rows)
            if about is not None:
                used = {"settings": dataclasses.asdict(settings)}  # A measured rate.
                checkpoint.write_json(folder / SETTINGS, about | used)
        first, end = int(state.step), settings.num_steps
        report = stack.enter_context(Report(folder, rows, first, end, label, clock))
        interrupts = stack.enter_context(Interrupts())

        def save() -> None:
            # What was done before a checkpoint is not done again after it.
            step = int(state.step)
            if checkpoints is not None and step != checkpoints.latest_step():
                notes = list(rows)  # Written in the background, while rows grows.
                checkpoint.save(checkpoints, step, state, description, notes)

        try:
            for step in range(first, end + 1):
                at_end = step == end
                wanted = step % settings.eval_every == 0 and (step > 0 or eval_first)
                if (wanted or at_end) and not _is_measured(rows, step):
                    names = [n for n in measured if n != "test" or step == 0 or at_end]
                    chosen = {name: measured[name] for name in names}
                    with report.seconds.stopped():
                        found = measure(settings, job, state, chosen, step == 0)
                    report(step, found)
                if step > first and (step % settings.checkpoint_every == 0 or at_end):
                    save()
                if at_end:
                    break
                batch = feed(step)
                with interrupts.deferred():
                    state, loss = _stepped(settings, job, state, step, batch)
                    report(step, {"loss": loss})
                size = math.prod(batch.tokens.shape[:3])
                report.advance(settings.num_evaluations, size)
        except KeyboardInterrupt:
            save()
            raise
    model = nnx.merge(job.graphdef, state.params, job.rest)
    return Result(model, state, [row for row in rows if "train_loss" in row])


def _is_measured(rows: list[dict[str, Any]], step: int) -> bool:
    """Whether the last row is of an evaluation before this step."""
    return bool(rows) and rows[-1]["step"] == step and "train_loss" in rows[-1]


def _sizes(settings: Settings, number: int) -> np.ndarray:
    """The number of examples of each step."""
    sizes = settings.batch_sizes()
    if sizes.max() > number:
        raise ValueError(
            f"batch_size must be at most {number}, the number of examples; "
            f"got {sizes.max()}."
        )
    return sizes


def _description(settings: Settings, model: Any, data: Any) -> dict[str, Any]:
    """The settings that decide a run."""
    return dataclasses.asdict(settings) | {
        "base model": checkpoint.checksum(_heads(nnx.state(model))),
        "data": checkpoint.checksum(_heads(data)),
    }


def _refuse_another(checkpoints: Any, folder: Path, resume: bool) -> None:
    last = checkpoints.latest_step()
    if last is not None and not resume:
        raise ValueError(
            f"{folder} has a run of {last} steps: resume it (--resume), or "
            "choose another folder (--output)."
        )


def _free(settings: Settings) -> tuple[str, ...]:
    """The settings that may change when a run is resumed."""
    fixed = settings.schedule == "constant" and not settings.final_batch_size
    return FREE if fixed else FREE[1:]


def _stepped(
    settings: Settings, job: Any, state: State, step: int, batch: Batch
) -> tuple[State, float]:
    rate = np.float32(settings.learning_rate_at(step))
    job = job.replace(learning_rate=jax.device_put(rate, jax.devices()[0]))
    state, loss = train_step(job, state, batch)
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss must be finite; got {loss} at step {step}: a smaller "
            "learning rate may help."
        )
    return state, float(loss)


class Report(contextlib.ExitStack):
    """The metrics of a run: in a file, for TensorBoard, and next to a bar.

    Args:
      folder: The folder of the files, if there are any.
      rows: The rows of metrics so far, to which others are added.
      first: The first step.
      end: The last step.
      label: The text of the progress bar.
      clock: As of `run`.
    """

    def __init__(
        self,
        folder: Path | None,
        rows: list[dict[str, Any]],
        first: int,
        end: int,
        label: str,
        clock: Callable[[], float] | None,
    ) -> None:
        super().__init__()
        self.rows, self.seconds = rows, Seconds(clock, rows)
        self.shown: dict[str, str] = {}
        self.bar = self.enter_context(
            tqdm(desc=label, initial=first, total=end, unit="step")
        )
        path = f"{folder}/{METRICS}" if folder else os.devnull
        # What follows the checkpoint is of a run that was cut.
        file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.file = self.enter_context(file)
        self.file.writelines(f"{json.dumps(row)}\n" for row in rows)
        writes = folder is not None
        self.board = self.enter_context(
            SummaryWriter(
                f"{folder}/tensorboard", purge_step=first, write_to_disk=writes
            )
        )

    def __call__(self, step: int, values: dict[str, float]) -> None:
        self.rows.append({"step": step} | values | self.seconds())
        print(json.dumps(self.rows[-1]), file=self.file)
        for name, value in values.items():
            self.board.add_scalar(name, value, step)
            if name in ("loss", "train_loss"):
                self.shown[name] = f"{value:.4f}"

    def advance(self, evaluations: int, tokens: int) -> None:
        """Moves the bar by a step of so many evaluations, of so many tokens each."""
        rate = evaluations * (self.bar.format_dict["rate"] or 0.0)
        self.shown["tokens/s"] = f"{rate * tokens:,.0f}"
        self.shown["evaluations/s"] = f"{rate:.3g}"
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update()


def prepared(
    settings: Settings,
    model: LanguageModel,
    splits: dict[str, Batch],
    frozen_folder: Path | None,
) -> tuple[LanguageModel, dict[str, list[Batch]]]:
    """Divides the layers as the settings say, and each split into buckets.

    Returns:
      The model to tune, without frozen layers whose outputs are cached; and the
      buckets by split, with the lengths of the first split, so that all splits share
      programs. They hold outputs of the frozen layers, if these are cached.
    """
    ends = bounds(next(iter(splits.values())), settings.num_buckets)
    parts = {name: buckets(split, ends) for name, split in splits.items()}
    if not settings.last_layers:
        return model, parts
    base = checkpoint.checksum(_heads(nnx.state(model)))
    first_layers, model = frozen.split(model, settings.last_layers)
    cached = functools.partial(
        frozen.outputs,
        first_layers,
        folder=frozen_folder,
        description=f"{base} {settings.quantize} {settings.last_layers}",
        batch_size=settings.eval_batch_size,
    )
    parts = {name: [cached(part) for part in found] for name, found in parts.items()}
    for leaf in jax.tree.leaves(first_layers.layers):
        leaf.delete()  # Else in memory until Python collects NNX's reference cycles.
    return model, parts


class Seconds:
    """The time of a run without its evaluations, for rows of metrics."""

    def __init__(self, clock: Callable[[], float] | None, rows: list[Any]) -> None:
        self.clock = clock
        if clock is not None:
            self.start = clock() - (rows[-1]["cpu_s"] if rows else 0.0)

    def __call__(self) -> dict[str, float]:
        return {} if self.clock is None else {"cpu_s": self.clock() - self.start}

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Leaves out the time in between."""
        before = self().get("cpu_s")
        yield
        if self.clock is not None:
            self.start = self.clock() - before


def some(batch: Batch, share: float) -> Batch:
    """The first examples of a bucket, at least one."""
    number = max(1, round(share * len(batch.label)))
    return Batch(*(values[:number] for values in batch))


@jax.jit
def _heads(tree: Any) -> Any:
    """The first numbers of every array: they tell models and data apart."""

    def head(leaf: jax.Array) -> jax.Array:
        numbers = jnp.ravel(leaf)[:4096]
        small = numbers.dtype in (jnp.int4, jnp.uint4)  # They have no bytes.
        return numbers.astype(jnp.int8) if small else numbers

    return jax.tree.map(head, tree)


def measure(
    settings: Settings,
    job: Any,
    state: State,
    data: dict[str, list[Batch]],
    untuned: bool,
) -> dict[str, float]:
    """Loss and accuracy on the examples to train on, and on those held back."""
    result = {}
    size = settings.eval_batch_size
    total = sum(len(part.label) for parts in data.values() for part in parts)
    bar = tqdm(desc="Evaluation", total=total, unit="example", leave=False)
    for name, parts in data.items():
        each = []
        for part in parts:
            for number, chunk in chunks(part, size):
                found = evaluate(job, state.params, chunk, batch_size=size)
                found = jax.tree.map(lambda x, n=number: np.asarray(x[:n]), found)
                each.append(found)
                bar.set_postfix({f"{name}_loss": f"{found.loss():.4f}"}, refresh=False)
                bar.update(number)
        found = jax.tree.map(lambda *leaves: np.concatenate(leaves), *each)
        label = np.concatenate([part.label for part in parts])
        result |= {f"{name}_loss": found.loss()}
        targets = np.concatenate([part.targets for part in parts])
        if targets.shape[1] == 1:  # There is nothing to choose from.
            continue
        result |= {f"{name}_accuracy": found.accuracy(label)}
        # A threshold has a sense if all examples have the same two candidates.
        if untuned and targets.shape[1] == 2 and (targets == targets[:1]).all():
            result |= {f"{name}_calibrated": found.calibrated_accuracy(label)}
    bar.close()
    return result
