"""A run: the loop, and the files that it writes.

A run is a function of its settings, its model and its data: step i draws its
directions with `fold_in(key, i)` and reads the batch `feed(i)`. So it
can be interrupted at any step and resume from a checkpoint with the same end, bit for
bit, the file of metrics included.
"""

import contextlib
import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from radazo_llm.models.model import LanguageModel
from radazo_llm.tune import checkpoint, forecast, frozen
from radazo_llm.tune.batches import Feed, bounds, buckets, chunks
from radazo_llm.tune.data import Batch
from radazo_llm.tune.interrupts import Interrupts
from radazo_llm.tune.rate import before_rate, with_rate
from radazo_llm.tune.report import Report
from radazo_llm.tune.tracking import Log
from radazo_llm.tune.train import Settings, State, evaluate, start, train_step

CHECKPOINTS, SETTINGS = "checkpoints", "settings.json"
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
    log: Log | None = None,
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
      log: A function that gets the metrics of each step too.

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
    settings = before_rate(settings)
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
        report = stack.enter_context(
            Report(folder, rows, first, end, label, clock, log)
        )
        given = settings, job, state, feed, measured, report
        loop = Loop(*given, checkpoints, description, eval_first)
        with Interrupts() as interrupts:
            state = loop.run(interrupts)
    model = nnx.merge(job.graphdef, state.params, job.rest)
    return Result(model, state, [row for row in rows if "train_loss" in row])


@dataclasses.dataclass
class Loop:
    """The steps of a run, with its evaluations and its checkpoints.

    Attributes:
      settings: The settings of the run.
      job: The data of the steps.
      state: The state, after the steps so far.
      feed: The batches of the steps.
      measured: The examples of an evaluation, by split.
      report: The metrics.
      checkpoints: The checkpoints, None if nothing is written.
      description: The settings that decide the run.
      eval_first: Whether to measure before the first step.
    """

    settings: Settings
    job: Any
    state: State
    feed: Feed
    measured: dict[str, list[Batch]]
    report: Report
    checkpoints: Any
    description: dict[str, Any]
    eval_first: bool

    def run(self, interrupts: Interrupts) -> State:
        """Takes the steps that are left, and returns the last state.

        An interrupted run has a checkpoint of its last step.
        """
        first, end = int(self.state.step), self.settings.num_steps
        try:
            for step in range(first, end):
                self._measure(step)
                if step > first and step % self.settings.checkpoint_every == 0:
                    self._save()
                batch = self.feed(step)
                with interrupts.deferred():
                    given = self.settings, self.job, self.state, step, batch
                    self.state, loss = _stepped(*given)
                    self.report(step, {"loss": loss})
                size = math.prod(batch.tokens.shape[:3])
                self.report.advance(self.settings.num_evaluations, size)
            if first <= end:
                self._measure(end)
        except KeyboardInterrupt:
            self._save()
            raise
        self._save()
        return self.state

    def _measure(self, step: int) -> None:
        """Measures the state before a step, if that is due and not done."""
        at_end = step == self.settings.num_steps
        due = step % self.settings.eval_every == 0 and (step > 0 or self.eval_first)
        if not (due or at_end) or _is_measured(self.report.rows, step):
            return
        names = [n for n in self.measured if n != "test" or step == 0 or at_end]
        chosen = {name: self.measured[name] for name in names}
        with self.report.seconds.stopped():
            found = measure(self.settings, self.job, self.state, chosen, step == 0)
        self.report(step, found)

    def _save(self) -> None:
        """Writes a checkpoint, if there is none of the step."""
        step = int(self.state.step)
        if self.checkpoints is not None and step != self.checkpoints.latest_step():
            notes = list(self.report.rows)  # Written in the background, while it grows.
            checkpoint.save(self.checkpoints, step, self.state, self.description, notes)


def _is_measured(rows: list[dict[str, Any]], step: int) -> bool:
    """Whether the last row is of an evaluation before this step."""
    return bool(rows) and rows[-1]["step"] == step and "train_loss" in rows[-1]


def _sizes(settings: Settings, number: int) -> np.ndarray:
    """The number of examples of each step."""
    sizes = settings.batch_sizes()
    if sizes.max() > number:
        raise ValueError(
            f"batch_size must be at most {number}, the number of examples; "
            f"got {sizes.max()}. Give a smaller --batch-size, or more examples."
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
