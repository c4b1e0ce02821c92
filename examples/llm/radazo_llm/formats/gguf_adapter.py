"""LoRA adapters in GGUF, as llama.cpp loads them (`--lora FILE`)."""

import os
from pathlib import Path

import numpy as np

from radazo_llm.formats import gguf_model
from radazo_llm.models import lora
from radazo_llm.models.model import LanguageModel


def check(model_type: str) -> str:
    """Returns llama.cpp's name for a family.

    Raises:
      ValueError: If it has none.
    """
    names = {hf: name for name, hf in gguf_model.ARCHITECTURES.items()}
    names["mistral"] = "llama"
    if model_type not in names:
        raise ValueError(
            f"--export-gguf must be given with a model of {', '.join(names)}; got "
            f"{model_type}."
        )
    return names[model_type]


def save(model: LanguageModel, path: Path) -> None:
    """Writes a model's adapters.

    Args:
      model: A model with adapters, of a family that llama.cpp has.
      path: The file. Its folder is made if there is none.

    Raises:
      ValueError: If the model has no adapters, or llama.cpp not its family.
    """
    import gguf  # Here, since few runs need it.

    family = check(model.config.to_dict()["model_type"])
    if not lora.adapted(model):
        raise ValueError("model must have adapters; got none.")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Complete when it gets its name.
    partial = path.with_name(f"{path.name}.partial")
    writer = gguf.GGUFWriter(partial, family)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, lora.sizes(model)[1])
    names = {ours: name for name, ours in gguf_model.layer_names(family).items()}
    heads = {
        "q_proj": model.config.num_attention_heads,
        "k_proj": model.config.num_key_value_heads,
    }
    for name in lora.adapted(model):
        adapter = getattr(model.layers, name).lora
        a, b = np.asarray(adapter.lora_a[...]), np.asarray(adapter.lora_b[...])
        module = names[f"{model.PARENTS[name]}.{name}"]
        for i in lora.adapted_layers(model):
            rows = b[i].T
            if family in gguf_model.PERMUTED and name in heads:
                rows = gguf_model.permuted(heads[name], rows)
            for part, matrix in (("a", a[i].T), ("b", rows)):
                writer.add_tensor(
                    f"blk.{model.first_layer + i}.{module}.weight.lora_{part}",
                    np.ascontiguousarray(matrix, np.float32),
                )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, path)
