"""Matrices in 8 and 4 bits, and their adapters and scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from radazo_llm.formats import adapters
from radazo_llm.formats import save as saving
from radazo_llm.models import lora, quantization
from radazo_llm.models.decoder import Config
from radazo_llm.settings import Settings
from radazo_llm.tune.job import parts_of

from .. import tiny
from ..models.test_decoder import entries, loaded
from ..tables import slow


def matrices(model):
    """The quantized matrices of a model, by name, by NumPy in float64."""
    found = {}
    for name, child in [*nnx.iter_children(model.layers), *nnx.iter_children(model)]:
        if isinstance(child, quantization.QuantizedLinear):
            steps, scale = (
                np.asarray(leaf[...], np.float64)
                for leaf in (child.qvalue, child.scale)
            )
            repeats = steps.shape[-2] // scale.shape[-2]
            found[name] = steps * np.repeat(scale, repeats, axis=-2)
    return found


@pytest.mark.parametrize("qtype", ["int4", slow("int8")])
def test_logits_are_those_of_the_rounded_matrices(qtype):
    model, expected = loaded("qwen2"), loaded("qwen2")
    tokens = np.arange(12, dtype=np.int32)[None]
    quantization.quantize(model, qtype)
    rounded = matrices(model)
    assert len(rounded) == 8
    for name, matrix in rounded.items():
        owner = expected if name == "lm_head" else expected.layers
        getattr(owner, name).kernel[...] = jnp.asarray(matrix, jnp.float32)
    found = tiny.logits(model, tokens)
    np.testing.assert_allclose(found, tiny.logits(expected, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("inputs", "group", "note"),
    [
        (256, 128, None),
        (24, 24, None),
        (144, 72, "Groups of 72 of 144 inputs share a scale, because 128 does not"),
        (139, 139, "All 139 inputs share a scale, which rounds coarsely, because"),
    ],
)
def test_groups_are_as_large_as_they_can_be(inputs, group, note):
    config = Config.from_dict(entries("llama") | {"intermediate_size": inputs})
    model = nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0)))
    notes = quantization.notes(model)
    assert len(notes) == (note is not None)
    assert not notes or notes[0].startswith(note)

    def scale():
        model = config.build(rngs=nnx.Rngs(0))
        quantization.quantize(model, "int4")
        return model.layers.down_proj.scale[...]

    assert jax.eval_shape(scale).shape == (2, inputs // group, 8)


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["int4", "int8"])
def test_matrices_are_rounded_in_groups_of_inputs(qtype):
    config = Config.from_dict(entries("llama") | {"intermediate_size": 256})
    model = config.build(dtype=jnp.float32, rngs=nnx.Rngs(0))
    kernel = np.asarray(model.layers.down_proj.kernel[...], np.float64)
    quantization.quantize(model, qtype)
    down = model.layers.down_proj
    assert down.qvalue[...].dtype == jnp.dtype(qtype)
    largest = np.abs(kernel.reshape(2, 2, 128, 8)).max(axis=2)
    # The largest number of a group lies half a step outside, which uses all steps.
    steps = {"int4": 7.5, "int8": 127.5}[qtype]
    np.testing.assert_allclose(down.scale[...], largest / steps, rtol=1e-6)
    distance = np.abs(matrices(model)["down_proj"] - kernel).reshape(2, 2, 128, 8)
    assert (distance <= 0.5001 * (largest / steps)[:, :, None]).all()


@pytest.mark.parametrize("tune", [slow("lora"), "scales"])
def test_scales_are_float32_only_where_they_are_tuned(tune):
    settings = Settings(tune=tune, quantize="int4", lora_rank=2)
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it.
        _, params, rest = parts_of(settings, loaded("llama", jnp.bfloat16))
    both = nnx.merge_state(rest, params)
    scales = jax.tree.leaves(nnx.filter_state(both, quantization.QuantizationScale))
    expected = {"lora": jnp.bfloat16, "scales": jnp.float32}[tune]
    assert [scale.dtype for scale in scales] == [expected] * 8


@pytest.mark.slow
def test_a_run_of_scales_goes_down(tmp_path):
    settings = Settings(
        tune="scales",
        quantize="int4",
        distribution="low_rank",
        num_directions=4,
        learning_rate=0.002,
        batch_size=8,
        num_steps=30,
        eval_every=30,
    )
    folder = tiny.GOLDEN / "decoders" / "qwen3"
    batch = tiny.examples(8, 1)
    first, last = tiny.run(folder, tmp_path, settings, (batch, batch))
    assert last["dev_loss"] < first["dev_loss"] - 0.1
    assert not (tmp_path / "adapters").exists()


def test_a_quantized_model_has_no_place_in_a_checkpoint(tmp_path):
    model = loaded("llama")
    quantization.quantize(model, "int8")
    with pytest.raises(ValueError, match="model must have no adapters"):
        saving.save(model, tmp_path / "out")
    lora.add_lora(model, rank=2, rngs=nnx.Rngs(0))
    adapters.save(model, tmp_path / "adapters", base="llama")
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()
