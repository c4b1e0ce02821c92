"""Hugging Face's formats, read and written without PyTorch.

    model = load("opt-125m")
    save(model, "copy")

`transformers` and `load` read what `save` and `save_merged` write, and `peft` what
`save_adapters` writes.
"""

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from examples.llm import lora
from examples.llm.model import OPT, Config

Folder = str | os.PathLike[str]

CONFIG = "config.json"
TOKENIZER = (
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)

_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")


def load(folder: Folder, *, dtype: Any = jnp.bfloat16) -> OPT:
    """The model of a folder with `config.json` and safetensors, whole or in shards.

    Tensors are read one by one: beside the model there is one parameter (of all
    layers) in memory.

    Args:
      folder: Where the files are.
      dtype: Of the parameters and of what is computed with them.

    Raises:
      FileNotFoundError: If a file is not there.
      ValueError: If the files are damaged, or hold anything but an OPT model.
    """
    folder = Path(folder)
    config = read_config(folder)
    abstract = nnx.eval_shape(lambda: OPT(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    with contextlib.ExitStack() as files:
        stored = _open(folder, files)
        stored.pop("lm_head.weight", None)  # Tied to the embeddings.
        for path, variable in flat.items():
            host = np.empty(variable.shape, variable.dtype)
            for name, view in _views(path, host).items():
                if name not in stored:
                    raise ValueError(f"{folder} lacks the tensor {name}.")
                tensor = stored.pop(name)()
                real = jnp.issubdtype(tensor.dtype, jnp.floating)
                if tensor.shape != view.shape or not real:
                    raise ValueError(
                        f"{folder}: tensor {name} must be of shape {view.shape} and "
                        f"floating point; got {tensor.shape} and {tensor.dtype}."
                    )
                view[...] = tensor
            # Waits, so that the next is not read before this one is let go.
            flat[path] = variable.replace(jax.block_until_ready(jnp.array(host)))
    if stored:
        raise ValueError(f"{folder} has the unexpected tensor {min(stored)}.")
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def save(model: OPT, folder: Folder) -> None:
    """Writes a checkpoint that `load` reads, and Hugging Face's `from_pretrained`.

    Args:
      model: The model, without adapters or a soft prompt.
      folder: Where to write; it is made if it is not there. A checkpoint in it is
        replaced.

    Raises:
      ValueError: If the model has parameters that the format has no place for.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if type(variable) is not nnx.Param:
            raise ValueError(
                "model must have no adapters and no soft prompt to be saved; got "
                f"{'.'.join(map(str, path))}."
            )
        tensors |= _views(path, np.asarray(variable[...]))
    for path in Path(folder).glob("model*.safetensors*"):
        path.unlink()
    config = model.config.to_dict() | {"torch_dtype": str(jnp.dtype(model.dtype))}
    _write(Path(folder), CONFIG, config, "model.safetensors", tensors)


def save_merged(model: OPT, folder: Folder, *, base: Path) -> None:
    """Writes a tuned model, its adapters merged into the weights, and its tokenizer.

    Args:
      model: The model, with adapters or tuned whole. It is consumed.
      folder: Where to write; it is made if it is not there.
      base: The folder that the model came from; its tokenizer is copied.

    Raises:
      ValueError: If the model has a soft prompt.
    """
    save(lora.merge(model), folder)
    for name in TOKENIZER:
        if (base / name).is_file():
            shutil.copyfile(base / name, Path(folder, name))


def save_adapters(model: OPT, folder: Folder, *, base: str) -> None:
    """Writes adapters or a soft prompt as `peft.PeftModel.from_pretrained` reads them.

    Args:
      model: A model with adapters or a soft prompt.
      folder: Where to write; it is made if it is not there.
      base: The name or folder of the model without them, for the configuration.

    Raises:
      ValueError: If the model has neither.
    """
    if model.prompt is not None:
        tensors = {"prompt_embeddings": np.asarray(model.prompt[...])}
        length, width = model.prompt.shape
        config = {
            "peft_type": "PROMPT_TUNING",
            "num_virtual_tokens": length,
            "token_dim": width,
        }
    elif isinstance(model.layers.q_proj, lora.AdaptedLinear):
        tensors = _adapters(model)
        rank = model.layers.q_proj.lora.lora_a.shape[-1]
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": model.layers.q_proj.scale * rank,
            "target_modules": list(lora.ADAPTED),
        }
    else:
        raise ValueError("model must have adapters or a soft prompt; got neither.")
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    config |= {"inference_mode": True}
    files = "adapter_config.json", config, "adapter_model.safetensors", tensors
    _write(Path(folder), *files)


def _views(path: tuple[str, ...], array: np.ndarray) -> dict[str, np.ndarray]:
    """A parameter's tensors in a checkpoint, by name: one, or one for each layer.

    They are views of the parameter.
    """
    *modules, leaf = path
    parts, prefixes = [array], ["model.decoder"]
    if modules[0] == "layers":
        modules = modules[1:]
        attention = ".self_attn" if modules[0] in _ATTENTION else ""
        parts = list(array)
        prefixes = [f"model.decoder.layers.{i}{attention}" for i in range(len(array))]
    if leaf == "kernel":  # Checkpoints have its axes the other way round.
        parts = [part.T for part in parts]
    names = [".".join([prefix, *modules, _LEAVES[leaf]]) for prefix in prefixes]
    return dict(zip(names, parts, strict=True))


# --- Reading ----------------------------------------------------------------------


def read_config(folder: Path) -> Config:
    """The sizes of the model in a folder."""
    path = folder / CONFIG
    try:
        return Config.from_dict(json.loads(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _open(
    folder: Path, files: contextlib.ExitStack
) -> dict[str, Callable[[], np.ndarray]]:
    """What reads the tensors of a folder, by name with the prefix `model.`."""
    stored: dict[str, Callable[[], np.ndarray]] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            file = files.enter_context(safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(
                f"{path} must be a complete safetensors file: {error}."
            ) from None
        for original in file.keys():  # noqa: SIM118  (It is no mapping.)
            bare = original.startswith("decoder.")
            name = f"model.{original}" if bare else original
            stored[name] = functools.partial(file.get_tensor, original)
    if not stored:
        raise FileNotFoundError(
            f"{folder} must have model.safetensors, or shards of it; got neither. "
            "transformers makes one of a PyTorch checkpoint by from_pretrained and "
            "save_pretrained."
        )
    return stored


# --- Writing ----------------------------------------------------------------------


def _adapters(model: OPT) -> dict[str, np.ndarray]:
    tensors = {}
    for name in lora.ADAPTED:
        adapter = getattr(model.layers, name).lora
        for matrix, stack in (("A", adapter.lora_a), ("B", adapter.lora_b)):
            for i, layer in enumerate(np.asarray(stack[...])):
                module = f"model.decoder.layers.{i}.self_attn.{name}"
                tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = layer.T
    return tensors


def _write(
    folder: Path,
    config_file: str,
    config: dict[str, Any],
    tensors_file: str,
    tensors: dict[str, np.ndarray],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    (folder / config_file).write_text(text, encoding="utf-8")
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(tensors, folder / tensors_file, metadata={"format": "pt"})
    # The library's own mode lets nobody else read the file.
    shutil.copymode(folder / config_file, folder / tensors_file)
