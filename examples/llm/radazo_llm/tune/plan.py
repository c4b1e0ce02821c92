"""The job of `radazo-llm plan`: the cost of a run, measured on a model of noise.

No weights are read: some steps and an evaluation run on parameters of the same sizes.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tabulate import tabulate

import radazo_jax as zo
from radazo_llm.examples.tokens import Batch
from radazo_llm.formats import config, find
from radazo_llm.run import usage
from radazo_llm.settings import Settings
from radazo_llm.tune import frozen
from radazo_llm.tune.batches import draw
from radazo_llm.tune.job import loss_of, measure, parts_of, with_objective

_STEPS = 3  # The first ones compile.
_LINE = 300  # Bytes of a line of the journal and one of the metrics.


def plan(
    settings: Settings,
    *,
    model: str,
    source: Any,
    length: int,
    examples: int,
    dtype: str | None = None,
    merged: bool = False,
) -> None:
    """Prints the memory, the disk and the time of a run.

    Args:
      settings: The settings of the run.
      model: A name that `find.model` takes.
      source: The examples, `splits.Own`; or None.
      length: The tokens of an example, without `source`.
      examples: The number of all examples, to train on and to evaluate.
      dtype: The dtype of the model; by default, of the present backend.
      merged: Whether the run exports a merged model.

    Raises:
      ValueError: If the matrices stay as in the file, or the model does not fit.
    """
    if settings.quantize == "file":
        raise ValueError(
            "--quantize must not be file, whose matrices have no shapes before they "
            "are read; got file. Plan with int4 for Q4_0 and Q4_1, and int8 for Q8_0."
        )
    dtype, path = dtype or config.default_dtype(), find.model(model)
    like = None
    if source is not None:
        splits = source.read(path)
        like = splits.batches[0]
        settings = with_objective(settings, like)
        length = like.tokens.shape[-1]
        examples = sum(len(batch.label) for batch in splits.batches)
        print(splits.summary)
    about = config.read(path)
    if length > about.max_position_embeddings:
        raise ValueError(
            f"--length must be at most {about.max_position_embeddings}, the positions "
            f"of the model; got {length}."
        )
    of_model = num_bytes(_abstract(about, dtype))
    free = usage.available()
    if free is not None and of_model > free:
        raise ValueError(
            f"--model must fit into memory: it takes {usage.size(of_model)}, of "
            f"{usage.size(free)} free. Try {usage.smaller(settings)}."
        )
    seconds, params, state = _run(settings, about, length, dtype, like)
    width = about.hidden_size if settings.last_layers else 0
    outputs = examples * length * width * jnp.dtype(dtype).itemsize
    found = {
        "Memory: the model": of_model,
        "Memory: tuned parameters": num_bytes(params),
        "Memory: the optimizer's state": num_bytes(state),
        "Memory: the process, all in all": usage.peak(),
        "Disk: journal and metrics": 2 * _LINE * settings.num_steps,
        "Disk: outputs of frozen layers": outputs,
        "Disk: what is exported": of_model if merged else num_bytes(params),
    }
    shown = [(name, f"{size / usage.MIB:,.1f}") for name, size in found.items()]
    print(f"On {jax.devices()[0].device_kind}, for {length} tokens:\n")
    print(
        tabulate(shown, ["", "MiB"], colalign=("left", "right"), disable_numparse=True)
    )
    total = usage.duration(seconds * settings.num_steps)
    print(
        f"\nA step takes {seconds:.3g} s: {total} for {settings.num_steps:,} steps, "
        f"without evaluations. {usage.memory(settings)}"
    )


def _run(
    settings: Settings, about: Any, length: int, dtype: str, like: Batch | None
) -> tuple[float, Any, Any]:
    """The seconds of a step, what is tuned, and the optimizer's state."""
    model = jax.tree.map(_noise, _abstract(about, dtype))
    width = None
    if settings.last_layers:
        first, model = frozen.split(model, settings.last_layers)
        for leaf in jax.tree.leaves(first.layers):
            leaf.delete()  # As in a run, once their outputs are on disk.
        width = about.hidden_size
    parts = parts_of(settings, model)
    size = settings.batch_size
    step = _batch(size, length, width, dtype, like)
    settings = dataclasses.replace(settings, learning_rate=1e-30)
    ends: list[float] = []
    result = zo.train(
        loss_of(settings, parts, [step]),
        parts.params,
        settings.optimizer(np.zeros(_STEPS, np.float32)),
        settings.estimator(),
        num_steps=_STEPS,
        sample=functools.partial(draw, (size,), size),
        evaluator=zo.vectorized(batch_size=1),
        chunk_size=1,
        callback=lambda report: ends.append(time.perf_counter()),
        progress=False,
    )
    evaluated = _batch(settings.eval_batch_size, length, width, dtype, like)
    measure(settings, parts, {"dev": [evaluated]}, parts.params, 1)
    return ends[-1] - ends[-2], parts.params, result.state.optimizer_state


def _abstract(about: Any, dtype: str) -> Any:
    return nnx.eval_shape(lambda: about.build(dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))


def _noise(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(leaf.shape, 0.01, leaf.dtype)


def num_bytes(tree: Any) -> int:
    """The bytes of a tree's arrays."""
    return sum(
        leaf.size * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )


def _batch(
    number: int, length: int, width: int | None, dtype: str, like: Batch | None
) -> Batch:
    """Examples of the sizes of the given ones, or with two words that may follow."""
    sequences, shape = 1, (2, 1)
    if like is not None:
        sequences, shape = like.tokens.shape[1], like.targets.shape[1:]
    tokens = np.zeros((number, sequences, length), np.int32)
    if width is not None:
        tokens = np.full((*tokens.shape, width), 0.01, dtype)
    zeros = np.zeros((number, *shape), np.int32)
    mask = np.ones((number, *shape), np.float32)
    return Batch(tokens, zeros, zeros, mask, np.zeros(number, np.int32))
