"""The last layers of a model alone, on outputs of the frozen layers that are on disk.

    first, last = split(model, 6)
    batch = outputs(first, batch, folder, description)
    ...  # Tune `last` on the batch.
    model = joined(first, last)

Adapters of the last layers leave the outputs of the others as they are, so these are
computed once: a pass then takes a share of the time.
"""

import dataclasses
import functools
import json
import math
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from examples.apps.llm.data import Batch
from examples.apps.llm.model import LanguageModel

_CHUNK = 1 << 24  # Bytes of a file that are read at once for its checksum.


def split(model: LanguageModel, last: int) -> tuple[LanguageModel, LanguageModel]:
    """Divides a model's layers.

    Args:
      model: A model without adapters. It is consumed.
      last: The number of layers that the second part has.

    Returns:
      The first layers and the last, each as a model. Both have the embeddings.

    Raises:
      ValueError: If the model has no more layers than that.
    """
    number = model.config.num_hidden_layers
    if not 0 < last < number:
        raise ValueError(
            f"last_layers must be from 1 to {number - 1} for a model of {number} "
            f"layers; got {last}."
        )
    graphdef, state = nnx.split(model)
    first, second = {}, {}
    for path, variable in nnx.to_flat_state(state):
        value = variable[...]
        parts = value, value
        if path[0] == "layers":
            cut = number - last
            parts = jax.block_until_ready((value[:cut], value[cut:]))
            value.delete()  # At most one leaf is in memory twice.
        first[path], second[path] = map(variable.replace, parts)
    cuts = slice(0, number - last), slice(number - last, number)
    return tuple(
        _with_config(nnx.merge(graphdef, nnx.from_flat_state(flat)), model.config, cut)
        for flat, cut in zip((first, second), cuts, strict=True)
    )


def _with_config(model: LanguageModel, config: Any, cut: slice) -> LanguageModel:
    """The model with the configuration of some of the layers."""
    changes: dict[str, Any] = {"num_hidden_layers": cut.stop - cut.start}
    for name in ("windows", "rope"):  # Of each layer.
        if hasattr(config, name):
            changes[name] = getattr(config, name)[cut]
    model.config = dataclasses.replace(config, **changes)
    return model


def joined(first: LanguageModel, last: LanguageModel) -> LanguageModel:
    """Returns the model whose layers `split` divided.

    Args:
      first: The first part, as `split` returned it. It is consumed.
      last: The last part, also consumed. The first layers get adapters of zeros.
    """
    graphdef, state = nnx.split(last)
    before = {
        path: variable[...] for path, variable in nnx.to_flat_state(nnx.state(first))
    }
    number = first.config.num_hidden_layers
    flat = {}
    for path, variable in nnx.to_flat_state(state):
        value = variable[...]
        if path[0] == "layers":
            base = tuple(part for part in path if part != "base")
            zeros = functools.partial(jnp.zeros, (number, *value.shape[1:]))
            rest = before[base] if base in before else zeros(value.dtype)
            whole = jax.block_until_ready(jnp.concatenate([rest, value]))
            rest.delete()
            value.delete()
            value = whole
        flat[path] = variable.replace(value)
    config, total = last.config, number + last.config.num_hidden_layers
    model = nnx.merge(graphdef, nnx.from_flat_state(flat))
    changes = {
        name: getattr(first.config, name) + getattr(config, name)
        for name in ("windows", "rope")
        if hasattr(config, name)
    }
    model.config = dataclasses.replace(config, num_hidden_layers=total, **changes)
    return model


# --- Outputs on disk --------------------------------------------------------------


def outputs(
    model: LanguageModel, batch: Batch, folder: Path, description: str, batch_size: int
) -> Batch:
    """Returns the examples with a model's outputs for tokens, mapped from a file.

    The file is made if it is not there, or is damaged.

    Args:
      model: The first layers, from `split`.
      batch: The examples.
      folder: The folder of the files.
      description: The model and its settings, in a few words.
      batch_size: The number of examples in a pass.
    """
    tokens = np.ascontiguousarray(batch.tokens)
    name = f"{zlib.crc32(tokens.tobytes(), zlib.crc32(description.encode())):08x}"
    path, about = folder / f"{name}.outputs", folder / f"{name}.json"
    shape = *tokens.shape, model.config.hidden_size
    wanted = {
        "description": description,
        "shape": list(shape),
        "dtype": str(jnp.dtype(model.dtype)),
    }
    if not _is_whole(path, about, wanted):
        folder.mkdir(parents=True, exist_ok=True)
        about.unlink(missing_ok=True)
        _write(model, tokens, path, batch_size)
        text = json.dumps(wanted | {"checksum": _checksum(path)})
        about.write_text(text, encoding="utf-8")  # Last: the file is whole.
    return batch._replace(tokens=np.memmap(path, model.dtype, "r", shape=shape))


def _is_whole(path: Path, about: Path, wanted: dict[str, Any]) -> bool:
    try:
        found = json.loads(about.read_text("utf-8"))
        size = math.prod(wanted["shape"]) * jnp.dtype(wanted["dtype"]).itemsize
        known = isinstance(found, dict) and path.stat().st_size == size
        return known and found == wanted | {"checksum": _checksum(path)}
    except (OSError, ValueError):
        return False


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    return found


def _write(
    model: LanguageModel, tokens: np.ndarray, path: Path, batch_size: int
) -> None:
    """Writes the outputs for tokens [B, C, T] to a file of floats [B, C, T, width]."""
    graphdef, state = nnx.split(model)
    length = tokens.shape[-1]
    rows = tokens.reshape(-1, length)
    shape = *rows.shape, model.config.hidden_size
    file = np.memmap(path, model.dtype, "w+", shape=shape)
    with tqdm(total=len(rows), desc=f"Frozen layers, {length} tokens") as bar:
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            padded = np.zeros((batch_size, length), np.int32)
            padded[: len(part)] = part
            file[start : start + len(part)] = _run(graphdef, state, padded)[: len(part)]
            bar.update(len(part))
    file.flush()


@jax.jit
def _run(graphdef: Any, state: Any, tokens: jax.Array) -> jax.Array:
    model = nnx.merge(graphdef, state)
    positions = jnp.arange(tokens.shape[1])
    x = model.at_positions(model.embed(tokens), positions)
    return model.through(x, positions)[0]
