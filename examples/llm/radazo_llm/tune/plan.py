"""The job of `radazo-llm plan`: what a tuning run takes, from compiled programs.

Nothing is run and no weights are read: the step and the evaluation are compiled for the
present backend from the shapes of the model.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tabulate import tabulate

from radazo_llm.formats import find, weights
from radazo_llm.tune import checkpoint, frozen, train
from radazo_llm.tune.data import Batch
from radazo_llm.tune.settings import Settings

_MIB = 2**20


def plan(
    settings: Settings,
    *,
    model: str,
    length: int,
    examples: int,
    dtype: str | None = None,
) -> None:
    """Prints the memory and the disk of a run.

    Args:
      settings: The settings of the run.
      model: A name that `find.model` takes.
      length: The tokens of an example.
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
    dtype = dtype or weights.default_dtype()
    found = needs(settings, find.model(model), length, examples, dtype)
    shown = [(name, f"{size / _MIB:,.1f}") for name, size in found.items()]
    print(f"On {jax.devices()[0].device_kind}, for {length} tokens:\n")
    print(
        tabulate(shown, ["", "MiB"], colalign=("left", "right"), disable_numparse=True)
    )


def needs(
    settings: Settings, path: Path, length: int, examples: int, dtype: str
) -> dict[str, int]:
    """The bytes that a run takes, by what they are for."""
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
    step = train.train_step.lower(
        job, state, _batch(settings.batch_size, length, width, dtype)
    )
    size = settings.eval_batch_size
    evaluation = train.evaluate.lower(
        job, state.params, _batch(size, length, width, dtype), batch_size=size
    )
    saved = _bytes(state)
    model = jax.eval_shape(lambda: config.build(dtype=dtype, rngs=nnx.Rngs(0)))
    return {
        "Memory: the model as it is loaded": _bytes(nnx.state(model)),
        "Memory: the model in a step": _bytes(job.rest) + _bytes(state.params),
        "Memory: tuned parameters": _bytes(state.params),
        "Memory: the optimizer's state": _bytes(state.opt_state),
        "Memory: a step, all in all": _held(step.compile().memory_analysis()),
        "Memory: an evaluation, all in all": _held(
            evaluation.compile().memory_analysis()
        ),
        "Disk: checkpoints": checkpoint.KEPT * saved,
        "Disk: outputs of frozen layers": (
            examples * length * width * jnp.dtype(dtype).itemsize if width else 0
        ),
        "Disk: a merged model": _bytes(nnx.state(model)),
    }


def _batch(number: int, length: int, width: int | None, dtype: str) -> Batch:
    """Shapes of examples whose two candidates share a sequence."""

    def of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((number, *shape), dtype)

    tokens = of(1, length) if width is None else of(1, length, width, dtype=dtype)
    mask = of(2, 1, dtype=jnp.float32)
    return Batch(tokens, of(2, 1), of(2, 1), mask, of())


def _held(memory: Any) -> int:
    """The memory of a program: arguments, other results, temporary buffers."""
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def _bytes(tree: Any) -> int:
    return sum(
        leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
    )
