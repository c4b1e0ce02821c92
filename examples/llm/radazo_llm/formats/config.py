"""The configuration of a model: its sizes, and how its family computes."""

from pathlib import Path
from typing import Any

import jax

from radazo_llm.formats import gguf_file, gguf_model
from radazo_llm.formats.files import json_object, model_file
from radazo_llm.models import decoder, families, opt
from radazo_llm.models.model import Config, one_of

CONFIG = "config.json"
FAMILIES: dict[str, Any] = {"opt": opt.Config} | dict.fromkeys(
    families.FAMILIES | families.MULTIMODAL, decoder.Config
)


def default_dtype() -> str:
    """The dtype of models on the present backend."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def read(folder: Path) -> Config:
    """The configuration of the model in a folder or a GGUF file.

    Raises:
      FileNotFoundError: If the folder has none.
      ValueError: If it is damaged, or of a family that is not known.
    """
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
