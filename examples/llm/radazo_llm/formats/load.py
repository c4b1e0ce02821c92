"""Models in Hugging Face's formats and in GGUF, read without PyTorch.

model = load("opt-125m")
"""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from radazo_llm.formats import config, gguf_file, names, stored
from radazo_llm.formats.gguf_model import Stored
from radazo_llm.models import blocks, quantization
from radazo_llm.models.model import LanguageModel

Folder = str | os.PathLike[str]
_ALIGNMENT = 64  # Bytes.


def load(
    folder: Folder, *, dtype: Any = jnp.bfloat16, keep_blocks: bool = False
) -> LanguageModel:
    """Loads a model: a folder with `config.json` and safetensors, or a GGUF file.

    Tensors are read in parts of some MiB, so that loading takes little more memory
    than the model. Quantized tensors of GGUF files are dequantized.

    Args:
      folder: The folder, whose safetensors are one file or shards, or the file.
      dtype: The dtype of the parameters and of computations with them.
      keep_blocks: Whether embeddings and matrices that a GGUF file has in blocks of 4
        to 8 bits (`blocks.LAYOUTS`) stay in them. They are not rounded again.

    Raises:
      FileNotFoundError: If a file is not there.
      ValueError: If the files are damaged, or hold a model of another family.
    """
    folder = Path(folder)
    about = config.read(folder)
    with contextlib.ExitStack() as files:
        found = stored.of_model(folder, files)
        if about.num_hidden_layers > len(found):
            raise ValueError(
                f"{folder} lacks tensors: it has {len(found)}, and its configuration "
                f"says {about.num_hidden_layers} layers."
            )
        abstract = nnx.eval_shape(lambda: about.build(dtype=dtype, rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(abstract)
        flat = dict(nnx.to_flat_state(state))
        if not hasattr(abstract, "lm_head"):
            found.pop("lm_head.weight", None)  # Tied to the embeddings.
        # Before any memory is taken, which files that lie could make very large.
        for path, variable in flat.items():
            shadow = stored.shadow(variable.shape)
            stored.check(names.views(abstract, path, shadow), found, folder)
        kept = {}
        for path, variable in flat.items():
            shadow = stored.shadow(variable.shape)
            tensors = list(names.views(abstract, path, shadow))
            in_blocks = path[-1] in ("kernel", "embedding") and all(
                found[name].block_kind for name in tensors
            )
            if keep_blocks and in_blocks:
                layers = [found.pop(name) for name in tensors]
                kept[path[:-1]] = _rows(layers, stacked=path[0] == "layers")
                flat[path] = variable.replace(jnp.zeros(0))
                continue
            host = _host(variable.shape, variable.dtype)
            stored.fill(names.views(abstract, path, host), found, folder)
            # Waits, so that the next is not read before this one is let go.
            flat[path] = variable.replace(jax.block_until_ready(jax.device_put(host)))
            del host
    stored.check_empty(found, folder)
    model = nnx.merge(graphdef, nnx.from_flat_state(flat))
    for (*parents, name), rows in kept.items():
        owner = model.layers if parents else model
        base = getattr(owner, name)
        is_linear = isinstance(base, nnx.Linear)
        kind = quantization.BlockLinear if is_linear else quantization.BlockEmbedding
        setattr(owner, name, kind(base, rows))
    return model


def _host(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that JAX uses as it is on a CPU, which it requires to be aligned."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _rows(layers: list[Stored], stacked: bool) -> quantization.Rows:
    """The rows of bytes of one matrix, or of a stack of them."""
    kinds, (outputs, inputs) = [x.block_kind for x in layers], layers[0].shape
    width = max(blocks.row_bytes(kind, inputs) for kind in kinds)
    host = _host((len(layers), outputs, width), np.uint8)
    for to, layer in zip(host, layers, strict=True):
        assert layer.rows is not None
        size = blocks.row_bytes(layer.block_kind, inputs)
        for part in stored.parts(outputs, size):
            data = layer.rows(part)
            to[part, :size] = data
            gguf_file.let_go(data)
        to[:, size:] = 0
    data = jax.block_until_ready(jax.device_put(host if stacked else host[0]))
    return quantization.Rows(inputs, data, kinds)
