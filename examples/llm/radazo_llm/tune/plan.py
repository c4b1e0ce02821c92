"""The job of `radazo-llm plan`: what a tuning run takes, from compiled programs.

No weights are read: the step and the evaluation are compiled for the present backend
from the shapes of the model, and the step is timed on zeros.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tabulate import tabulate

from radazo_llm.formats import find, weights
from radazo_llm.tune import checkpoint, forecast, frozen, train
from radazo_llm.tune.data import Batch
from radazo_llm.tune.settings import Settings

_WHOLE = "Memory: {}, all in all"


def plan(
    settings: Settings,
    *,
    model: str,
    source: Any,
    length: int,
    examples: int,
    dtype: str | None = None,
) -> None:
    """Prints the memory, the disk and the time of a run.

    Args:
      settings: The settings of the run.
      model: A name that `find.model` takes.
      source: The examples, `splits.Own`; or None.
      length: The tokens of an example, without `source`.
      examples: The number of all examples, to train on and to evaluate.
      dtype: The dtype of the model; by default, of the present backend.

    Raises:
      ValueError: If an argument is wrong, or matrices stay as in the file.
    """
    if settings.quantize == "file":
        raise ValueError(
            "quantize must not be file, whose matrices have no shapes before they are "
            "read; got file. Plan with int4 for Q4_0 and Q4_1, and int8 for Q8_0."
        )
    dtype, path = dtype or weights.default_dtype(), find.model(model)
    like = None
    if source is not None:
        splits = source.read(path)
        settings = dataclasses.replace(settings, objective=source.objective())
        like = splits.batches[0]
        length = like.tokens.shape[-1]
        examples = sum(len(batch.label) for batch in splits.batches)
        print(splits.summary)
    found, seconds = needs(settings, path, length, examples, dtype, like)
    shown = [(name, f"{size / forecast.MIB:,.1f}") for name, size in found.items()]
    print(f"On {jax.devices()[0].device_kind}, for {length} tokens:\n")
    print(
        tabulate(shown, ["", "MiB"], colalign=("left", "right"), disable_numparse=True)
    )
    sizes = {of: found[_WHOLE.format(of)] for of in ("a step", "an evaluation")}
    of, memory = max(sizes.items(), key=lambda item: item[1])
    disk = sum(size for name, size in found.items() if name.startswith("Disk"))
    print(f"\n{forecast.fits(settings, memory, disk, None, of)}")
    if seconds is not None:
        total = forecast.duration(seconds * settings.num_steps)
        print(
            f"A step takes {seconds:.3g} s: {total} for {settings.num_steps:,} steps, "
            "without evaluations."
        )


def needs(
    settings: Settings,
    path: Path,
    length: int,
    examples: int,
    dtype: str,
    like: Batch | None = None,
) -> tuple[dict[str, int], float | None]:
    """The bytes that a run takes, by what they are for, and the seconds of a step.

    The step is timed on zeros if there is memory for it; otherwise, None is returned.
    """
    config = weights.read_config(path)
    if length > config.max_position_embeddings:
        raise ValueError(
            f"length must be at most {config.max_position_embeddings}, the positions "
            f"of the model; got {length}."
        )

    def start() -> tuple[train.Job, train.State]:
        model = config.build(dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
        if settings.last_layers:
            _, model = frozen.split(model, settings.last_layers)
        return train.start(settings, model)

    job, state = jax.eval_shape(start)
    width = config.hidden_size if settings.last_layers else None

    def batch(size: int) -> Batch:
        return _batch(size, length, width, dtype, like)

    step = train.train_step.lower(job, state, batch(settings.batch_size)).compile()
    size = settings.eval_batch_size
    evaluation = train.evaluate.lower(job, state.params, batch(size), batch_size=size)
    saved, size_of = forecast.num_bytes(state), forecast.num_bytes
    model = jax.eval_shape(lambda: config.build(dtype=dtype, rngs=nnx.Rngs(0)))
    memory = forecast.held(step.memory_analysis())
    found = {
        "Memory: the model as it is loaded": size_of(nnx.state(model)),
        "Memory: the model in a step": size_of(job.rest) + size_of(state.params),
        "Memory: tuned parameters": size_of(state.params),
        "Memory: the optimizer's state": size_of(state.opt_state),
        _WHOLE.format("a step"): memory,
        _WHOLE.format("an evaluation"): forecast.held(
            evaluation.compile().memory_analysis()
        ),
        "Disk: checkpoints": checkpoint.KEPT * saved,
        "Disk: outputs of frozen layers": (
            examples * length * width * jnp.dtype(dtype).itemsize if width else 0
        ),
        "Disk: a merged model": size_of(nnx.state(model)),
    }
    room = forecast.available_memory()
    if room is None or memory + saved > room:
        return found, None
    zeros = jax.tree.map(_zeros, (job, state, batch(settings.batch_size)))
    return found, forecast.timed(*zeros)[0]


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jnp.zeros(leaf.shape, leaf.dtype)


def _batch(
    number: int, length: int, width: int | None, dtype: str, like: Batch | None
) -> Batch:
    """Shapes of examples as the given ones, or with two words that may follow."""

    def of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((number, *shape), dtype)

    sequences, shape = 1, (2, 1)
    if like is not None:
        sequences, shape = like.tokens.shape[1], like.targets.shape[1:]
    tokens = of(sequences, length)
    if width is not None:
        tokens = of(sequences, length, width, dtype=dtype)
    mask = of(*shape, dtype=jnp.float32)
    return Batch(tokens, of(*shape), of(*shape), mask, of())
