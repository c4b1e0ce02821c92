"""The last layers of a model, on cached outputs of the others."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from radazo_llm.formats import adapters, gguf_adapter, gguf_file
from radazo_llm.formats import load as loading
from radazo_llm.formats import save as saving
from radazo_llm.models import lora
from radazo_llm.run.log import Log
from radazo_llm.tune import frozen
from radazo_llm.tune.job import tuned

from .. import tiny
from ..models.test_decoder import loaded
from ..tables import every

MODELS = {
    "opt": tiny.model,
    "llama": lambda: loaded("llama"),
    # Its layers have other rotary positions and windows than each other.
    "gemma3_text": lambda: loaded("gemma3_text"),
}
# Queries and keys are permuted in the first, and heads are tied in the last.
BASES = {
    "gguf": "gguf/llama.gguf",
    "llama_tied_scaled": "decoders/llama_tied_scaled",
    "gemma3_text": "decoders/gemma3_text",
    "opt": "opt/norm_before_sharded",
}
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12)


def outputs(first, folder):
    batch = tiny.examples(2, 1)._replace(tokens=TOKENS[:, None])
    return frozen.outputs(first, batch, folder, "x", batch_size=2).tokens[:, 0]


@pytest.mark.parametrize("name", every(MODELS, "llama"))
@pytest.mark.slow
def test_the_last_layers_on_outputs_of_the_first_are_the_model(name, tmp_path):
    expected = tiny.logits(MODELS[name](), TOKENS)
    first, last = frozen.split(MODELS[name](), 1)
    lora.add_lora(last, rank=2, rngs=nnx.Rngs(0))
    found = tiny.logits(last, outputs(first, tmp_path))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    b = last.layers.q_proj.lora.lora_b
    b[...] = jax.random.normal(jax.random.key(1), b.shape)
    tuned = tiny.logits(last, outputs(first, tmp_path))
    assert np.abs(tuned - expected).max() > 1e-3
    saving.save(MODELS[name](), tmp_path / "base")
    adapters.save(last, tmp_path / "adapters", base="")
    adapted = MODELS[name]()
    adapters.load(adapted, tmp_path / "adapters")
    assert lora.adapted_layers(adapted) == [1]
    _, again = frozen.split(MODELS[name](), 1)
    adapters.load(again, tmp_path / "adapters")
    continued = tiny.logits(again, outputs(first, tmp_path))
    np.testing.assert_array_equal(continued, tuned)
    saving.merged(last, tmp_path / "merged", base=tmp_path / "base")
    merged = loading.load(tmp_path / "merged", dtype=jnp.float32)
    for whole in adapted, merged:
        np.testing.assert_allclose(tiny.logits(whole, TOKENS), tuned, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "shown"), [(None, "null, which are all layers."), ([0], r"\[0\]")]
)
def test_adapters_of_other_layers_do_not_begin_a_run(layers, shown, tmp_path):
    model = MODELS["llama"]()
    lora.add_lora(model, rank=2, rngs=nnx.Rngs(0))
    b = model.layers.q_proj.lora.lora_b
    b[...] = jax.random.normal(jax.random.key(1), b.shape)
    adapters.save(model, tmp_path, base="")
    config = json.loads((tmp_path / adapters.CONFIG).read_text())
    config["layers_to_transform"] = layers
    (tmp_path / adapters.CONFIG).write_text(json.dumps(config))
    _, last = frozen.split(MODELS["llama"](), 1)
    message = f"layers_to_transform must be numbers of the last 1 layers; got {shown}"
    with pytest.raises(ValueError, match=message):
        adapters.load(last, tmp_path)


@pytest.mark.parametrize("name", every(BASES, "gguf"))
def test_last_layers_are_saved_with_the_layers_before_them(name, tmp_path):
    pytest.importorskip("gguf")
    base = tiny.GOLDEN / BASES[name]
    saving.merged(loading.load(base), tmp_path / "whole", base=base)
    _, last = frozen.split(loading.load(base), 1)
    saving.merged(last, tmp_path / "last", base=base)
    whole, found = (tiny.contents(tmp_path / name) for name in ("whole", "last"))
    assert {name: found[name] for name in whole} == whole


def test_rows_are_read_from_a_file_that_is_not_kept_mapped(tmp_path):
    values = np.arange(24, dtype=np.float16).reshape(6, 4).astype(jnp.bfloat16)
    values.tofile(tmp_path / "file.outputs")
    rows = frozen.Rows(tmp_path / "file.outputs", values.dtype, values.shape)
    assert rows.shape == values.shape
    for index in (slice(2), np.array([5, 1, 1]), (slice(None), 0)):
        np.testing.assert_array_equal(rows[index], values[index], strict=True)
        maps = pathlib.Path("/proc/self/maps")
        assert not maps.exists() or "file.outputs" not in maps.read_text("utf-8")


def test_adapters_for_llama_cpp_name_the_last_layers(tmp_path):
    pytest.importorskip("gguf")
    _, last = frozen.split(loading.load(tiny.GOLDEN / BASES["gguf"]), 1)
    lora.add_lora(last, rank=2, targets=["q_proj"], rngs=nnx.Rngs(0))
    gguf_adapter.save(last, tmp_path / "adapters.gguf")
    found = gguf_file.read(tmp_path / "adapters.gguf").tensors
    assert set(found) == {f"blk.1.attn_q.weight.lora_{part}" for part in "ab"}


def damaged(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def truncated(path):
    path.write_bytes(path.read_bytes()[:-4])


def gone(path):
    path.unlink()


@pytest.mark.parametrize("harm", [None, damaged, truncated, gone])
def test_outputs_are_computed_once_unless_their_file_is_damaged(
    harm, tmp_path, monkeypatch
):
    first, _ = frozen.split(tiny.model(), 1)
    before = np.array(outputs(first, tmp_path))
    (path,) = tmp_path.glob("*.outputs")
    if harm is not None:
        harm(path)
    written, write = [], frozen._write
    monkeypatch.setattr(
        frozen, "_write", lambda *args: (written.append(args), write(*args))
    )
    after = outputs(first, tmp_path)
    np.testing.assert_array_equal(after, before)
    assert len(written) == (harm is not None)


def test_the_first_layers_are_let_go_once_their_outputs_are_on_disk(tmp_path):
    before = jax.live_arrays()  # Kept, so that no other array gets their memory.

    def held():
        known = {id(array) for array in before}
        new = [array for array in jax.live_arrays() if id(array) not in known]
        buffers = {array.unsafe_buffer_pointer(): array.nbytes for array in new}
        return sum(buffers.values())

    model = tiny.model()
    whole, layers = held(), sum(x.nbytes for x in jax.tree.leaves(model.layers))
    settings = dataclasses.replace(SETTINGS, lora_rank=1)
    made = tuned(settings, model, (tiny.TRAIN, tiny.DEV), frozen_folder=tmp_path)
    adapters = sum(x.nbytes for x in jax.tree.leaves(made.job.params))
    del model
    assert made.parts.model(made.job.params).first_layer == 1
    assert held() < whole - layers / 2 + adapters + 10_000


@pytest.mark.parametrize("last", [0, 2, -1])
def test_a_part_must_be_smaller_than_the_model(last):
    with pytest.raises(ValueError, match=f"--last-layers must be from 1 to 1 .*{last}"):
        frozen.split(tiny.model(), last)


SETTINGS = dataclasses.replace(
    tiny.SETTINGS,
    last_layers=1,
    num_buckets=2,
    schedule="cosine",
    warmup_steps=2,
    learning_rate=1e-2,
)


@pytest.mark.slow
def test_a_run_of_the_last_layers_resumes_to_the_same_end(job, tmp_path, monkeypatch):
    splits = tiny.TRAIN, tiny.DEV, tiny.DEV
    one = dataclasses.replace(tiny.SETTINGS, num_steps=1)
    whole, _ = tiny.run(job, tmp_path / "whole", one, splits)
    uncut = tiny.run(job, tmp_path / "uncut", SETTINGS, splits)
    for name in ("train_loss", "dev_loss", "dev_accuracy", "test_loss"):
        assert uncut[0][name] == pytest.approx(whole[name], rel=1e-5)
    measured = ["test_loss" in row for row in uncut]
    assert measured == [True, False, False, True]
    write = Log.step

    def dying(self, step, values):
        write(self, step, values)
        if step == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Log, "step", dying)
        tiny.run(job, tmp_path / "cut", SETTINGS, splits)
    assert tiny.run(job, tmp_path / "cut", SETTINGS, splits, resume=True) == uncut
    name = "adapters/adapter_model.safetensors"
    one, two = ((tmp_path / n / name).read_bytes() for n in ("uncut", "cut"))
    assert one == two
