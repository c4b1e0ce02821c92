"""Writes a tiny random checkpoint of each family, and its logits.

transformers gives them. The tests need neither it nor PyTorch; to make the files anew:

    pip install torch transformers
    python tests/golden/decoders/make_decoders.py
"""

import pathlib
import sys
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


CASES |= {
    "mistral": {"model_type": "mistral", "sliding_window": 4},
    "phi3": {"model_type": "phi3", "hidden_size": 16, "sliding_window": 5},
    "granite": {"model_type": "granite", "hidden_size": 16, "attention_bias": True}
    | {"embedding_multiplier": 3.0, "attention_multiplier": 0.3}
    | {"residual_multiplier": 0.4, "logits_scaling": 2.5},
    "olmo2": {"model_type": "olmo2", "hidden_size": 16},
    "smollm3": {"model_type": "smollm3", "hidden_size": 16, "no_rope_layers": [1, 0]},
}
TEXT = SIZES | CASES["gemma3_text"]
CASES["gemma3"] = {
    "model_type": "gemma3",
    "text_config": TEXT,
    "vision_config": {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    },
    "mm_tokens_per_image": 1,
}
LENGTHS = 5, 3, 8  # Of the prompts.
NEW = 6  # Tokens of a reply.


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """A model of a family, all parameters at random."""
    torch.manual_seed(seed)
    sizes = {} if "text_config" in CASES[name] else SIZES
    config = AutoConfig.for_model(**sizes | CASES[name])
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


def padded(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, np.ndarray]:
    """Logits of prompts that are padded on the left, and the likeliest replies."""
    rows = torch.zeros((len(LENGTHS), max(LENGTHS)), dtype=torch.long)
    mask = torch.zeros_like(rows)
    for i, length in enumerate(LENGTHS):
        rows[i, -length:], mask[i, -length:] = tokens[0, i : i + length], 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(rows, attention_mask=mask, position_ids=positions).logits
        replies = model.generate(
            rows,
            attention_mask=mask,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return {
        "padded_logits": found.numpy(),
        "replies": replies[:, max(LENGTHS) :].numpy().astype(np.int32),
    }


def main(names: list[str]) -> None:
    for seed, name in enumerate(CASES):
        if names and name not in names:
            continue
        model = tiny(name, seed)
        tokens = torch.randint(SIZES["vocab_size"], (1, 16))
        content = {"logits": computed(model, tokens)} | padded(model, tokens)
        model.bfloat16().save_pretrained(HERE / name)
        np.savez_compressed(
            HERE / name / "logits.npz",
            tokens=tokens.numpy().astype(np.int32),
            **content,
        )
        (HERE / name / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])  # Names of cases, or all.
