"""Writes a tiny random OPT checkpoint, whole and in shards, and its logits.

transformers gives them. The tests need neither it nor PyTorch; to make the files anew:

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
NAME = "norm_before"


def main() -> None:
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**SIZES, dropout=0.0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too, which start as ones and zeros.
            parameter.add_(0.1 * torch.randn_like(parameter))
        tokens = torch.randint(SIZES["vocab_size"], (2, 24))
        logits = model(tokens).logits
    model.save_pretrained(HERE / NAME)
    model.save_pretrained(HERE / f"{NAME}_sharded", max_shard_size="60KB")
    np.savez_compressed(
        HERE / NAME / "logits.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.numpy(),
    )
    for path in HERE.glob("*/generation_config.json"):
        path.unlink()


if __name__ == "__main__":
    main()
