"""The OPT decoder, by what transformers computed, and what is tuned of it."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core

import radazo_jax as zo
from radazo_llm.formats import load as loading
from radazo_llm.models import lora
from radazo_llm.models import opt as model

from .. import tables, tiny
from ..tables import computed_sizes, slow
from ..tiny import TOKENS, logits

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "opt"


# --- Logits -----------------------------------------------------------------------


def golden(name):
    return np.load(GOLDEN / name.removesuffix("_sharded") / "logits.npz")


@pytest.mark.parametrize("name", ["norm_before", "norm_before_sharded"])
def test_logits_are_those_of_transformers(name):
    expected = golden(name)
    opt = loading.load(GOLDEN / name, dtype=jnp.float32)
    found = logits(opt, expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-4)


def test_logits_in_bfloat16():
    expected = golden("norm_before")
    found = logits(loading.load(GOLDEN / "norm_before"), expected["tokens"])
    assert found.dtype == jnp.float32
    # Eight bits, through a dozen roundings of values of the size of the logits.
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=12 * 2**-8 * 2)


def test_padding_on_the_right_changes_nothing():
    opt = tiny.model()
    padded = np.pad(TOKENS[:, :6], [(0, 0), (0, 4)], constant_values=1)
    np.testing.assert_allclose(
        logits(opt, padded)[:, :6], logits(opt, TOKENS[:, :6]), rtol=1e-5, atol=1e-6
    )


def test_logits_only_where_they_are_needed():
    opt = tiny.model()
    hidden = tables.jit(lambda opt: opt.hidden(TOKENS))(opt)
    np.testing.assert_allclose(
        opt.logits(hidden[:, 3]), logits(opt)[:, 3], rtol=1e-5, atol=1e-6
    )


def test_more_tokens_than_positions():
    opt = tiny.model()
    with pytest.raises(ValueError, match=r"at most 32 .*max_position_embeddings.*33"):
        jax.eval_shape(opt, jax.ShapeDtypeStruct((1, 33), jnp.int32))


# --- Sizes ------------------------------------------------------------------------


def test_what_a_configuration_leaves_out_is_the_default():
    config = model.Config.from_dict({"model_type": "opt", "hidden_size": 1536})
    assert config.hidden_size == 1536
    assert config.num_hidden_layers == 12


BAD_CONFIGS = {
    "architecture": ({"model_type": None}, "model_type must be .*; got None"),
    "activation": (
        {"activation_function": "gelu"},
        "activation_function must be 'relu'; got 'gelu'",
    ),
    "untied": (
        {"tie_word_embeddings": False},
        "tie_word_embeddings must be True; got False",
    ),
    "heads": ({"num_attention_heads": 5}, r"must divide hidden_size \(32\); got 5"),
    "type": (
        {"ffn_dim": "64"},
        "ffn_dim must be a positive integer .*; got '64'",
    ),
    "norms": (
        {"do_layer_norm_before": False},
        "do_layer_norm_before must be True; got False",
    ),
    "width": ({"word_embed_proj_dim": 16}, "word_embed_proj_dim must be 32; got 16"),
    "sign": (
        {"num_hidden_layers": 0},
        "num_hidden_layers must be a positive integer below .*; got 0",
    ),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configurations(name, tmp_path):
    change, message = BAD_CONFIGS[name]
    good = json.loads((GOLDEN / "norm_before" / "config.json").read_text("utf-8"))
    with pytest.raises(ValueError, match=message):
        model.Config.from_dict(good | change)
    (tmp_path / "config.json").write_text(json.dumps(good | change), "utf-8")
    with pytest.raises(ValueError, match=f"config.json: .*{message}") as error:
        loading.load(tmp_path)
    assert "\n" not in str(error.value)


# --- What is tuned ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [slow(jnp.float32), jnp.bfloat16])
def test_adapters_change_nothing_at_first(dtype):
    opt = tiny.model(dtype)
    before = logits(opt)
    lora.add_lora(opt, rank=2, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(logits(opt), before)
    adapters = nnx.state(opt, lora.FILTERS["lora"])
    shapes = [leaf.shape for leaf in jax.tree.leaves(adapters)]
    assert shapes == [(2, 16, 2), (2, 2, 16)] * 2
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(adapters))


def test_adapters_are_a_change_of_the_matrices():
    rank, alpha = 2, 6.0
    adapted, merged = tiny.model(), tiny.model()
    lora.add_lora(adapted, rank=rank, alpha=alpha, rngs=nnx.Rngs(1))
    for name in ("q_proj", "v_proj"):
        adapter = getattr(adapted.layers, name).lora
        b = 0.1 * jax.random.normal(jax.random.key(0), adapter.lora_b.shape)
        adapter.lora_b[...] = b
        kernel = getattr(merged.layers, name).kernel
        kernel[...] += alpha / rank * jnp.einsum("lir,lro->lio", adapter.lora_a[...], b)
    np.testing.assert_allclose(logits(adapted), logits(merged), rtol=1e-4, atol=1e-5)


def test_bad_adapters():
    opt = tiny.model()
    for rank in (0, 17):
        with pytest.raises(
            ValueError, match=f"--lora-rank must be from 1 .*; got {rank}"
        ):
            lora.add_lora(opt, rank=rank, rngs=nnx.Rngs(0))
    lora.add_lora(opt, rank=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="model must not have adapters already"):
        lora.add_lora(opt, rngs=nnx.Rngs(0))


# --- What a perturbed evaluation builds -------------------------------------------


DEEP = model.Config(
    vocab_size=10_000,
    hidden_size=256,
    num_hidden_layers=16,
    ffn_dim=1024,
    num_attention_heads=2,
    max_position_embeddings=200,
)


@pytest.mark.parametrize("what", ["hidden", slow("logits")])
@pytest.mark.parametrize("distribution", ["gaussian", "low_rank", slow("rademacher")])
def test_a_perturbed_evaluation_builds_no_more_than_a_layer(distribution, what):
    abstract = nnx.eval_shape(lambda: model.OPT(DEEP, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(abstract)
    tokens = TOKENS[:, :4]

    def fun(params):
        opt = nnx.merge(graphdef, params)
        return jnp.sum(opt(tokens) if what == "logits" else opt.hidden(tokens))

    largest = max(computed_sizes(fun, getattr(zo, distribution)(), params))
    table = DEEP.vocab_size * DEEP.hidden_size
    matrix = DEEP.hidden_size * DEEP.ffn_dim
    # A dense draw makes two words for each number. The logits need the whole table,
    # but not with directions of low rank, and look-ups never do.
    if what == "hidden":
        assert largest[0] <= 2 * matrix, largest
    else:
        assert (
            largest[0] < table
            if distribution == "low_rank"
            else largest[0] <= 2 * table
        )


def test_the_program_has_no_constants_of_the_size_of_parameters():
    graphdef, params = nnx.split(tiny.model())
    jaxpr = jax.make_jaxpr(lambda p: nnx.merge(graphdef, p)(TOKENS))(params)
    assert isinstance(jaxpr, core.ClosedJaxpr)
    assert all(np.size(c) <= TOKENS.size for c in jaxpr.consts)
