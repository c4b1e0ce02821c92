"""The last layers of a model alone, on outputs of the frozen layers that are on disk.

    first, last = split(model, 6)
    batch = outputs(first, batch, folder, description)
    ...  # Tune `last` on the batch.

Adapters of the last layers leave the outputs of the others as they are, so these are
computed once: a pass then takes a share of the time. The first layers are in memory
until then. `save.merged` reads them from the model's files again.
"""

import dataclasses
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

from radazo_llm.examples.tokens import Batch
from radazo_llm.models.model import LanguageModel

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
            f"--last-layers must be from 1 to {number - 1} for a model of {number} "
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
            if not isinstance(value, jax.core.Tracer):
                value.delete()  # At most one leaf is in memory twice.
        first[path], second[path] = map(variable.replace, parts)
    cuts = slice(0, number - last), slice(number - last, number)
    return tuple(
        _with_config(nnx.merge(graphdef, nnx.from_flat_state(flat)), model.config, cut)
        for flat, cut in zip((first, second), cuts, strict=True)
    )


def _with_config(model: LanguageModel, config: Any, cut: slice) -> LanguageModel:
    """The model with the configuration of some of the layers, and their place."""
    changes: dict[str, Any] = {"num_hidden_layers": cut.stop - cut.start}
    for name in ("windows", "rope"):  # Of each layer.
        if hasattr(config, name):
            changes[name] = getattr(config, name)[cut]
    model.config = dataclasses.replace(config, **changes)
    model.first_layer = cut.start
    return model


# --- Outputs on disk --------------------------------------------------------------


class Rows:
    """An array in a file. Its rows are read when they are indexed.

    A map of the file that stays would keep all that was read of it resident.
    """

    def __init__(self, path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
        self.path, self.dtype, self.shape = path, dtype, shape

    def __getitem__(self, rows: Any) -> np.ndarray:
        return np.array(np.memmap(self.path, self.dtype, "r", shape=self.shape)[rows])

    def traced(self, rows: jax.Array) -> jax.Array:
        """Rows within a compiled program, which asks Python for them."""
        shape = jax.ShapeDtypeStruct((*rows.shape, *self.shape[1:]), self.dtype)
        return jax.pure_callback(
            lambda i: self[np.asarray(i)], shape, rows, vmap_method="expand_dims"
        )


def outputs(
    model: LanguageModel, batch: Batch, folder: Path, description: str, batch_size: int
) -> Batch:
    """Returns the examples with a model's outputs for tokens, as `Rows` of a file.

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
    return batch._replace(tokens=Rows(path, model.dtype, shape))


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
    bar = tqdm(total=len(rows), desc=f"Frozen layers, {length} tokens")
    with bar, path.open("wb") as file:
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            padded = np.zeros((batch_size, length), np.int32)
            padded[: len(part)] = part
            found = np.asarray(_run(graphdef, state, padded))[: len(part)]
            file.write(found.view(np.uint8))
            bar.update(len(part))


@jax.jit
def _run(graphdef: Any, state: Any, tokens: jax.Array) -> jax.Array:
    model = nnx.merge(graphdef, state)
    positions = jnp.arange(tokens.shape[1])
    x = model.at_positions(model.embed(tokens), positions)
    return model.through(x, positions)[0]
