"""The decoders of all families, by what transformers computed."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import radazo_jax as zo
from radazo_llm.formats import load as loading
from radazo_llm.formats import save as saving
from radazo_llm.models import decode, decoder, lora

from .. import tables, tiny
from ..tables import computed_sizes, every, slow

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "decoders"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def golden(name):
    return np.load(GOLDEN / name / "logits.npz")


def loaded(name, dtype=jnp.float32):
    return loading.load(GOLDEN / name, dtype=dtype)


def entries(name):
    return json.loads((GOLDEN / name / "config.json").read_text("utf-8"))


@pytest.mark.parametrize(
    "name", every(CASES, "gemma3_text", "granite", "llama", "phi3", "qwen3")
)
def test_logits_are_those_of_transformers(name):
    expected = golden(name)
    found = tiny.logits(loaded(name), expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], rtol=1e-5, atol=1e-5)


LENGTHS = 5, 3, 8  # Of prompts that transformers got padded on the left.


@pytest.mark.parametrize("name", every(CASES, "olmo2", "smollm3"))
def test_padded_prompts_are_read_and_continued_as_by_transformers(name):
    expected, model = golden(name), loaded(name)
    prompts = np.zeros((3, max(LENGTHS)), np.int32)
    for i, length in enumerate(LENGTHS):
        prompts[i, :length] = expected["tokens"][0, i : i + length]

    @tables.jit
    def found(prompts):
        arguments = np.array(LENGTHS, np.int32), expected["replies"].shape[1]
        key = jax.random.key(0)
        replies = decode.generate_tokens(model, prompts, *arguments, key, 0)
        return model(prompts), replies.tokens

    logits, replies = found(prompts)
    for i, length in enumerate(LENGTHS):
        theirs = expected["padded_logits"][i, -length:]
        np.testing.assert_allclose(logits[i, :length], theirs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(replies, expected["replies"])


def text_part(name):
    """The tensors and the entries of a checkpoint, without images."""
    tensors = load_file(GOLDEN / name / "model.safetensors")
    config = entries(name)
    if "text_config" in config:
        inside = "language_model.model."
        tensors = {
            key.replace(inside, "model."): tensor
            for key, tensor in tensors.items()
            if key.startswith(inside)
        }
        config = config["text_config"]
    return tensors, config


@pytest.mark.parametrize("name", CASES)
def test_saves_the_tensors_that_transformers_saved(name, tmp_path):
    saving.save(loading.load(GOLDEN / name), tmp_path)
    expected, config = text_part(name)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == expected.keys()
    for key, tensor in saved.items():
        np.testing.assert_array_equal(tensor, expected[key], key)
    written = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert written.items() >= config.items()


def test_a_computed_tensor_of_old_files_is_left_out(tmp_path):
    folder = shutil.copytree(GOLDEN / "llama", tmp_path / "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {name: np.ones(2)}, folder / "model.safetensors")
    assert loading.load(folder).config.hidden_size == 8
    save_file(tensors | {"other": np.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="unexpected tensor 'other'"):
        loading.load(folder)


# --- Configurations ---------------------------------------------------------------

# As published before transformers 5, which has all of RoPE in `rope_parameters`.
OLD = {
    "llama_tied_scaled": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {"rope_theta": 10000.0, "use_sliding_window": False, "sliding_window": 9},
    "gemma3_text": {
        "rope_theta": 1000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    },
}


@pytest.mark.parametrize("name", OLD)
def test_old_configurations_mean_the_same(name):
    new = entries(name)
    dropped = {"rope_parameters", "layer_types", "_sliding_window_pattern"}
    old = {k: v for k, v in new.items() if k not in dropped} | OLD[name]
    one, two = map(decoder.Config.from_dict, (old, new))
    assert one.rope == two.rope
    assert one.windows == two.windows


BAD_CONFIGS = {
    "family": ({"model_type": "mamba"}, "model_type must be one of .*; got 'mamba'"),
    "heads": ({"num_key_value_heads": 3}, "multiple of num_key_value_heads.* 4, 3 and"),
    "odd head": ({"head_dim": 5}, "head_dim even; got 4, 2 and 5"),
    "size": (
        {"vocab_size": None},
        "vocab_size must be a positive integer below .*; got None",
    ),
    "activation": ({"hidden_act": "relu"}, "hidden_act must be one of .* got 'relu'"),
    "bias": ({"mlp_bias": True}, "mlp_bias must be False; got True"),
    "epsilon": ({"rms_norm_eps": "1"}, "rms_norm_eps must be a positive.*; got '1'"),
    "rope": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
        "rope_type must be one of default, linear, llama3.*; got 'yarn'",
    ),
    "theta": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
        "rope_theta must be a positive number; got -1.0",
    ),
    "part": (
        {"model_type": "gemma3", "text_config": 1},
        "text_config must be an object; got 1",
    ),
    "positions": (
        {"model_type": "smollm3", "no_rope_layers": [2, 0]},
        "no_rope_layers must have 0 or 1 for each of 2 layers",
    ),
    "rotated": (
        {"model_type": "phi3", "partial_rotary_factor": 0.75},
        "partial_rotary_factor must be 1, of the whole head; got 0.75",
    ),
    "layers": ({"layer_types": ["sliding"]}, "layer_types must have .* for each of 2"),
    "window": (
        {"layer_types": ["sliding_attention"] * 2},
        "sliding_window must be a positive integer below .*; got None",
    ),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configurations(name):
    change, message = BAD_CONFIGS[name]
    with pytest.raises(ValueError, match=message):
        decoder.Config.from_dict(entries("llama") | change)


# --- What is computed -------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_of_some_tokens_are_those_of_all(name):
    """A model with its own head, and one with tied embeddings and a soft cap."""
    model = loaded(name)
    assert model.config.tie_word_embeddings == (name == "gemma2")
    hidden = 5 * np.random.default_rng(0).standard_normal((3, model.config.hidden_size))
    tokens = np.array([[1, 7], [0, 0], [5, 2]], np.int32)
    expected = np.take_along_axis(np.asarray(model.logits(hidden)), tokens, axis=1)
    np.testing.assert_allclose(model.logits_of(hidden, tokens), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["gemma3_text", pytest.param("gemma2", marks=pytest.mark.slow)]
)
def test_token_by_token_is_all_at_once(name):
    # Twelve tokens are three times what a layer of these sees.
    model, tokens = loaded(name), golden(name)["tokens"][:, :12]
    graphdef, state = nnx.split(model)

    @tables.jit
    def step(state, tokens, start, cache):
        merged = nnx.merge(graphdef, state)
        hidden, cache = merged.run(merged.embed(tokens), start, cache)
        return merged.logits(hidden), cache

    cache, rows = model.empty_cache(1, 16), []
    for i in range(12):
        logits, cache = step(state, tokens[:, i : i + 1], jnp.int32(i), cache)
        rows.append(logits[:, 0])
    expected = golden(name)["logits"][:, :12]
    np.testing.assert_allclose(np.stack(rows, 1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("distribution", [slow("gaussian"), "low_rank"])
def test_a_perturbed_evaluation_builds_no_more_than_a_layer(distribution):
    values = entries("qwen3") | {"num_hidden_layers": 16, "vocab_size": 10_000}
    values |= {"layer_types": None, "hidden_size": 256, "intermediate_size": 1024}
    config = decoder.Config.from_dict(values)
    abstract = nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(abstract)

    def fun(params):
        return jnp.sum(nnx.merge(graphdef, params).hidden(tiny.TOKENS[:, :4]))

    largest, _ = max(computed_sizes(fun, getattr(zo, distribution)(), params))
    assert largest <= 2 * 256 * 1024  # A dense draw makes two words for each number.


def test_adapters_fit_projections_that_are_not_square():
    def adapted():
        config = decoder.Config.from_dict(entries("qwen3"))
        model = config.build(rngs=nnx.Rngs(0))
        lora.add_lora(model, rank=2, rngs=nnx.Rngs(0))
        return model

    state = nnx.state(nnx.eval_shape(adapted), nnx.LoRAParam)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert shapes == [(2, 8, 2), (2, 2, 16), (2, 8, 2), (2, 2, 8)]
