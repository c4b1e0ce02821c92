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
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from examples.llm import lora
from examples.llm.model import OPT, Config

Folder = str | os.PathLike[str]
ParamPath = tuple[str, ...]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
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
    config = _read_config(folder / CONFIG)
    abstract = nnx.eval_shape(lambda: OPT(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    with contextlib.ExitStack() as files:
        stored = _open(folder, files)
        head = stored.pop("lm_head.weight", None)
        wanted = {name for path in flat for name in _names(path, config)}
        for fault, names in (
            ("lacks the", wanted - stored.keys()),
            ("has the unexpected", stored.keys() - wanted),
        ):
            if names:
                raise ValueError(f"{folder} {fault} tensor {min(names)}.")
        for path, variable in flat.items():
            host = np.empty(variable.shape, variable.dtype)
            for name, view in _views(path, host, config).items():
                tensor = stored[name]()
                real = jnp.issubdtype(tensor.dtype, jnp.floating)
                if tensor.shape != view.shape or not real:
                    raise ValueError(
                        f"{folder}: tensor {name} must be of shape {view.shape} and "
                        f"floating point; got {tensor.shape} and {tensor.dtype}."
                    )
                view[...] = tensor
            # Waits, so that the next is not read before this one is let go.
            flat[path] = variable.replace(jax.block_until_ready(jnp.array(host)))
        tied = stored["model.decoder.embed_tokens.weight"]
        if head is not None and not np.array_equal(head(), tied()):
            raise ValueError(
                f"{folder}: lm_head.weight must equal embed_tokens.weight."
            )
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def save(model: OPT, folder: Folder, *, max_shard_bytes: int = 5 * 2**30) -> None:
    """Writes a checkpoint that `load` reads, and Hugging Face's `from_pretrained`.

    A checkpoint that is in the folder stays until all new files are written.

    Args:
      model: The model, without adapters or a soft prompt.
      folder: Where to write; it is made if it is not there.
      max_shard_bytes: The size from which the tensors are divided into several files.

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
        tensors |= _views(path, np.asarray(variable[...]), model.config)
    shards = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    with _new_files(folder) as new:
        for file, names in shards.filename_to_tensors.items():
            _write_tensors({name: tensors[name] for name in names}, new / file)
        if shards.is_sharded:
            index = {"weight_map": shards.tensor_to_filename}
            _write_json({"metadata": shards.metadata} | index, new / INDEX)
        kind = {"torch_dtype": str(jnp.dtype(model.dtype))}
        _write_json(model.config.to_dict() | kind, new / CONFIG)
        written = {path.name for path in new.iterdir()}
    for path in Path(folder).glob("model*.safetensors*"):
        if path.name not in written:  # Of the checkpoint that was there.
            path.unlink()


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
            "num_transformer_submodules": 1,
            "num_attention_heads": model.config.num_attention_heads,
            "num_layers": model.config.num_hidden_layers,
        }
    elif isinstance(model.layers.q_proj, lora.AdaptedLinear):
        tensors = _adapters(model)
        rank = model.layers.q_proj.lora.lora_a.shape[-1]
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": model.layers.q_proj.scale * rank,
            "target_modules": list(lora.ADAPTED),
            "bias": "none",
            "fan_in_fan_out": False,
        }
    else:
        raise ValueError("model must have adapters or a soft prompt; got neither.")
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    with _new_files(folder) as new:
        _write_tensors(tensors, new / "adapter_model.safetensors")
        _write_json(config | {"inference_mode": True}, new / "adapter_config.json")


def _names(path: ParamPath, config: Config) -> list[str]:
    """Of a parameter's tensors in a checkpoint: one, or one for each layer."""
    *modules, leaf = path
    prefixes = ["model.decoder"]
    if modules[0] == "layers":
        modules = modules[1:]
        attention = ".self_attn" if modules[0] in _ATTENTION else ""
        layers = range(config.num_hidden_layers)
        prefixes = [f"model.decoder.layers.{layer}{attention}" for layer in layers]
    return [".".join([prefix, *modules, _LEAVES[leaf]]) for prefix in prefixes]


def _views(path: ParamPath, array: np.ndarray, config: Config) -> dict[str, np.ndarray]:
    """A parameter's tensors in a checkpoint, by name, as views of the parameter."""
    parts = array if path[0] == "layers" else [array]
    # Checkpoints have the axes of a linear layer's matrix the other way round.
    parts = [part.T for part in parts] if path[-1] == "kernel" else parts
    return dict(zip(_names(path, config), parts, strict=True))


# --- Reading ----------------------------------------------------------------------


def _read_config(path: Path) -> Config:
    try:
        return Config.from_dict(json.loads(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _open(
    folder: Path, files: contextlib.ExitStack
) -> dict[str, Callable[[], np.ndarray]]:
    """What reads the tensors of a folder, by name with the prefix `model.`."""
    stored: dict[str, Callable[[], np.ndarray]] = {}
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise FileNotFoundError(
            f"{folder} must have model.safetensors, or shards of it; got neither. "
            "transformers makes one of a PyTorch checkpoint by from_pretrained and "
            "save_pretrained."
        )
    for path in paths:
        try:
            file = files.enter_context(safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(
                f"{path} must be a complete safetensors file: {error}."
            ) from None
        for original in file.keys():  # noqa: SIM118  (It is no mapping.)
            bare = original.startswith("decoder.")
            name = f"model.{original}" if bare else original
            if name in stored:
                raise ValueError(f"{folder} must have {name} once; got it twice.")
            stored[name] = functools.partial(file.get_tensor, original)
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


@contextlib.contextmanager
def _new_files(folder: Folder) -> Iterator[Path]:
    """A folder for files that move to `folder` when all of them are written."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as new:
        yield Path(new)
        for path in Path(new).iterdir():
            path.replace(Path(folder, path.name))


def _write_tensors(arrays: dict[str, np.ndarray], path: Path) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    # Not by the library's own function, whose files nobody else may read.
    path.write_bytes(serialize(arrays, metadata={"format": "pt"}))


def _write_json(values: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
