"""The names of a model's parameters in checkpoints of transformers and peft."""

from collections.abc import Iterable

import numpy as np

from radazo_llm.models.model import LanguageModel

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


def views(
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


def of_text(name: str) -> str | None:
    """The name of a tensor in a model of texts alone; None if it is not part of it."""
    if name.endswith(_COMPUTED) or name.startswith(_OF_IMAGES):
        return None
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def of_adapter(
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


def _prefix(model: LanguageModel, layer: int, module: str, within: str = "") -> str:
    """The prefix of the name of a module of one of the model's layers."""
    parent = model.PARENTS.get(module)
    number = model.first_layer + layer
    start = f"{model.PREFIX}{within}.layers.{number}"
    return start + (f".{parent}" if parent else "")
