"""The job of `tune`: a model, its tuned parameters, and batches of examples."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from tqdm import tqdm

from radazo_llm.examples.tokens import Batch
from radazo_llm.formats import adapters
from radazo_llm.models import lora
from radazo_llm.models.model import LanguageModel
from radazo_llm.run.folder import checksum
from radazo_llm.run.loop import Job
from radazo_llm.settings import Settings
from radazo_llm.tune import frozen
from radazo_llm.tune.batches import bounds, buckets, chunks, draw
from radazo_llm.tune.loss import evaluate, loss_fn

NAMES = ("train", "dev", "test")
_TRAIN_ROWS = 64  # Of those to train on, an evaluation measures so many.


class Parts(NamedTuple):
    """A model in parts.

    Attributes:
      graphdef: Its structure.
      params: Its tuned parameters.
      rest: Its other arrays.
    """

    graphdef: Any
    params: Any
    rest: Any

    def model(self, params: Any) -> LanguageModel:
        """The model with other parameters."""
        return nnx.merge(self.graphdef, params, self.rest)


def parts_of(
    settings: Settings, model: LanguageModel, start: Path | None = None
) -> Parts:
    """Adds adapters to the model, and divides it. It is consumed.

    Args:
      settings: The settings of the run.
      model: The model.
      start: The folder of adapters to start from.
    """
    rngs = nnx.Rngs(jax.random.key(settings.seed))
    if start is not None:
        if settings.tune != "lora":
            raise ValueError(
                f"--adapters must be given with --tune lora; got {settings.tune}."
            )
        adapters.load(model, start)
    elif settings.tune == "lora":
        rank, alpha = settings.lora_rank, settings.lora_alpha
        targets = settings.lora_targets.split(",")
        lora.add_lora(model, rank=rank, alpha=alpha, targets=targets, rngs=rngs)
    parts = nnx.split(model, lora.FILTERS[settings.tune], ...)
    # On a named device, like arrays that are rebuilt, so that both use one program.
    return Parts(parts[0], *jax.device_put(parts[1:], jax.devices()[0]))


class Tuned(NamedTuple):
    """A job, and the model and the data that it has.

    Attributes:
      job: The work of the run.
      parts: The model, or its last layers.
      identity: Numbers that tell the model and the data apart.
    """

    job: Job
    parts: Parts
    identity: dict[str, int]


def with_objective(settings: Settings, train: Batch) -> Settings:
    """The settings with the objective that fits the examples, if none is given."""
    chosen = train.targets.shape[1] > 1
    if settings.objective == "auto":
        found = "classification" if chosen else "language_model"
        return dataclasses.replace(settings, objective=found)
    if settings.objective != "language_model" and not chosen:
        raise ValueError(
            "--objective must be language_model for completions, since there is "
            f"nothing to choose from; got {settings.objective}."
        )
    return settings


def tuned(
    settings: Settings,
    model: LanguageModel,
    splits: tuple[Batch, ...],
    *,
    frozen_folder: Path,
    start: Path | None = None,
) -> Tuned:
    """Makes the job of a run.

    Args:
      settings: The settings of the run.
      model: The model to train. It is consumed.
      splits: The examples to train on, to evaluate on and, maybe, of the test, which
        are measured before the first step and after the last.
      frozen_folder: The folder for outputs of frozen layers.
      start: The folder of adapters to start from.

    Raises:
      ValueError: If a setting does not fit the model or the data.
    """
    settings = with_objective(settings, splits[0])
    number = len(splits[0].label)
    if settings.batch_size > number:
        raise ValueError(
            f"--batch-size must be at most {number}, the number of examples; got "
            f"{settings.batch_size}. Give a smaller one, or more examples."
        )
    identity = {
        "the base model": checksum(nnx.state(model)),
        "the data": checksum(splits),
    }
    ends = bounds(splits[0], settings.num_buckets)
    named = dict(zip(NAMES, splits, strict=False))
    data = {name: buckets(split, ends) for name, split in named.items()}
    if settings.last_layers:
        base = identity["the base model"]
        model = _cached(settings, model, base, data, frozen_folder)
    parts = parts_of(settings, model, start)
    if start is not None:
        identity["--adapters"] = checksum(parts.params)
    # A few of each bucket: an evaluation is for the examples that are held out.
    share = min(min(settings.eval_examples, _TRAIN_ROWS) / number, 1.0)
    measured = data | {"train": [_some(part, share) for part in data["train"]]}
    counts = tuple(len(part.label) for part in data["train"])
    job = Job(
        loss_of(settings, parts, data["train"]),
        parts.params,
        functools.partial(draw, counts, settings.batch_size),
        functools.partial(measure, settings, parts, measured),
    )
    return Tuned(job, parts, identity)


def _cached(
    settings: Settings,
    model: LanguageModel,
    base: int,
    data: dict[str, list[Batch]],
    folder: Path,
) -> LanguageModel:
    """The last layers; examples get the outputs of the others, in place."""
    first_layers, model = frozen.split(model, settings.last_layers)
    for found in data.values():
        found[:] = [
            frozen.outputs(
                first_layers,
                part,
                folder=folder,
                description=f"{base} {settings.quantize} {settings.last_layers}",
                batch_size=settings.eval_batch_size,
            )
            for part in found
        ]
    for leaf in jax.tree.leaves(first_layers.layers):
        leaf.delete()  # Else in memory until Python collects NNX's reference cycles.
    return model


def loss_of(settings: Settings, parts: Parts, data: list[Batch]) -> Any:
    """The loss, a function of the parameters and of the rows of a step."""
    files = tuple(
        part.tokens if isinstance(part.tokens, frozen.Rows) else None for part in data
    )
    arrays = [
        part if file is None else part._replace(tokens=np.zeros(0, np.float32))
        for part, file in zip(data, files, strict=True)
    ]
    fun = functools.partial(_loss, parts.graphdef, settings.objective, files)
    return jax.tree_util.Partial(fun, parts.rest, jax.tree.map(jnp.asarray, arrays))


def _loss(
    graphdef: Any,
    objective: str,
    files: tuple[Any, ...],
    rest: Any,
    data: list[Batch],
    params: Any,
    xi: tuple[jax.Array, jax.Array],
) -> jax.Array:
    which, rows = xi

    def of_bucket(i: int) -> Any:
        def loss(rows: jax.Array) -> jax.Array:
            part, file = data[i], files[i]
            tokens = part.tokens[rows] if file is None else file.traced(rows)
            batch = Batch(tokens, *(values[rows] for values in part[1:]))
            return loss_fn(nnx.merge(graphdef, params, rest), batch, objective)

        return loss

    branches = [of_bucket(i) for i in range(len(files))]
    return branches[0](rows) if len(files) == 1 else lax.switch(which, branches, rows)


def _some(batch: Batch, share: float) -> Batch:
    """The first examples of a bucket, at least one."""
    number = max(1, round(share * len(batch.label)))
    return Batch(*(values[:number] for values in batch))


def measure(
    settings: Settings,
    parts: Parts,
    data: dict[str, list[Batch]],
    params: Any,
    step: int,
) -> dict[str, Any]:
    """Loss and accuracy on the examples to train on, and on those held back."""
    ends = step in (0, settings.num_steps)
    data = {name: found for name, found in data.items() if name != "test" or ends}
    result: dict[str, Any] = {}
    size = settings.eval_batch_size
    total = sum(len(part.label) for found in data.values() for part in found)
    bar = tqdm(desc="Evaluation", total=total, unit="example", leave=False)
    options = {"objective": settings.objective, "batch_size": size}
    for name, buckets_of in data.items():
        each = []
        for part in buckets_of:
            for number, chunk in chunks(part, size):
                found = evaluate(parts.graphdef, params, parts.rest, chunk, **options)
                found = jax.tree.map(lambda x, n=number: np.asarray(x[:n]), found)
                each.append(found)
                bar.set_postfix({f"{name}_loss": f"{found.loss():.4f}"}, refresh=False)
                bar.update(number)
        found = jax.tree.map(lambda *leaves: np.concatenate(leaves), *each)
        label = np.concatenate([part.label for part in buckets_of])
        result[f"{name}_loss"] = found.loss()
        targets = np.concatenate([part.targets for part in buckets_of])
        if targets.shape[1] == 1:  # There is nothing to choose from.
            continue
        result[f"{name}_accuracy"] = found.accuracy(label)
        # These have a sense if all examples have the same candidates.
        if step == 0 and (targets == targets[:1]).all():
            result[f"{name}_largest"] = found.largest_class(label)
            if targets.shape[1] == 2:
                result[f"{name}_calibrated"] = found.calibrated_accuracy(label)
    bar.close()
    return result
