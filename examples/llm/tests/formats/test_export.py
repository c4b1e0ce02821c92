"""Tuned models in the formats of Hugging Face's libraries.

The authority is `peft`: files in golden/peft that it wrote, and if it is installed,
its own reading of the exported files.
"""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from radazo_llm.formats import adapters
from radazo_llm.formats import load as loading
from radazo_llm.formats import save as saving
from radazo_llm.models import lora

from .. import tiny

_GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
_BASE = _GOLDEN / "opt" / "norm_before"
_LORA = _GOLDEN / "peft" / "lora"


def _logits():
    return np.load(_LORA / "logits.npz")


def _tuned():
    """Our model with the adapters that peft has in its file."""
    model = loading.load(_BASE, dtype=jnp.float32)
    adapters.load(model, _LORA)
    return model


def test_tuned_logits_are_those_of_peft():
    expected = _logits()
    logits = tiny.logits(_tuned(), expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


def test_files_are_those_that_peft_writes(tmp_path):
    adapters.save(_tuned(), tmp_path, base="norm_before")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    found = load_file(tmp_path / "adapter_model.safetensors")
    expected = load_file(_LORA / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert tensor.dtype == expected[key].dtype
        np.testing.assert_array_equal(tensor, expected[key], key)
    ours, theirs = (
        json.loads((folder / "adapter_config.json").read_text("utf-8"))
        for folder in (tmp_path, _LORA)
    )
    assert ours == {key: theirs[key] for key in ours}
    # What peft cannot take from its defaults.
    needed = {"peft_type", "task_type", "base_model_name_or_path"}
    needed |= {"r", "lora_alpha", "target_modules"}
    assert needed <= ours.keys()


def _changed(change, to):
    """A copy of what peft wrote, its configuration changed."""
    folder = shutil.copytree(_LORA, to)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), "utf-8")
    return folder


_BAD_ADAPTERS = {
    "kind": ({"peft_type": "IA3"}, "peft_type must be one of LORA; .*'IA3'"),
    "modules": (
        {"target_modules": ["fc9"]},
        "plain ones of fc1, .*; got .*'fc9'",
    ),
    "layers": ({"layers_to_transform": [2]}, "numbers of the 2 layers; got"),
    "dora": ({"use_dora": True}, "must be plain ones .*use_dora True"),
    "rank": ({"r": 0}, "r must be positive; got 0"),
    "shape": ({"r": 2}, r"lora_A.weight must be of shape \(2, 32\)"),
    "prompt": ({"peft_type": "PROMPT_TUNING"}, "must be one of LORA; got"),
}


@pytest.mark.parametrize("case", _BAD_ADAPTERS)
def test_bad_adapters(case, tmp_path):
    change, message = _BAD_ADAPTERS[case]
    model = loading.load(_BASE, dtype=jnp.float32)
    with pytest.raises(ValueError, match=message):
        adapters.load(model, _changed(change, tmp_path / "adapters"))


def test_a_merged_model_is_the_adapted_one(tmp_path):
    base = _BASE
    expected = _logits()
    saving.merged(_tuned(), tmp_path, base=base)
    merged = loading.load(tmp_path, dtype=jnp.float32)
    np.testing.assert_allclose(
        tiny.logits(merged, expected["tokens"]), expected["logits"], rtol=0, atol=1e-4
    )
    # Nothing but the adapted matrices is another than in the base.
    before, after = (
        load_file(folder / "model.safetensors") for folder in (base, tmp_path)
    )
    changed = {k for k in after if (after[k] != before[k]).any()}
    assert len(changed) == 4
    assert all(k.endswith(("q_proj.weight", "v_proj.weight")) for k in changed)
    before, after = (
        json.loads((folder / "config.json").read_text("utf-8"))
        for folder in (base, tmp_path)
    )
    for name in ("pad", "bos", "eos"):
        assert after[f"{name}_token_id"] == before[f"{name}_token_id"]


def test_merging_rounds_to_the_dtype_of_the_model():
    model = loading.load(_GOLDEN / "opt" / "norm_before")
    before = np.asarray(model.layers.q_proj.kernel[...], np.float64)
    lora.add_lora(model, rank=3, alpha=6.0, rngs=nnx.Rngs(0))
    adapter = model.layers.q_proj.lora
    b = jax.random.normal(jax.random.key(0), adapter.lora_b.shape)
    adapter.lora_b[...] = b
    a = np.asarray(adapter.lora_a[...], np.float64)
    expected = before + 2 * np.einsum("lir,lro->lio", a, np.asarray(b, np.float64))
    kernel = lora.merge(model).layers.q_proj.kernel[...]
    assert kernel.dtype == jnp.bfloat16
    # Eight bits: half a unit in the last place, and a bit for float32's rounding.
    np.testing.assert_allclose(
        np.asarray(kernel, np.float64), expected, rtol=2**-8, atol=1e-6
    )


def test_a_model_that_has_no_adapters_cannot_leave_as_adapters(tmp_path):
    model = loading.load(_GOLDEN / "opt" / "norm_before")
    with pytest.raises(ValueError, match="model must have adapters; got none"):
        adapters.save(model, tmp_path / "out", base="")
    assert not (tmp_path / "out").exists()
