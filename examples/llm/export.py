"""What was tuned, in the formats of Hugging Face's libraries.

`peft` loads adapters and soft prompts beside the model that they were tuned for;
`transformers` and `weights.load` read a model into which the adapters were merged.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from examples.llm import lora, weights
from examples.llm.model import OPT

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# What a folder of a model may hold beside the configuration and the tensors.
COMPANIONS = (
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)


def save_adapters(model: OPT, folder: Path, *, base: str) -> None:
    """Writes adapters or a soft prompt as `peft.PeftModel.from_pretrained` reads them.

    Args:
      model: A model with adapters or a soft prompt.
      folder: Where to write; it is made if it is not there.
      base: The name or folder of the model without them, for the configuration.

    Raises:
      ValueError: If the model has neither.
    """
    if model.prompt is not None:
        kind, tensors = _prompt(model)
    elif isinstance(model.layers.q_proj, lora.AdaptedLinear):
        kind, tensors = _adapters(model)
    else:
        raise ValueError("model must have adapters or a soft prompt, got neither.")
    common = {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    with weights.replacing(folder) as temporary:
        weights.write_tensors(tensors, temporary(ADAPTER))
        weights.write_json(temporary(ADAPTER_CONFIG), kind | common)


def _adapters(model: OPT) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    tensors = {}
    for name in lora.ADAPTED:
        adapter = getattr(model.layers, name).lora
        for matrix, stack in (("A", adapter.lora_a), ("B", adapter.lora_b)):
            for i, layer in enumerate(np.asarray(stack[...])):
                module = f"model.decoder.layers.{i}.self_attn.{name}"
                # PyTorch has the axes of a matrix the other way round.
                tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = (
                    np.ascontiguousarray(layer.T)
                )
    rank = adapter.lora_a.shape[-1]
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": getattr(model.layers, lora.ADAPTED[0]).scale * rank,
        "target_modules": list(lora.ADAPTED),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    return config, tensors


def _prompt(model: OPT) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    prompt = np.asarray(model.prompt[...])
    config = {
        "peft_type": "PROMPT_TUNING",
        "num_virtual_tokens": len(prompt),
        "token_dim": prompt.shape[1],
        "num_transformer_submodules": 1,
        "num_attention_heads": model.config.num_attention_heads,
        "num_layers": model.config.num_hidden_layers,
    }
    return config, {"prompt_embeddings": prompt}


def save_merged(model: OPT, folder: Path, *, base: Path) -> None:
    """Writes the model with its adapters merged into the weights, and a tokenizer.

    Args:
      model: The model, with adapters or tuned whole. It is consumed.
      folder: Where to write; it is made if it is not there.
      base: The folder that the model came from; its tokenizer is copied.

    Raises:
      ValueError: If the model has a soft prompt.
    """
    weights.save(lora.merge(model), folder)
    for name in COMPANIONS:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
