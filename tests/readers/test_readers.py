"""Files that somebody else may have written: read right, or refused in one line."""

import ast
import functools
import json
import math
import os
import pathlib
import shutil
import struct
import tracemalloc
import zipfile
import zlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.common import record
from examples.llm import data, generate, main, weights
from examples.paper import network

from . import fuzz, targets
from .mutate import DEPTH, PICKLE
from .targets import TARGETS

ROOT = pathlib.Path(__file__).parents[2]
# Reading them takes a part of a second each.
LONG = {
    *("safetensors", "safetensors of a decoder", "adapters", "checkpoint"),
    "journal with right checksums",
}
DEEP = b"[" * DEPTH + b"]" * DEPTH
DEEP_OBJECT = b'{"a":' * DEPTH + b"1" + b"}" * DEPTH


def refused(read, *arguments, match, kind=ValueError):
    with pytest.raises(kind, match=match) as error:
        read(*arguments)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in LONG])
def test_changed_files_are_read_right_or_refused(name):
    """`python -m tests.readers --files 100000` tries more."""
    counts, _ = fuzz.run(name, 40)
    assert sum(counts.values()) == 40
    assert not [found for found in counts if found.startswith("failed")]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_more_changed_files_are_read_right_or_refused(name):
    counts, _ = fuzz.run(name, 40 if name in LONG else 1500, seed=1)
    assert not [found for found in counts if found.startswith("failed")]


# Pickles.


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n == "checkpoint" else n
        for n in TARGETS
    ],
)
def test_no_reader_reads_a_pickle(name, tmp_path):
    """A planted one would end this process."""
    target = TARGETS[name]
    target.make(tmp_path)
    right = target.read(tmp_path)
    for path in sorted(tmp_path.glob(target.files)):
        if path.is_file():
            content = path.read_bytes()
            path.write_bytes(PICKLE)
            found = fuzz.outcome(name, tmp_path, right)
            # Some of the files beside a checkpoint are not needed to read it.
            assert found == "refused" or (name, found) == ("checkpoint", "same")
            path.write_bytes(content)


def test_arrays_of_objects_are_refused(tmp_path):
    arrays = {f"{a}_{b}": np.array([None]) for a in "xy" for b in ("train", "test")}
    np.savez(tmp_path / "mnist.npz", **arrays)
    refused(network.load, tmp_path / "mnist.npz", match="allow_pickle=False")


_PICKLES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "torch"}


def unpickles(path):
    """The calls in a file that may read a pickle."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr="load" | "loads"):
                if module in _PICKLES:
                    yield module
            case ast.ImportFrom(module=module) if module in _PICKLES:
                yield module
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield "allow_pickle"


def test_no_code_reads_a_pickle():
    files = [*(ROOT / "radazo_jax").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert not {str(path): [*unpickles(path)] for path in files if [*unpickles(path)]}


# JSON.


@pytest.mark.parametrize("content", [DEEP, DEEP_OBJECT], ids=["lists", "objects"])
def test_deep_json_is_refused(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    refused(record.read, path, match="config.json must be a JSON object: maximum recur")
    refused(weights.read_config, tmp_path, match="must be a JSON object: maximum recur")
    refused(data.copa, path, match="config.json:1: must be a JSON object with the text")
    for name in ("tokenizer.json", "vocab.json"):
        (tmp_path / "merges.txt").touch()
        path.rename(tmp_path / name)
        refused(data.load_tokenizer, tmp_path, match="merges.txt, that can be read")
        (tmp_path / name).rename(path)


def test_a_file_of_json_is_read_up_to_a_size(tmp_path):
    path = tmp_path / "record.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # Without taking space on the disk.
    refused(record.read, path, match="it has more than 67108864 bytes")


# Models.


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(targets.OPT, folder)
    return folder


@pytest.fixture
def decoder(tmp_path):
    folder = tmp_path / "decoder"
    shutil.copytree(targets.DECODER, folder)
    return folder


def with_entries(folder, change, name="config.json"):
    path = folder / name
    values = json.loads(path.read_text("utf-8")) | change
    path.write_text(json.dumps(values), "utf-8")
    return folder


def takes_no_memory(read, *arguments, match):
    tracemalloc.start()
    try:
        refused(read, *arguments, match=match)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_hidden_layers": 10**9}, "config.json says 1000000000 layers"),
        ({"num_hidden_layers": 10**18}, "num_hidden_layers must be .* below 2"),
        ({"vocab_size": 10**9}, r"embed_tokens.weight must be of shape \(1000000000, "),
        ({"vocab_size": 10**12}, "vocab_size must be a positive integer below 2"),
        ({"ffn_dim": 2**31 - 1}, r"fc1.bias must be of shape \(2147483647,"),
        ({"model_type": "a\nb"}, "model_type must be one of opt, "),
    ],
    ids=str,
)
def test_sizes_that_no_file_has_take_no_memory(change, match, model):
    weights.read_config(targets.OPT)
    takes_no_memory(weights.load, with_entries(model, change), match=match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most"),
        ({"num_hidden_layers": 10**18}, "num_hidden_layers must be .* below 2"),
        (
            {"num_hidden_layers": 40, "layer_types": None},
            "config.json says 40 layers",
        ),
        ({"vocab_size": 10**9}, r"embed_tokens.weight must be of shape \(1000000000, "),
        ({"intermediate_size": 2**31 - 1}, "_proj.weight must be of .*2147483647"),
        ({"head_dim": 2**30}, "num_attention_heads × head_dim must be .* below 2"),
    ],
    ids=str,
)
def test_sizes_that_no_decoder_has_take_no_memory(change, match, decoder):
    weights.read_config(targets.DECODER)
    takes_no_memory(weights.load, with_entries(decoder, change), match=match)


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
    weights.read_config(decoder)
    match = f"config.json: .*({'|'.join(change)}|_attention|rope_type|hidden_act) must"
    refused(weights.read_config, with_entries(decoder, change), match=match)


def test_ranks_that_no_adapters_have_take_no_memory(tmp_path):
    model = weights.load(targets.OPT)
    shutil.copytree(targets.ADAPTERS, tmp_path / "lora")
    folder = with_entries(tmp_path / "lora", {"r": 2**31 - 1}, "adapter_config.json")
    match = r"lora_A.weight must be of shape \(2147483647, 32\)"
    takes_no_memory(weights.load_adapters, model, folder, match=match)
    weights.load_adapters(model, targets.ADAPTERS)  # It is as it was.


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters_that_are_links_are_refused(name, tmp_path):
    folder = shutil.copytree(targets.ADAPTERS, tmp_path / "lora")
    shutil.move(folder / name, tmp_path)
    (folder / name).symlink_to(tmp_path / name)
    read = functools.partial(weights.load_adapters, weights.load(targets.OPT))
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
    refused(weights.load, model, match="must be a complete safetensors file")


def test_an_index_of_shards_points_nowhere(model, tmp_path):
    """It is not read: what lies outside of the folder cannot be named."""
    outside = tmp_path / "outside.safetensors"
    shutil.move(model / "model.safetensors", outside)
    names = load_file(outside)
    for target in ("../outside.safetensors", str(outside)):
        index = {"weight_map": dict.fromkeys(names, target)}
        path = model / "model.safetensors.index.json"
        path.write_text(json.dumps(index), "utf-8")
        with pytest.raises(FileNotFoundError, match="must have model"):
            weights.load(model)


FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("relative", [True, False])
def test_links_to_another_folder_are_refused(name, relative, model, tmp_path):
    (model / "tokenizer.json").touch()
    outside = tmp_path / "outside"
    shutil.move(model / name, outside)
    (model / name).symlink_to("../outside" if relative else outside)
    read = data.load_tokenizer if name == "tokenizer.json" else weights.load
    refused(read, model, match=f"{name} must not be a link to another folder; got")


def test_hugging_faces_cache_is_read(model, tmp_path):
    """Where a model's files are links to `blobs`."""
    cache = tmp_path / "models--facebook--opt"
    folder = cache / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for i, name in enumerate(("config.json", "model.safetensors")):
        shutil.move(model / name, cache / "blobs" / f"{i}")
        (folder / name).symlink_to(f"../../blobs/{i}")
    assert weights.load(folder).config == weights.load(targets.OPT).config


def test_a_tokenizer_of_another_model_is_refused(model, tmp_path):
    """Its ids would be read from rows that the embeddings do not have."""
    vocab = {"</s>": 0, "<pad>": 1, "a": 4294967295}
    (model / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (model / "merges.txt").write_text("#version: 0.2\n", "utf-8")
    targets.write_sst2(tmp_path)
    task = data.TASKS["sst2"]
    refused(main.read, task, tmp_path, model, match="ids below .*; got 4294967295")


def test_tokens_of_another_model_are_refused():
    """A prompt's, though no example has them."""
    model = weights.load(targets.OPT)
    size = model.config.vocab_size
    told = generate.generate(model, [size - 1, size], key=jax.random.key(0))
    refused(next, told, match=f"ids below the model's vocab_size .*; got {size}")


CHATS = {
    "config.json": ({"eos_token_id": [1, [2]]}, "eos_token_id must be ids; got"),
    "generation_config.json": ({"eos_token_id": "2"}, "eos_token_id must be ids; got"),
    "tokenizer_config.json": (
        {"chat_template": "{{ 1 / 0 }}"},
        "the chat template cannot be rendered: division by zero",
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_what_a_chat_reads_is_refused_in_one_line(name, tmp_path):
    values, match = CHATS[name]
    path = tmp_path / name
    path.write_text(json.dumps(values), "utf-8")
    refused(targets.chat, tmp_path, match=match)
    path.write_bytes(DEEP_OBJECT)
    refused(targets.chat, tmp_path, match="must be a JSON object: maximum recursion")
    outside = path.rename(tmp_path.parent / f"{tmp_path.name}.json")
    path.symlink_to(outside)
    refused(targets.chat, tmp_path, match="must not be a link to another folder; got")


# Images.


def test_images_that_are_larger_than_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "_LARGEST", 4000)
    path = tmp_path / "mnist.npz"
    for count, behind, match in (
        (10**15, 100, "Unable to allocate"),
        (10**7, 100, "cannot reshape|EOF"),
        (0, 1001, "it holds more than 4000 bytes"),
    ):
        array = {"descr": "|u1", "fortran_order": False, "shape": (count, 28, 28)}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name in ("x_train", "y_train", "x_test", "y_test"):
                with file.open(f"{name}.npy", "w") as stream:
                    np.lib.format.write_array_header_1_0(stream, array)
                    stream.write(bytes(behind))
        refused(network.load, path, match=f"--data must be mnist.npz.*({match})")


def test_labels_that_are_none_are_refused(tmp_path):
    path, images = tmp_path / "mnist.npz", np.zeros((2, 28, 28), np.uint8)
    for labels in ([0, 10], [0, -1], [0], [[0, 1]], [0.5, 1]):
        np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=[0, 1])
        refused(network.load, path, match="a label from 0 to 9 for each image")


# Checkpoints.


@pytest.mark.slow
@pytest.mark.parametrize("relative", [True, False])
def test_parts_of_a_checkpoint_lie_in_it(relative, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    targets.write_checkpoint(folder)
    targets.read_checkpoint(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    for i, path in enumerate(files):
        outside = tmp_path / str(i)
        shutil.move(path, outside)
        to = os.path.relpath(outside, path.parent) if relative else outside
        path.symlink_to(to)
        refused(targets.read_checkpoint, folder, match="must not be a link to another")
        path.unlink()
        shutil.move(outside, path)
    targets.read_checkpoint(folder)


@pytest.mark.slow
def test_notes_that_were_changed_are_found(tmp_path):
    targets.write_checkpoint(tmp_path)
    path = tmp_path / "7" / "about" / "metadata"
    content = path.read_text("utf-8")
    assert content.count("0.25") == 1
    path.write_text(content.replace("0.25", "0.75"), "utf-8")
    match = "the checksum of its settings is another one"
    refused(targets.read_checkpoint, tmp_path, match=match)


# Journals.


def lines_of(path):
    return [line.rpartition(b',"crc":"')[0] for line in path.read_bytes().splitlines()]


def with_checksums(bodies):
    checksum, content = 0, b""
    for body in bodies:
        checksum = zlib.crc32(body, checksum)
        content += body + b',"crc":"%08x"}\n' % checksum
    return content


STEP = b'{"step":0,"values":[1,2,3,4],"params":"00000000","seconds":1'
JOURNALS = {
    "a step of 10^18": [STEP.replace(b"0", b"1000000000000000000", 1)],
    "a step that is text": [STEP.replace(b"0", b'"0"', 1)],
    "a long number": [STEP.replace(b"0", b"9" * 5000, 1)],
    "deep": [b'{"a":' + DEEP],
    "no object": [b"[1"],
    "no values": [b'{"step":0,"params":"0","seconds":1'],
    "values that are none": [STEP.replace(b"[1,2,3,4]", b"1")],
    "values that are text": [STEP.replace(b"1,2", b'"x",2')],
    "too many values": [STEP.replace(b"[1,", b"[1,1,")],
    "a checksum of numbers": [STEP.replace(b'"00000000"', b"0")],
    "more than a step has": [STEP + b',"more":1'],
}


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("journal")
    targets.write_journal(folder)
    return folder / "run.jsonl"


@pytest.mark.parametrize("steps", JOURNALS.values(), ids=JOURNALS)
def test_steps_that_no_run_writes_are_refused(steps, journal, tmp_path):
    """Though their checksums are right."""
    head, *_ = lines_of(journal)
    (tmp_path / "run.jsonl").write_bytes(with_checksums([head, *steps]))
    match = "is damaged in line 2: it is not what a run writes"
    refused(targets.replay, tmp_path, match=match)


@pytest.mark.parametrize(
    "change",
    [
        (b'"key":[0,0]', b'"key":[0]'),
        (b'"key":[0,0]', b'"key":[0,99999999999999999999]'),
        (b'"key":[0,0]', b'"key":"ab"'),
        (b'"key":[0,0]', b'"none":0'),
        (b'"float32"', b'"object"'),
        (b'"float32"', b'"nonsense"'),
        (b'"points":', b'"none":'),
    ],
    ids=lambda change: change[1].decode(),
)
def test_runs_that_cannot_be_are_refused(change, journal, tmp_path):
    head, *steps = lines_of(journal)
    first, _, last = head.rpartition(change[0])
    assert first
    (tmp_path / "run.jsonl").write_bytes(
        with_checksums([first + change[1] + last, *steps])
    )
    match = "is damaged in line 1: it is not what a run writes"
    refused(targets.replay, tmp_path, match=match)


@pytest.mark.parametrize("before", [b"", None], ids=["alone", "after a run"])
@pytest.mark.parametrize("content", [b"the only copy", PICKLE], ids=["text", "pickle"])
def test_what_is_no_journal_is_not_overwritten(before, content, journal, tmp_path):
    """A line without an end was cut off, whatever it was."""
    path = tmp_path / "run.jsonl"
    before = journal.read_bytes() if before is None else before
    path.write_bytes(before + content)
    refused(targets.write_journal, tmp_path, match="it is not what a run writes")
    assert path.read_bytes() == before + content


def test_a_line_that_does_not_end_takes_bounded_memory(tmp_path):
    path = tmp_path / "run.jsonl"
    with path.open("wb") as file:
        file.truncate(2**36)  # Without taking space on the disk.
    tracemalloc.start()
    try:
        refused(targets.replay, tmp_path, match="it is not what a run writes")
        assert tracemalloc.get_traced_memory()[1] < 1 << 30
    finally:
        tracemalloc.stop()
