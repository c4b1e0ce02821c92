"""Writes random adapters of the tiny OPT checkpoints by `peft`.

The logits belong to the adapted model. The tests need neither PyTorch nor peft; to
make the files anew:

    pip install torch transformers peft
    python tests/golden/peft/make_peft.py
"""

import pathlib

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
OPT = HERE.parent / "opt"
CASES = {
    "lora": (
        "norm_before",
        LoraConfig(
            task_type="CAUSAL_LM",
            r=3,
            lora_alpha=6.0,
            target_modules=["q_proj", "v_proj"],
        ),
    ),
}


def make(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    base, config = CASES[name]
    model = AutoModelForCausalLM.from_pretrained(OPT / base, dtype=torch.float32)
    model = get_peft_model(model, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn_like(parameter))
        tokens = torch.randint(model.config.vocab_size, (2, 20))
        logits = model(tokens).logits
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(HERE / name)
    np.savez_compressed(
        HERE / name / "logits.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.numpy(),
    )


def main() -> None:
    for seed, name in enumerate(CASES):
        make(name, seed)
    for path in HERE.glob("*/README.md"):
        path.unlink()


if __name__ == "__main__":
    main()
