"""Checkpoints in Hugging Face's format, by those that transformers wrote."""

import json
import pathlib
import shutil
import tracemalloc

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from radazo_llm.formats import load as loading
from radazo_llm.formats import save as saving
from radazo_llm.formats import tensor_files
from radazo_llm.models import lora

from .. import tiny
from ..tiny import arrays, contents

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "opt"
NAMES = ["norm_before", "norm_before_sharded"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, dtype, tmp_path):
    first = loading.load(GOLDEN / name, dtype=dtype)
    saving.save(first, tmp_path / "a")
    second = loading.load(tmp_path / "a", dtype=dtype)
    saving.save(second, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(contents(tmp_path / "a")) == 2
    one, two = arrays(first), arrays(second)
    assert one.keys() == two.keys()
    assert all(one[path].tobytes() == two[path].tobytes() for path in one)


@pytest.mark.parametrize("name", NAMES)
def test_saves_the_tensors_that_transformers_saved(name, tmp_path):
    saving.save(loading.load(GOLDEN / name, dtype=jnp.float32), tmp_path)
    expected = load_file(GOLDEN / "norm_before" / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == expected.keys() - {"lm_head.weight"}
    for key, tensor in saved.items():
        np.testing.assert_array_equal(tensor, expected[key])


def test_a_large_model_is_saved_in_shards(tmp_path, monkeypatch):
    """The golden shards are of transformers, of at most as many bytes."""
    monkeypatch.setattr(tensor_files, "_MAX_SHARD", 60_000)
    model = loading.load(GOLDEN / "norm_before", dtype=jnp.float32)
    saving.save(model, tmp_path)
    found, expected = (
        json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
        for folder in (tmp_path, GOLDEN / "norm_before_sharded")
    )
    assert found["metadata"]["total_size"] == expected["metadata"]["total_size"]
    assert found["weight_map"].keys() == expected["weight_map"].keys()
    files = set(found["weight_map"].values())
    assert {path.name for path in tmp_path.glob("*.safetensors")} == files
    assert len(files) == len(set(expected["weight_map"].values()))
    for file in files:
        tensors = load_file(tmp_path / file)
        assert {found["weight_map"][name] for name in tensors} == {file}
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 60_000
    again = loading.load(tmp_path, dtype=jnp.float32)
    chex.assert_trees_all_equal(arrays(again), arrays(model))


def test_the_tensors_of_one_file_are_in_memory_at_a_time(tmp_path, monkeypatch):
    size = 2**20
    monkeypatch.setattr(tensor_files, "_MAX_SHARD", size)
    tensor = tensor_files.Tensor(size, lambda: np.ones((1024, 256), np.float32))
    tracemalloc.start()
    try:
        tensors = {str(i): tensor for i in range(4)}
        saving._save(tensors, tiny.CONFIG, "float32", tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    assert peak < 1.5 * size


def copied(name, to):
    shutil.copytree(GOLDEN / name, to)
    return to


def rewritten(change, to, name="norm_before"):
    """A copy of a golden checkpoint whose tensors ``change`` has changed in place."""
    copied(name, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


EMBEDDING = "model.decoder.embed_tokens.weight"


@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_names_as_they_have_been_published(prefixed, head, tmp_path):
    def change(tensors):
        if head:
            tensors["lm_head.weight"] = tensors[EMBEDDING].copy()
        for name in list(tensors):
            if not prefixed:
                tensors[name.removeprefix("model.")] = tensors.pop(name)

    folder = rewritten(change, tmp_path / "opt")
    expected = arrays(loading.load(GOLDEN / "norm_before"))
    found = arrays(loading.load(folder))
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value)


def missing(tensors):
    del tensors["model.decoder.layers.1.fc1.weight"]


def misshaped(tensors):
    name = "model.decoder.layers.1.fc1.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)


def unexpected(tensors):
    tensors["model.decoder.layers.2.fc1.weight"] = np.zeros((64, 32), np.float32)


def quantized(tensors):
    tensors[EMBEDDING] = tensors[EMBEDDING].astype(np.int8)


BAD_TENSORS = {
    missing: "lacks the tensor model.decoder.layers.1.fc1.weight.$",
    misshaped: r"layers.1.fc1.weight must be of shape \(64, 32\) .*; got \(32, 64\)",
    unexpected: "has the unexpected tensor 'model.decoder.layers.2.fc1.weight'.$",
    quantized: "embed_tokens.weight must be .* floating point .*; got .* I8",
}


@pytest.mark.parametrize("change", BAD_TENSORS, ids=lambda change: change.__name__)
def test_bad_tensors(change, tmp_path):
    folder = rewritten(change, tmp_path / "opt")
    with pytest.raises(ValueError, match=BAD_TENSORS[change]) as error:
        loading.load(folder)
    assert "\n" not in str(error.value)


def truncated(folder):
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def emptied(folder):
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


def shard_gone(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


def tensors_gone(folder):
    for path in folder.glob("*.safetensors"):
        path.unlink()


def config_gone(folder):
    (folder / "config.json").unlink()


def config_no_object(folder):
    (folder / "config.json").write_text("[]", "utf-8")


def config_not_text(folder):
    (folder / "config.json").write_bytes(b"\xff")


BAD_FILES = {
    truncated: (ValueError, "00002.safetensors must be a complete safetensors file"),
    emptied: (ValueError, "00001-of.* must be a complete safetensors file"),
    shard_gone: (ValueError, "must have all files that .*; got no model-00002-of"),
    tensors_gone: (FileNotFoundError, "must have model.safetensors, or shards of it"),
    config_gone: (FileNotFoundError, "config.json"),
    config_no_object: (ValueError, "config.json must be a JSON object: it is a list"),
    config_not_text: (ValueError, "config.json must be .* can't decode byte"),
}


@pytest.mark.parametrize("change", BAD_FILES, ids=lambda change: change.__name__)
def test_bad_files(change, tmp_path):
    kind, message = BAD_FILES[change]
    folder = copied("norm_before_sharded", tmp_path / "opt")
    change(folder)
    with pytest.raises(kind, match=message) as error:
        loading.load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("old", NAMES)
def test_saving_replaces_what_was_there(old, tmp_path):
    folder, new = copied(old, tmp_path / "opt"), tiny.model()
    (folder / "tokenizer.json").write_text("{}", "utf-8")
    (folder / "logits.npz").unlink(missing_ok=True)
    saving.save(new, folder)
    saving.save(new, tmp_path / "new")
    assert contents(folder) == contents(tmp_path / "new") | {"tokenizer.json": b"{}"}


def test_adapters_have_no_place_in_a_checkpoint(tmp_path):
    opt = tiny.model()
    lora.add_lora(opt, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="model must have no adapters and no blocks"):
        saving.save(opt, tmp_path / "opt")
    assert not (tmp_path / "opt").exists()
