"""Hugging Face's formats, read and written without PyTorch.

    model = load("opt-125m")
    save(model, "copy")

`transformers` and `load` read what `save` and `save_merged` write, `peft` and
`load_adapters` what `save_adapters` writes.
"""

import contextlib
import functools
import json
import math
import operator
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from radazo_llm.formats import gguf_file, gguf_model, gguf_tokenizer, tensor_files
from radazo_llm.formats.files import json_object, model_file
from radazo_llm.formats.gguf_model import Stored
from radazo_llm.formats.tensor_files import Tensor
from radazo_llm.models import blocks, decoder, families, lora, opt, quantization
from radazo_llm.models.model import Config, LanguageModel, one_of

Folder = str | os.PathLike[str]

CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTERS = "adapter_config.json", "adapter_model.safetensors"
# What is copied from a model to one tuned from it.
TOKENIZER = (
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)

_FLOATS = ("F16", "BF16", "F32", "F64")  # As safetensors names them.
_ALIGNMENT = 64  # Bytes.
_PART = 1 << 22  # Bytes of a tensor that are read at once.
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
# Prefixes of old checkpoints, and of models of texts and images, without images.
_PREFIXES = {
    "decoder.": "model.decoder.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_OF_IMAGES = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)
# Other contents of old checkpoints.
_COMPUTED = ".rotary_emb.inv_freq"
FAMILIES: dict[str, Any] = {"opt": opt.Config} | dict.fromkeys(
    families.FAMILIES | families.MULTIMODAL, decoder.Config
)


def default_dtype() -> str:
    """The dtype of models on the present backend."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


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
    config = read_config(folder)
    with contextlib.ExitStack() as files:
        stored = _tensors(folder, files)
        if config.num_hidden_layers > len(stored):
            raise ValueError(
                f"{folder} lacks tensors: it has {len(stored)}, and "
                f"{'its metadata' if gguf_file.is_gguf(folder) else CONFIG} says "
                f"{config.num_hidden_layers} layers."
            )
        abstract = nnx.eval_shape(lambda: config.build(dtype=dtype, rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(abstract)
        flat = dict(nnx.to_flat_state(state))
        if not hasattr(abstract, "lm_head"):
            stored.pop("lm_head.weight", None)  # Tied to the embeddings.
        # Before any memory is taken, which files that lie could make very large.
        for path, variable in flat.items():
            _check(_views(abstract, path, _shadow(variable)), stored, folder)
        kept = {}
        for path, variable in flat.items():
            names = list(_views(abstract, path, _shadow(variable)))
            in_blocks = path[-1] in ("kernel", "embedding") and all(
                stored[name].block_kind for name in names
            )
            if keep_blocks and in_blocks:
                layers = [stored.pop(name) for name in names]
                kept[path[:-1]] = _rows(layers, stacked=path[0] == "layers")
                flat[path] = variable.replace(jnp.zeros(0))
                continue
            host = _host(variable.shape, variable.dtype)
            _fill(_views(abstract, path, host), stored)
            # Waits, so that the next is not read before this one is let go.
            flat[path] = variable.replace(jax.block_until_ready(jax.device_put(host)))
            del host
    _check_empty(stored, folder)
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
        for part in _parts(outputs, size):
            data = layer.rows(part)
            to[part, :size] = data
            gguf_file.let_go(data)
        to[:, size:] = 0
    data = jax.block_until_ready(jax.device_put(host if stacked else host[0]))
    return quantization.Rows(inputs, data, kinds)


def _parts(length: int, row_bytes: int) -> Iterator[slice]:
    """Yields slices of rows of a tensor that are read at once."""
    step = max(1, _PART // max(row_bytes, 1))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def load_adapters(model: LanguageModel, folder: Folder) -> None:
    """Adds the adapters or the soft prompt that `peft` wrote, or `save_adapters`.

    Args:
      model: A model without either, changed in place.
      folder: Holds `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
      FileNotFoundError: If a file is not there.
      ValueError: If the files are damaged, or hold anything but plain adapters of
        projections of the model or a soft prompt.
    """
    folder = Path(folder)
    config = _read_adapter_config(folder, model)
    layers = config.get("layers_to_transform") or range(model.config.num_hidden_layers)

    def add(model: LanguageModel) -> LanguageModel:
        rngs = nnx.Rngs(0)  # What is drawn is replaced.
        if config["peft_type"] == "LORA":
            sizes = {"rank": config["r"], "alpha": config["lora_alpha"]}
            targets = config["target_modules"]
            lora.add_lora(model, **sizes, targets=targets, rngs=rngs)
        else:
            lora.add_prompt(model, length=config["num_virtual_tokens"], rngs=rngs)
        return model

    with contextlib.ExitStack() as files:
        stored = _open(folder, ADAPTERS, files)
        # As in `load`, before any memory is taken.
        for variable, views in _adapter_views(nnx.eval_shape(add, model), layers):
            _check(views(_shadow(variable)), stored, folder)
        for variable, views in _adapter_views(add(model), layers):
            host = np.zeros(variable.shape, np.float32)
            _fill(views(host), stored)
            variable[...] = jnp.asarray(host)
    _check_empty(stored, folder)


def save(model: LanguageModel, folder: Folder) -> None:
    """Writes a checkpoint that `load` reads, and Hugging Face's `from_pretrained`.

    Args:
      model: The model, without adapters or a soft prompt.
      folder: The folder to write; it is made if it is not there. A checkpoint in it is
        replaced. A large model has several files of tensors.

    Raises:
      ValueError: If the model has parameters that the format has no place for.
    """
    _save(_own_tensors(model), model.config, model.dtype, Path(folder))


def save_merged(model: LanguageModel, folder: Folder, *, base: Path) -> None:
    """Writes a tuned model, its adapters merged into the weights, and its tokenizer.

    Args:
      model: The model, with adapters or tuned whole; or its last layers. It is
        consumed.
      folder: The folder to write; it is made if it is not there.
      base: The folder or the GGUF file that the model came from; its tokenizer is
        copied, and so are layers before the model's own, one tensor at a time.

    Raises:
      ValueError: If the model has a soft prompt.
    """
    tensors, config = _own_tensors(lora.merge(model)), model.config
    with contextlib.ExitStack() as files:
        if model.first_layer:
            config = read_config(base)
            tensors = _base_tensors(model, base, files) | tensors
        _save(tensors, config, model.dtype, Path(folder))
    if gguf_file.is_gguf(base):
        file = gguf_model.read(base)
        gguf_tokenizer.tokenizer(file).save(str(Path(folder, "tokenizer.json")))
        text = json.dumps(gguf_tokenizer.config(file), indent=2) + "\n"
        Path(folder, "tokenizer_config.json").write_text(text, encoding="utf-8")
        return
    for name in TOKENIZER:
        if (base / name).is_file():
            shutil.copyfile(base / name, Path(folder, name))


def save_adapters(model: LanguageModel, folder: Folder, *, base: str) -> None:
    """Writes adapters or a soft prompt as `peft.PeftModel.from_pretrained` reads them.

    Args:
      model: A model with adapters or a soft prompt.
      folder: The folder to write; it is made if it is not there.
      base: The name or folder of the base model, written to the configuration.

    Raises:
      ValueError: If the model has neither.
    """
    layers: list[int] = []
    first, number = model.first_layer, model.config.num_hidden_layers
    if model.prompt is not None:
        length, width = model.prompt.shape
        config = {
            "peft_type": "PROMPT_TUNING",
            "num_virtual_tokens": length,
            "token_dim": width,
        }
    elif targets := lora.adapted(model):
        rank, alpha = lora.sizes(model)
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": targets,
        }
        layers = lora.adapted_layers(model)
        if len(layers) < first + number:
            config |= {"layers_to_transform": [first + i for i in layers]}
    else:
        raise ValueError("model must have adapters or a soft prompt; got neither.")
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    config |= {"inference_mode": True}
    tensors: dict[str, np.ndarray] = {}
    for variable, views in _adapter_views(model, layers):
        tensors |= views(np.asarray(variable[...]))
    tensor_files.write(Path(folder), ADAPTER_CONFIG, config, ADAPTERS, tensors)


def _views(
    model: LanguageModel, path: tuple[str, ...], array: np.ndarray
) -> dict[str, np.ndarray]:
    """A parameter's tensors in a checkpoint, by name: one, or one for each layer.

    They are views of the parameter.
    """
    *modules, leaf = path
    parts, prefixes = [array], [model.PREFIX]
    if modules[0] == "layers":
        modules, parts = modules[1:], list(array)
        prefixes = [_prefix(model, i, modules[0]) for i in range(len(parts))]
    elif modules[0] == "lm_head":
        prefixes = [""]
    if leaf == "kernel":  # Checkpoints have its axes the other way round.
        parts = [part.T for part in parts]
    names = [
        ".".join([prefix, *modules, _LEAVES[leaf]]).lstrip(".") for prefix in prefixes
    ]
    return dict(zip(names, parts, strict=True))


def _prefix(model: LanguageModel, layer: int, module: str, within: str = "") -> str:
    """The prefix of the name of a module of one of the model's layers."""
    parent = model.PARENTS.get(module)
    number = model.first_layer + layer
    start = f"{model.PREFIX}{within}.layers.{number}"
    return start + (f".{parent}" if parent else "")


# --- Reading ----------------------------------------------------------------------


def read_config(folder: Path) -> Config:
    """The sizes of the model in a folder, and how its family computes."""
    path = model_file(folder, CONFIG)
    if gguf_file.is_gguf(folder):
        path, values = folder, gguf_model.config(gguf_model.read(folder))
    else:
        values = json_object(path)
    try:
        family = one_of(FAMILIES, "model_type", values.get("model_type"))
        return FAMILIES[family].from_dict(values)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


# Tensors by name.
_Stored = dict[str, Stored]


def _tensors(folder: Path, files: contextlib.ExitStack) -> _Stored:
    """Returns the tensors of a folder or a GGUF file, by their names in safetensors."""
    if gguf_file.is_gguf(folder):
        return gguf_model.tensors(gguf_model.read(folder))
    return _open(folder, "model*.safetensors", files)


def _open(folder: Path, pattern: str, files: contextlib.ExitStack) -> _Stored:
    """Returns the tensors of a folder, by name with the prefix `model.`.

    An index of shards is not read: the files themselves say what they hold.
    """
    stored: _Stored = {}
    for path in sorted(folder.glob(pattern)):
        model_file(folder, path.name)
        try:
            file = files.enter_context(safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(
                f"{path} must be a complete safetensors file: {error}."
            ) from None
        for original in file.keys():  # noqa: SIM118  (It is no mapping.)
            if original.endswith(_COMPUTED):
                continue
            if original.startswith(_OF_IMAGES):
                continue
            name = _text_name(original)
            found = file.get_slice(original)
            stored[name] = Stored(
                found.get_dtype(),
                tuple(found.get_shape()),
                functools.partial(operator.getitem, found),
            )
    if not stored:
        raise FileNotFoundError(
            f"{folder} must have {pattern.replace('*', '')}, or shards of it; got "
            "neither. "
            "transformers makes one of a PyTorch checkpoint by from_pretrained and "
            "save_pretrained."
        )
    return stored


def _text_name(name: str) -> str:
    """The name of a tensor in a model of texts alone, with the prefix `model.`."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def _shadow(variable: Any) -> np.ndarray:
    """An array of a variable's shape that takes no memory."""
    return np.broadcast_to(np.empty((), np.bool_), variable.shape)


def _check(views: dict[str, np.ndarray], stored: _Stored, folder: Path) -> None:
    """Raises if tensors are missing or do not fit their places."""
    for name, view in views.items():
        if name not in stored:
            raise ValueError(f"{folder} lacks the tensor {name}.")
        kind, got, *_ = stored[name]
        if got != view.shape or kind not in _FLOATS:
            raise ValueError(
                f"{folder}: tensor {name} must be of shape {view.shape} and floating "
                f"point ({', '.join(_FLOATS)}); got {got} and {kind}."
            )


def _fill(views: dict[str, np.ndarray], stored: _Stored) -> None:
    """Reads tensors into their places, and removes them."""
    for name, view in views.items():
        found = stored.pop(name)
        for part in _parts(len(view), 4 * math.prod(view.shape[1:])):
            view[part] = found.read(part)


def _check_empty(stored: _Stored, folder: Path) -> None:
    if stored:
        raise ValueError(f"{folder} has the unexpected tensor {min(stored)!r:.200}.")


def _read_adapter_config(folder: Path, model: LanguageModel) -> dict[str, Any]:
    path = model_file(folder, ADAPTER_CONFIG)
    config = json_object(path)
    sizes = {"LORA": ("r", "lora_alpha"), "PROMPT_TUNING": ("num_virtual_tokens",)}
    try:
        kind = one_of(sizes, "peft_type", config.get("peft_type"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    modules = config.get("target_modules")
    known = lora.projections(model)
    listed = isinstance(modules, list) and 0 < len(modules) <= len(known)
    valid = listed and all(isinstance(m, str) and m in known for m in modules)
    plain = not config.get("use_dora") and not config.get("use_rslora")
    if kind == "LORA" and not (valid and plain):
        raise ValueError(
            f"{path}: adapters must be plain ones of {', '.join(known)}; got "
            f"target_modules {modules!r:.80}, use_dora {config.get('use_dora')!r:.80} "
            f"and use_rslora {config.get('use_rslora')!r:.80}."
        )
    layers, number = config.get("layers_to_transform"), model.config.num_hidden_layers
    if layers is not None and not (
        isinstance(layers, list)
        and 0 < len(layers) <= number
        and all(type(i) is int and 0 <= i < number for i in layers)
    ):
        raise ValueError(
            f"{path}: layers_to_transform must be numbers of the {number} layers; got "
            f"{layers!r:.80}."
        )
    for name in sizes[kind]:
        value = config.get(name)
        whole = type(value) is int or (name == "lora_alpha" and type(value) is float)
        if not whole or not 0 < value < 2**31:
            raise ValueError(f"{path}: {name} must be positive; got {value!r:.80}.")
    return config


# --- Writing ----------------------------------------------------------------------


def _own_tensors(model: LanguageModel) -> dict[str, Tensor]:
    """The tensors of a model, as views of its parameters."""
    tensors: dict[str, np.ndarray] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if type(variable) is not nnx.Param:
            raise ValueError(
                "model must have no adapters and no soft prompt to be saved; got "
                f"{'.'.join(map(str, path))}."
            )
        tensors |= _views(model, path, np.asarray(variable[...]))

    def tensor(view: np.ndarray) -> Tensor:
        return Tensor(view.nbytes, lambda: view)

    return {name: tensor(view) for name, view in tensors.items()}


def _base_tensors(
    model: LanguageModel, base: Path, files: contextlib.ExitStack
) -> dict[str, Tensor]:
    """The tensors of the model that a model's layers came from, not read yet."""
    stored, dtype = _tensors(base, files), jnp.dtype(model.dtype)
    if not hasattr(model, "lm_head"):
        stored.pop("lm_head.weight", None)  # Tied to the embeddings.

    def tensor(found: Stored) -> Tensor:
        size = math.prod(found.shape) * dtype.itemsize
        return Tensor(size, lambda: found.read(slice(None)).astype(dtype, copy=False))

    return {name: tensor(found) for name, found in stored.items()}


def _save(
    tensors: Mapping[str, Tensor], config: Config, dtype: Any, folder: Path
) -> None:
    """Writes a checkpoint, and removes the tensors of one that is there."""
    entries = config.to_dict() | {"torch_dtype": str(jnp.dtype(dtype))}
    tensor_files.write_model(folder, CONFIG, entries, tensors)


def _adapter_views(
    model: LanguageModel, layers: Iterable[int]
) -> Iterator[tuple[nnx.Variable, Callable[[np.ndarray], dict[str, np.ndarray]]]]:
    """Yields what was tuned, and the parts of an array like it by their names in peft.

    Args:
      model: A model with adapters or a soft prompt.
      layers: The indices of the model's layers that have adapters in the file.
    """
    if model.prompt is not None:
        yield model.prompt, lambda array: {"prompt_embeddings": array}
        return
    for name in lora.adapted(model):
        adapter = getattr(model.layers, name).lora
        for matrix, variable in (("A", adapter.lora_a), ("B", adapter.lora_b)):
            parts = functools.partial(adapter_parts, model, name, matrix, layers)
            yield variable, parts


def adapter_parts(
    model: LanguageModel,
    name: str,
    matrix: str,
    layers: Iterable[int],
    array: np.ndarray,
) -> dict[str, np.ndarray]:
    """The matrices of an adapter, [layers, in, out], by their names in peft."""
    # Only a part of the model that has the adapters in peft.
    within = ".language_model" if getattr(model.config, "multimodal", False) else ""
    names = {i: f"{_prefix(model, i, name, within)}.{name}" for i in layers}
    return {
        f"base_model.model.{module}.lora_{matrix}.weight": array[i].T
        for i, module in names.items()
    }
