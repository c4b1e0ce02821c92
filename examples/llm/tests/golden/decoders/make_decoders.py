"""Writes a tiny random checkpoint of each family, and its logits.

transformers gives them. The tests need neither it nor PyTorch; to make the files anew:

    pip install torch transformers
    python tests/golden/decoders/make_decoders.py
"""

import pathlib
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

HERE = pathlib.Path(__file__).parent
SIZES = {
    "vocab_size": 29,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,  # Not the width, divided among the heads.
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = {"sliding_window": 4, "query_pre_attn_scalar": 9}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_tied_scaled": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_parameters": LLAMA_3,
    },
    "qwen2": {"model_type": "qwen2", "hidden_size": 16},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "gemma": {"model_type": "gemma"},
    "gemma2": {"model_type": "gemma2"}
    | WINDOW
    | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    "gemma3_text": {"model_type": "gemma3_text"}
    | WINDOW
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "linear",
                "factor": 8.0,
                "rope_theta": 1000.0,
            },
        },
    },
}


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """A model of a family, all parameters at random."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**SIZES | CASES[name])
    config._attn_implementation = "eager"  # That of soft caps.
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too, which start as ones and zeros.
            parameter.add_(0.5 * torch.randn_like(parameter))
            # So few digits that the files are small.
            parameter.copy_(parameter.bfloat16().float())
    return model


def computed(model: PreTrainedModel, tokens: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(tokens).logits.numpy()


def main() -> None:
    for seed, name in enumerate(CASES):
        model = tiny(name, seed)
        tokens = torch.randint(SIZES["vocab_size"], (1, 16))
        logits = computed(model, tokens)
        model.bfloat16().save_pretrained(HERE / name)
        np.savez_compressed(
            HERE / name / "logits.npz",
            tokens=tokens.numpy().astype(np.int32),
            logits=logits,
        )
        (HERE / name / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
