"""Writes tiny random OPT checkpoints and the logits that transformers gives for them.

The tests need neither PyTorch nor transformers; to make the files anew:

    pip install torch transformers
    python tests/golden/opt/make_opt.py
"""

import pathlib

import numpy as np
import torch
from transformers import OPTConfig, OPTForCausalLM

HERE = pathlib.Path(__file__).parent
SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
VARIANTS = {
    "norm_before": {},
    "norm_after": {"do_layer_norm_before": False},
    "projected": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "plain_norms": {"layer_norm_elementwise_affine": False, "enable_bias": False},
    "no_final_norm": {"_remove_final_layer_norm": True},
}
SHARDED = "norm_before"


def make(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    config = OPTConfig(**SIZES, **VARIANTS[name], dropout=0.0)
    model = OPTForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too, which start as ones and zeros.
            parameter.add_(0.1 * torch.randn_like(parameter))
        tokens = torch.randint(SIZES["vocab_size"], (2, 24))
        logits = model(tokens).logits
    model.save_pretrained(HERE / name)
    if name == SHARDED:
        model.save_pretrained(HERE / f"{name}_sharded", max_shard_size="60KB")
    np.savez_compressed(
        HERE / name / "logits.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.numpy(),
    )


def main() -> None:
    for seed, name in enumerate(VARIANTS):
        make(name, seed)
    for path in HERE.glob("*/generation_config.json"):
        path.unlink()


if __name__ == "__main__":
    main()
