"""Models, adapters and tokenizers that lie about themselves."""

import functools
import json
import math
import pathlib
import shutil
import struct

import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from radazo_llm.examples import tokens
from radazo_llm.formats import adapters, chat_template, config, tokenizers
from radazo_llm.formats import load as loading

from ..refusals import DEEP, DEEP_OBJECT, refused, takes_no_memory

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
OPT = GOLDEN / "opt" / "norm_before"
DECODER = GOLDEN / "decoders" / "gemma3_text"
ADAPTERS = GOLDEN / "peft" / "lora"


def chat(folder):
    """Reads of a model's folder what a chat needs."""
    chat_template.ends(folder, Tokenizer(models.BPE()))
    chat = chat_template.Chat([{"role": "user", "content": "a"}])
    return chat_template.load(folder).render([chat])


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(OPT, tmp_path / "model")


@pytest.fixture
def decoder(tmp_path):
    return shutil.copytree(DECODER, tmp_path / "decoder")


def with_entries(folder, change, name="config.json"):
    path = folder / name
    values = json.loads(path.read_text("utf-8")) | change
    path.write_text(json.dumps(values), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("base", "change", "match"),
    [
        (OPT, {"num_hidden_layers": 10**9}, "its configuration says 1000000000 layers"),
        (OPT, {"num_hidden_layers": 10**18}, "num_hidden_layers must be .* below 2"),
        (OPT, {"vocab_size": 10**9}, r"tokens.weight must be of shape \(1000000000, "),
        (OPT, {"vocab_size": 10**12}, "vocab_size must be a positive integer below 2"),
        (OPT, {"ffn_dim": 2**31 - 1}, r"fc1.bias must be of shape \(2147483647,"),
        (OPT, {"model_type": "a\nb"}, "model_type must be one of opt, "),
        (DECODER, {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most"),
        (
            DECODER,
            {"num_hidden_layers": 40, "layer_types": None},
            "its configuration says 40 layers",
        ),
        (DECODER, {"intermediate_size": 2**31 - 1}, "must be of .*2147483647"),
        (DECODER, {"head_dim": 2**30}, "num_attention_heads × head_dim must be .* bel"),
    ],
    ids=str,
)
def test_sizes_that_no_file_has_take_no_memory(base, change, match, tmp_path):
    config.read(base)
    folder = with_entries(shutil.copytree(base, tmp_path / "model"), change)
    takes_no_memory(loading.load, folder, match=match)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": ["llama"]},
        {"model_type": {}},
        {"num_key_value_heads": []},
        {"head_dim": 0},
        {"hidden_activation": ["silu"]},
        {"tie_word_embeddings": "false"},
        {"attention_bias": 1},
        {"layer_types": 2},
        {"layer_types": [["sliding_attention"], {}]},
        {"layer_types": None, "sliding_window_pattern": 0},
        {"layer_types": None, "sliding_window_pattern": "2"},
        {"model_type": "qwen2", "layer_types": None, "max_window_layers": None},
        {"sliding_window": "4"},
        {"query_pre_attn_scalar": -1},
        {"query_pre_attn_scalar": "9"},
        {"query_pre_attn_scalar": 10**400},
        {"attn_logit_softcapping": "50"},
        {"final_logit_softcapping": 0},
        {"rms_norm_eps": 10**400},
        {"rms_norm_eps": math.nan},
        {"rope_scaling": "linear"},
        {"rope_parameters": [1]},
        {"rope_parameters": {"full_attention": 1, "sliding_attention": 1}},
        {"rope_parameters": {"rope_type": [], "rope_theta": 1.0}},
    ],
    ids=lambda change: str(change)[:60],
)
def test_entries_that_no_decoder_has_are_refused(change, decoder):
    config.read(decoder)
    match = f"config.json: .*({'|'.join(change)}|_attention|rope_type|hidden_act) must"
    refused(config.read, with_entries(decoder, change), match=match)


def test_ranks_that_no_adapters_have_take_no_memory(tmp_path):
    model = loading.load(OPT)
    shutil.copytree(ADAPTERS, tmp_path / "lora")
    folder = with_entries(tmp_path / "lora", {"r": 2**31 - 1}, "adapter_config.json")
    match = "r must be from 1 to 32, the width of q_proj; got 2147483647"
    takes_no_memory(adapters.load, model, folder, match=match)
    adapters.load(model, ADAPTERS)  # It is as it was.


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters_that_are_links_are_refused(name, tmp_path):
    folder = shutil.copytree(ADAPTERS, tmp_path / "lora")
    shutil.move(folder / name, tmp_path)
    (folder / name).symlink_to(tmp_path / name)
    read = functools.partial(adapters.load, loading.load(OPT))
    refused(read, folder, match=f"{name} must not be a link to another folder; got")


def tensor(*shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def header(tensors, length=None):
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


SAFETENSORS = {
    "2^63": header({}, 2**63),
    "2^64": header({}, 2**64 - 1),
    "overlapping": header(
        {"a": tensor(2, offsets=[0, 8]), "b": tensor(2, offsets=[4, 12])}
    )
    + bytes(12),
    "the same bytes": header(
        {"a": tensor(2, offsets=[0, 8]), "b": tensor(2, offsets=[0, 8])}
    )
    + bytes(8),
    "a shape of 2^65": header({"a": tensor(2**62, 8, offsets=[0, 8])}) + bytes(8),
    "backwards": header({"a": tensor(2, offsets=[8, 0])}) + bytes(8),
    "behind the end": header({"a": tensor(2, offsets=[0, 8])}) + bytes(7),
    "deep": header(DEEP_OBJECT),
}


@pytest.mark.parametrize("content", SAFETENSORS.values(), ids=SAFETENSORS)
def test_headers_that_lie_are_refused(content, model):
    (model / "model.safetensors").write_bytes(content)
    refused(loading.load, model, match="must be a complete safetensors file")


def test_an_index_of_shards_points_nowhere(model, tmp_path):
    """It is not read: an index cannot name files outside of the folder."""
    outside = tmp_path / "outside.safetensors"
    shutil.move(model / "model.safetensors", outside)
    names = load_file(outside)
    for target in ("../outside.safetensors", str(outside)):
        index = {"weight_map": dict.fromkeys(names, target)}
        path = model / "model.safetensors.index.json"
        path.write_text(json.dumps(index), "utf-8")
        with pytest.raises(FileNotFoundError, match="must have model"):
            loading.load(model)


FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("relative", [True, False])
def test_links_to_another_folder_are_refused(name, relative, model, tmp_path):
    (model / "tokenizer.json").touch()
    outside = tmp_path / "outside"
    shutil.move(model / name, outside)
    (model / name).symlink_to("../outside" if relative else outside)
    read = tokenizers.load if name == "tokenizer.json" else loading.load
    refused(read, model, match=f"{name} must not be a link to another folder; got")


def test_hugging_faces_cache_is_read(model, tmp_path):
    """A model's files are links to `blobs` there."""
    cache = tmp_path / "models--facebook--opt"
    folder = cache / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for i, name in enumerate(("config.json", "model.safetensors")):
        shutil.move(model / name, cache / "blobs" / f"{i}")
        (folder / name).symlink_to(f"../../blobs/{i}")
    assert loading.load(folder).config == loading.load(OPT).config


def test_a_tokenizer_of_another_model_is_refused(model, tmp_path):
    """Its ids would be read from rows that the embeddings do not have."""
    vocab = {"</s>": 0, "<pad>": 1, "a": 4294967295}
    (model / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (model / "merges.txt").write_text("#version: 0.2\n", "utf-8")
    examples = [tokens.Example("a", ("a", "a"), 0)]
    read = functools.partial(tokens.encode, max_length=8, vocab_size=99)
    tokenizer = tokenizers.load(model)
    refused(read, tokenizer, examples, match="ids below .*; got 4294967295")


def test_weights_that_are_no_numbers_are_refused(model):
    tensors = load_file(model / "model.safetensors")
    name = "model.decoder.layers.1.fc1.weight"
    tensors[name][3, 4] = math.nan
    save_file(tensors, model / "model.safetensors")
    refused(loading.load, model, match=f"tensor {name} must be finite; got NaN")


@pytest.mark.parametrize("content", [DEEP, DEEP_OBJECT], ids=["lists", "objects"])
def test_deep_json_is_refused(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    refused(config.read, tmp_path, match="must be a JSON object: maximum recursion")
    for name in ("tokenizer.json", "vocab.json"):
        (tmp_path / "merges.txt").touch()
        path.rename(tmp_path / name)
        refused(tokenizers.load, tmp_path, match="merges.txt, that can be read")
        (tmp_path / name).rename(path)


CHATS = {
    "config.json": ({"eos_token_id": [1, [2]]}, "eos_token_id must be ids; got"),
    "generation_config.json": ({"eos_token_id": "2"}, "eos_token_id must be ids; got"),
    "tokenizer_config.json": (
        {"chat_template": "{{ 1 / 0 }}"},
        "the chat template cannot be rendered: ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_what_a_chat_reads_is_refused_in_one_line(name, tmp_path):
    values, match = CHATS[name]
    path = tmp_path / name
    path.write_text(json.dumps(values), "utf-8")
    refused(chat, tmp_path, match=match)
    path.write_bytes(DEEP_OBJECT)
    refused(chat, tmp_path, match="must be a JSON object: maximum recursion")
    outside = path.rename(tmp_path.parent / f"{tmp_path.name}.json")
    path.symlink_to(outside)
    refused(chat, tmp_path, match="must not be a link to another folder; got")
