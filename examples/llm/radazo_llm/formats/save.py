"""Models written as `load` reads them, and transformers.

save(model, "copy")
"""

import contextlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from radazo_llm.formats import (
    config,
    gguf_file,
    gguf_model,
    gguf_tokenizer,
    names,
    stored,
    tensor_files,
)
from radazo_llm.formats.files import json_object, model_file
from radazo_llm.formats.gguf_model import Stored
from radazo_llm.formats.load import Folder
from radazo_llm.formats.tensor_files import Tensor
from radazo_llm.models import lora
from radazo_llm.models.model import Config, LanguageModel

# What is copied from a model to one tuned from it.
_TOKENIZER = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)


def save(model: LanguageModel, folder: Folder) -> None:
    """Writes a checkpoint that `load` reads, and Hugging Face's `from_pretrained`.

    Args:
      model: The model, without adapters.
      folder: The folder to write; it is made if it is not there. A checkpoint in it is
        replaced. A large model has several files of tensors.

    Raises:
      ValueError: If the model has parameters that the format has no place for.
    """
    _save(_own_tensors(model), model.config, model.dtype, Path(folder))


def merged(model: LanguageModel, folder: Folder, *, base: Path) -> None:
    """Writes a tuned model, its adapters merged into the weights, and its tokenizer.

    Args:
      model: The model, with adapters or tuned whole; or its last layers. It is
        consumed.
      folder: The folder to write; it is made if it is not there.
      base: The folder or the GGUF file that the model came from; its tokenizer is
        copied, and so are layers before the model's own, one tensor at a time.
    """
    tensors, about = _own_tensors(lora.merge(model)), model.config
    with contextlib.ExitStack() as files:
        if model.first_layer:
            about = config.read(base)
            tensors = _base_tensors(model, base, files) | tensors
        _save(tensors, about, model.dtype, Path(folder), _special(base))
    if gguf_file.is_gguf(base):
        file = gguf_model.read(base)
        gguf_tokenizer.tokenizer(file).save(str(Path(folder, "tokenizer.json")))
        text = json.dumps(gguf_tokenizer.config(file), indent=2) + "\n"
        Path(folder, "tokenizer_config.json").write_text(text, encoding="utf-8")
        return
    for name in _TOKENIZER:
        if (base / name).is_file():
            shutil.copyfile(base / name, Path(folder, name))


def _special(base: Path) -> dict[str, Any]:
    """The special tokens in the configuration of a folder."""
    path = model_file(base, config.CONFIG)
    entries = json_object(path) if path.is_file() else {}
    return {k: v for k, v in entries.items() if k.endswith("_token_id")}


def _own_tensors(model: LanguageModel) -> dict[str, Tensor]:
    """The tensors of a model, as views of its parameters."""
    tensors: dict[str, np.ndarray] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if type(variable) is not nnx.Param:
            raise ValueError(
                "model must have no adapters and no blocks of a file to be saved; "
                f"got {'.'.join(map(str, path))}."
            )
        tensors |= names.views(model, path, np.asarray(variable[...]))

    def tensor(view: np.ndarray) -> Tensor:
        return Tensor(view.nbytes, lambda: view)

    return {name: tensor(view) for name, view in tensors.items()}


def _base_tensors(
    model: LanguageModel, base: Path, files: contextlib.ExitStack
) -> dict[str, Tensor]:
    """The tensors of the model that a model's layers came from, not read yet."""
    found, dtype = stored.of_model(base, files), jnp.dtype(model.dtype)
    if not hasattr(model, "lm_head"):
        found.pop("lm_head.weight", None)  # Tied to the embeddings.

    def tensor(one: Stored) -> Tensor:
        size = math.prod(one.shape) * dtype.itemsize
        return Tensor(size, lambda: one.read(slice(None)).astype(dtype, copy=False))

    return {name: tensor(one) for name, one in found.items()}


def _save(
    tensors: Mapping[str, Tensor],
    about: Config,
    dtype: Any,
    folder: Path,
    entries: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes a checkpoint, and removes the tensors of one that is there."""
    entries = dict(entries) | about.to_dict() | {"torch_dtype": str(jnp.dtype(dtype))}
    tensor_files.write_model(folder, config.CONFIG, entries, tensors)
