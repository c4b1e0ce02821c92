"""Adapters, as `peft` reads and writes them."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from radazo_llm.formats import names, stored, tensor_files
from radazo_llm.formats.files import json_object, model_file
from radazo_llm.formats.load import Folder
from radazo_llm.models import lora
from radazo_llm.models.model import LanguageModel, one_of

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"


def load(model: LanguageModel, folder: Folder) -> None:
    """Adds the adapters that `peft` wrote, or `save`.

    Args:
      model: A model without adapters, changed in place.
      folder: Holds `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
      FileNotFoundError: If a file is not there.
      ValueError: If the files are damaged, or hold anything but plain adapters of
        projections of the model.
    """
    folder = Path(folder)
    config = _read_config(folder, model)
    layers = _adapted(config, model, folder)

    def add(model: LanguageModel) -> LanguageModel:
        rngs = nnx.Rngs(0)  # What is drawn is replaced.
        sizes = {"rank": config["r"], "alpha": config["lora_alpha"]}
        lora.add_lora(model, **sizes, targets=config["target_modules"], rngs=rngs)
        return model

    with contextlib.ExitStack() as files:
        found = stored.opened(folder, FILE, files)
        # As in `load.load`, before any memory is taken.
        for variable, views in _views(nnx.eval_shape(add, model), layers):
            stored.check(views(stored.shadow(variable.shape)), found, folder)
        for variable, views in _views(add(model), layers):
            host = np.zeros(variable.shape, np.float32)
            stored.fill(views(host), found, folder)
            variable[...] = jnp.asarray(host)
    stored.check_empty(found, folder)


def save(model: LanguageModel, folder: Folder, *, base: str) -> None:
    """Writes adapters as `peft.PeftModel.from_pretrained` reads them.

    Args:
      model: A model with adapters.
      folder: The folder to write; it is made if it is not there.
      base: The name or folder of the base model, written to the configuration.

    Raises:
      ValueError: If the model has none.
    """
    targets = lora.adapted(model)
    if not targets:
        raise ValueError("model must have adapters; got none.")
    first, number = model.first_layer, model.config.num_hidden_layers
    layers, (rank, alpha) = lora.adapted_layers(model), lora.sizes(model)
    config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
    config["target_modules"] = targets
    if len(layers) < first + number:
        config["layers_to_transform"] = [first + i for i in layers]
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    config |= {"inference_mode": True}
    tensors: dict[str, np.ndarray] = {}
    for variable, views in _views(model, layers):
        tensors |= views(np.asarray(variable[...]))
    tensor_files.write(Path(folder), CONFIG, config, FILE, tensors)


def _read_config(folder: Path, model: LanguageModel) -> dict[str, Any]:
    path = model_file(folder, CONFIG)
    config = json_object(path)
    try:
        one_of({"LORA": ""}, "peft_type", config.get("peft_type"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    modules = config.get("target_modules")
    known = lora.projections(model)
    listed = isinstance(modules, list) and 0 < len(modules) <= len(known)
    valid = listed and all(isinstance(m, str) and m in known for m in modules)
    plain = not config.get("use_dora") and not config.get("use_rslora")
    if not (valid and plain):
        raise ValueError(
            f"{path}: adapters must be plain ones of {', '.join(known)}; got "
            f"target_modules {modules!r:.80}, use_dora {config.get('use_dora')!r:.80} "
            f"and use_rslora {config.get('use_rslora')!r:.80}."
        )
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        whole = type(value) is int or (name == "lora_alpha" and type(value) is float)
        if not whole or not 0 < value < 2**31:
            raise ValueError(f"{path}: {name} must be positive; got {value!r:.80}.")
    lora.check_rank(model, config["r"], modules, f"{path}: r")
    return config


def _adapted(config: dict[str, Any], model: LanguageModel, folder: Path) -> list[int]:
    """Returns the indices of the model's layers that have adapters in the file.

    The file counts from the first layer of the whole model. A divided model has only
    the last ones.
    """
    given = config.get("layers_to_transform")
    first, number = model.first_layer, model.config.num_hidden_layers
    layers = list(range(first + number)) if given is None else given
    if not (
        isinstance(layers, list)
        and 0 < len(layers) <= number
        and all(type(i) is int and first <= i < first + number for i in layers)
    ):
        which = f"the last {number} layers" if first else f"the {number} layers"
        shown = "null, which are all layers" if given is None else f"{given!r:.80}"
        raise ValueError(
            f"{model_file(folder, CONFIG)}: layers_to_transform must be numbers of "
            f"{which}; got {shown}."
        )
    return [i - first for i in layers]


def _views(
    model: LanguageModel, layers: Iterable[int]
) -> Iterator[tuple[nnx.Variable, Callable[[np.ndarray], dict[str, np.ndarray]]]]:
    """Yields what was tuned, and the parts of an array like it by their names in peft.

    Args:
      model: A model with adapters.
      layers: The indices of the model's layers that have adapters in the file.
    """
    for name in lora.adapted(model):
        adapter = getattr(model.layers, name).lora
        for matrix, variable in (("A", adapter.lora_a), ("B", adapter.lora_b)):
            parts = functools.partial(names.of_adapter, model, name, matrix, layers)
            yield variable, parts
