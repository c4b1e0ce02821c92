"""Writes the tokens of texts by llama.cpp, for each name of a way to split text.

And the pieces of texts by the module `regex`, with the patterns that some models
publish. The tests need neither; to make the file anew:

    pip install xllamacpp regex
    python tests/golden/gguf/make_splits.py
"""

import json
import pathlib
import tempfile
import urllib.request

import gguf
import make_gguf
import numpy as np
import regex
import xllamacpp
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from radazo_llm.formats import gguf_splits

HERE = pathlib.Path(__file__).parent
SPECIAL = ["<|begin|>", "<|end|>"]
WHOLE = "Ġunbroken"  # A token that no merges make.
TEXTS = (
    "It's 2024, and I'LL pay $12345.67 (or 1,000)!!",
    "HTTPServer camelCase snake_case don't DON'T we've it's",
    "a  b   c\n\n d\t\te \r\n  f   ",
    "path/to/file.txt //comment\n/* x */ #!\n...\n\n!!/\n",
    "Straße Ünïcode ÉCOLE école Ωmega ПРИВЕТ мир",
    "中文和日本語カタカナ 한국어 ١٢٣ ⅷ½",
    "हिन्दी ไทย é नमस्ते_x",
    "🙂🙂 👩‍👩‍👧 — “quoted” …",
    "x=1;y+=2;z**3 <|x|> `a` ~b^c [d] {e}",
    "so unbroken. unbroken",
)
# As in `tokenizer.json` of Qwen 3.5, Mistral Nemo and Llama 4. In the last two,
# llama.cpp takes each letter but a-z for a capital one.
PUBLISHED = {
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?"
    r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}"
    r"\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}"
    r"\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}"
    r"\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}"
    r"\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s"
    r"\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges that join what any way to split text separates."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    # Of parts, too, so that merges do not depend on the beginning of a text.
    parts = [text[i:j] for text in TEXTS[:-1] for i in range(12) for j in (None, -i)]
    trained.train_from_iterator(parts, trainer)
    content = json.loads(trained.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    merges = [" ".join(pair) for pair in content["merges"]]
    return [*SPECIAL, *tokens, WHOLE], merges


def write(name: str, tokens: list[str], merges: list[str], path: pathlib.Path) -> None:
    """Writes a tiny random model with a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_block_count(make_gguf.LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(make_gguf.WIDTH)
    writer.add_feed_forward_length(make_gguf.INNER)
    writer.add_head_count(make_gguf.HEADS)
    writer.add_head_count_kv(make_gguf.KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, shape in make_gguf.shapes("llama", len(tokens)).items():
        writer.add_tensor(key, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenized(path: pathlib.Path) -> list[list[int]]:
    """The tokens of the texts by llama.cpp, with those that it adds."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup = str(path), 64, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    rows = []
    for text in TEXTS:
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize",
            json.dumps({"content": text, "add_special": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            rows.append(json.load(answer)["tokens"])
    return rows


def main() -> None:
    tokens, merges = vocabulary()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.gguf")
        for name in gguf_splits.SPLITS:
            write(name, tokens, merges, path)
            found[name] = tokenized(path)
    content = {"tokens": tokens, "merges": merges, "texts": TEXTS, "found": found}
    content["pieces"] = {
        name: [regex.findall(pattern, text) for text in TEXTS]
        for name, pattern in PUBLISHED.items()
    }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (HERE / "splits.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
