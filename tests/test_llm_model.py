"""The OPT decoder, its checkpoints and its adapters, by what transformers computed."""

import json
import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend import core
from safetensors.numpy import load_file, save_file
from test_perturb_zoo import LAWS, computed_sizes

import radazo_jax as zo
from examples.llm import lora, memory, model, weights
from radazo_jax._src.directions.layout import layout_of
from radazo_jax._src.perturb import axes

GOLDEN = pathlib.Path(__file__).parent / "golden" / "opt"
VARIANTS = ["norm_before", "norm_after", "projected", "plain_norms", "no_final_norm"]
FOLDERS = [*VARIANTS, "norm_before_sharded"]
SMALL = model.Config(
    vocab_size=101,
    hidden_size=16,
    num_hidden_layers=2,
    ffn_dim=64,
    num_attention_heads=2,
    max_position_embeddings=12,
)
TOKENS = np.arange(20, dtype=np.int32).reshape(2, 10)


def golden(name):
    return np.load(GOLDEN / name.removesuffix("_sharded") / "logits.npz")


def small(dtype=jnp.float32, **options):
    return model.OPT(SMALL, dtype=dtype, rngs=nnx.Rngs(0), **options)


def flat(module):
    return {
        path: np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(module))
    }


# --- Logits -----------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_transformers(name):
    expected = golden(name)
    opt = weights.load(GOLDEN / name, dtype=jnp.float32)
    logits = jax.jit(lambda tokens: opt(tokens))(expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_in_bfloat16(name):
    expected = golden(name)
    logits = weights.load(GOLDEN / name)(expected["tokens"])
    assert logits.dtype == jnp.float32
    # Eight bits, through a dozen roundings of values of the size of the logits.
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=12 * 2**-8 * 2)


def test_padding_on_the_right_changes_nothing():
    opt = small()
    padded = np.pad(TOKENS[:, :6], [(0, 0), (0, 4)], constant_values=1)
    np.testing.assert_allclose(
        opt(padded)[:, :6], opt(TOKENS[:, :6]), rtol=1e-5, atol=1e-6
    )


def test_logits_only_where_they_are_needed():
    opt = small()
    hidden = opt.hidden(TOKENS)
    np.testing.assert_allclose(
        opt.logits(hidden[:, 3]), opt(TOKENS)[:, 3], rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_gradients_with_layers_computed_anew_are_the_same():
    def gradient(opt):
        graphdef, params = nnx.split(opt)
        return jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(TOKENS) ** 2))(params)

    kept, anew = gradient(small()), gradient(small(remat=True))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), kept, anew
    )


def test_more_tokens_than_positions():
    opt = small()
    with pytest.raises(ValueError, match=r"at most 12 .*max_position_embeddings.*13"):
        jax.eval_shape(opt, jax.ShapeDtypeStruct((1, 13), jnp.int32))
    lora.add_prompt(opt, length=3, rngs=nnx.Rngs(0))
    assert opt(TOKENS[:, :9]).shape == (2, 9, 101)
    with pytest.raises(ValueError, match="at most 12 with the soft prompt"):
        opt(TOKENS)


# --- Sizes ------------------------------------------------------------------------

# As transformers counts the parameters of the published models.
PUBLISHED = {
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-2.7b": 2_651_596_800,
    "facebook/opt-6.7b": 6_658_473_984,
    "facebook/opt-13b": 12_853_473_280,
    "facebook/opt-30b": 29_974_540_288,
}


@pytest.mark.parametrize("name", model.CONFIGS)
def test_number_of_parameters(name):
    config = model.CONFIGS[name]
    opt = nnx.eval_shape(lambda: model.OPT(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(opt))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == PUBLISHED[name]
    assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)


@pytest.mark.parametrize("config", model.CONFIGS.values(), ids=list(model.CONFIGS))
def test_a_configuration_survives_json(config):
    values = json.loads(json.dumps(config.to_dict()))
    assert model.Config.from_dict(values) == config


def test_what_a_configuration_leaves_out_is_the_default():
    config = model.Config.from_dict({"model_type": "opt", "hidden_size": 1536})
    assert config.word_embed_proj_dim == 1536
    assert config.num_hidden_layers == 12


BAD_CONFIGS = {
    "architecture": ({"model_type": "llama"}, "model_type must be 'opt', got 'llama'"),
    "activation": ({"activation_function": "gelu"}, "must be 'relu'.*got 'gelu'"),
    "untied": ({"tie_word_embeddings": False}, "tie_word_embeddings must be true"),
    "heads": ({"num_attention_heads": 5}, "must divide hidden_size, got 5 and 32"),
    "type": ({"hidden_size": "32"}, "hidden_size must be of type int, got '32'"),
    "flag": ({"enable_bias": 1}, "enable_bias must be of type bool, got 1"),
    "sign": ({"num_hidden_layers": 0}, "num_hidden_layers must be positive, got 0"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configurations(name, tmp_path):
    change, message = BAD_CONFIGS[name]
    good = json.loads((GOLDEN / "norm_before" / "config.json").read_text("utf-8"))
    with pytest.raises(ValueError, match=message):
        model.Config.from_dict(good | change)
    (tmp_path / "config.json").write_text(json.dumps(good | change), "utf-8")
    with pytest.raises(ValueError, match=f"config.json: .*{message}") as error:
        weights.load(tmp_path)
    assert "\n" not in str(error.value)


# --- Checkpoints ------------------------------------------------------------------


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("max_shard_bytes", [2**30, 20_000, 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FOLDERS)
def test_round_trip(name, dtype, max_shard_bytes, tmp_path):
    first = weights.load(GOLDEN / name, dtype=dtype)
    weights.save(first, tmp_path / "a", max_shard_bytes=max_shard_bytes)
    second = weights.load(tmp_path / "a", dtype=dtype)
    weights.save(second, tmp_path / "b", max_shard_bytes=max_shard_bytes)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(contents(tmp_path / "a")) == 2 or max_shard_bytes < 2**30
    one, two = flat(first), flat(second)
    assert one.keys() == two.keys()
    assert all(one[path].tobytes() == two[path].tobytes() for path in one)


@pytest.mark.parametrize("name", VARIANTS)
def test_saves_the_tensors_that_transformers_saved(name, tmp_path):
    weights.save(weights.load(GOLDEN / name, dtype=jnp.float32), tmp_path)
    expected = load_file(GOLDEN / name / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == expected.keys() - {"lm_head.weight"}
    for key, tensor in saved.items():
        np.testing.assert_array_equal(tensor, expected[key])


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
    expected = flat(weights.load(GOLDEN / "norm_before"))
    found = flat(weights.load(folder))
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


def untied(tensors):
    tensors["lm_head.weight"] = tensors[EMBEDDING] + 1


def twice(tensors):
    tensors[EMBEDDING.removeprefix("model.")] = tensors[EMBEDDING].copy()


BAD_TENSORS = {
    missing: "lacks tensor model.decoder.layers.1.fc1.weight.$",
    misshaped: r"layers.1.fc1.weight must have the shape \(64, 32\), got \(32, 64\)",
    unexpected: "has the unexpected tensor model.decoder.layers.2.fc1.weight.$",
    quantized: "embed_tokens.weight must be of type F16, BF16, F32 or F64, got I8",
    untied: "lm_head.weight must be that of embed_tokens, got another",
    twice: "must have model.decoder.embed_tokens.weight once, got it twice",
}


@pytest.mark.parametrize("change", BAD_TENSORS, ids=lambda change: change.__name__)
def test_bad_tensors(change, tmp_path):
    folder = rewritten(change, tmp_path / "opt")
    with pytest.raises(ValueError, match=BAD_TENSORS[change]) as error:
        weights.load(folder)
    assert "\n" not in str(error.value)


def truncated(folder):
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def emptied(folder):
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


def shard_gone(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


def index_gone(folder):
    (folder / "model.safetensors.index.json").unlink()


def index_broken(folder):
    (folder / "model.safetensors.index.json").write_text("{", "utf-8")


def index_without_map(folder):
    (folder / "model.safetensors.index.json").write_text("{}", "utf-8")


def config_gone(folder):
    (folder / "config.json").unlink()


def config_no_object(folder):
    (folder / "config.json").write_text("[]", "utf-8")


def config_not_text(folder):
    (folder / "config.json").write_bytes(b"\xff")


BAD_FILES = {
    truncated: (ValueError, "00002.safetensors must be a complete safetensors file"),
    emptied: (ValueError, "00001-of.* must be a complete safetensors file"),
    shard_gone: (FileNotFoundError, "00002.safetensors, listed in .*index.* not there"),
    index_gone: (FileNotFoundError, "must have .*index.json, got neither"),
    index_broken: (ValueError, "index.json must be JSON: Expecting"),
    index_without_map: (ValueError, "index.json must have a weight_map, got None"),
    config_gone: (FileNotFoundError, "config.json does not exist"),
    config_no_object: (ValueError, r"config.json must be a JSON object, got \[\]"),
    config_not_text: (ValueError, "config.json must be JSON"),
}


@pytest.mark.parametrize("change", BAD_FILES, ids=lambda change: change.__name__)
def test_bad_files(change, tmp_path):
    kind, message = BAD_FILES[change]
    folder = copied("norm_before_sharded", tmp_path / "opt")
    change(folder)
    with pytest.raises(kind, match=message) as error:
        weights.load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("old, new", [(2**30, 20_000), (20_000, 2**30), (1, 20_000)])
def test_saving_replaces_what_was_there(old, new, tmp_path):
    weights.save(weights.load(GOLDEN / "norm_after"), tmp_path, max_shard_bytes=old)
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    weights.save(weights.load(GOLDEN / "norm_before"), tmp_path, max_shard_bytes=new)
    weights.save(
        weights.load(GOLDEN / "norm_before"), tmp_path / "new", max_shard_bytes=new
    )
    expected = contents(tmp_path / "new")
    shutil.rmtree(tmp_path / "new")
    assert contents(tmp_path) == expected | {"tokenizer.json": b"{}"}


@pytest.mark.parametrize("old", [2**30, 20_000])
def test_saving_that_fails_leaves_what_was_there(old, tmp_path, monkeypatch):
    weights.save(weights.load(GOLDEN / "norm_after"), tmp_path, max_shard_bytes=old)
    before = contents(tmp_path)
    calls = []

    def fails_later(tensors, path, metadata):
        save_file(tensors, path, metadata)
        calls.append(path)
        if len(calls) == 3:
            raise OSError("No space left on device")

    monkeypatch.setattr(weights, "save_file", fails_later)
    with pytest.raises(OSError, match="No space left"):
        weights.save(
            weights.load(GOLDEN / "norm_before"), tmp_path, max_shard_bytes=20_000
        )
    assert contents(tmp_path) == before


@pytest.mark.parametrize("add", [lora.add_lora, lora.add_prompt])
def test_adapters_have_no_place_in_a_checkpoint(add, tmp_path):
    opt = small()
    add(opt, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="model must have no adapters and no soft"):
        weights.save(opt, tmp_path / "opt")
    assert not (tmp_path / "opt").exists()
    with pytest.raises(ValueError, match="max_shard_bytes must be positive, got 0"):
        weights.save(small(), tmp_path / "opt", max_shard_bytes=0)


# --- What is tuned ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_adapters_change_nothing_at_first(dtype):
    opt = small(dtype)
    before = np.asarray(opt(TOKENS))
    lora.add_lora(opt, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(opt(TOKENS), before)
    adapters = nnx.state(opt, lora.FILTERS["lora"])
    shapes = [leaf.shape for leaf in jax.tree.leaves(adapters)]
    assert shapes == [(2, 16, 8), (2, 8, 16)] * 2
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(adapters))


def test_adapters_are_a_change_of_the_matrices():
    rank, alpha = 3, 6.0
    adapted, merged = small(), small()
    lora.add_lora(adapted, rank=rank, alpha=alpha, rngs=nnx.Rngs(1))
    for name in ("q_proj", "v_proj"):
        adapter = getattr(adapted.layers, name).lora
        b = 0.1 * jax.random.normal(jax.random.key(0), adapter.lora_b.shape)
        adapter.lora_b[...] = b
        kernel = getattr(merged.layers, name).kernel
        kernel[...] += alpha / rank * jnp.einsum("lir,lro->lio", adapter.lora_a[...], b)
    np.testing.assert_allclose(adapted(TOKENS), merged(TOKENS), rtol=1e-4, atol=1e-5)


def test_a_prompt_of_tokens_is_those_tokens():
    opt = small()
    plain = opt(TOKENS)[:, 3:]
    prompted = small()
    lora.add_prompt(prompted, length=3, rngs=nnx.Rngs(1))
    rows = np.asarray(opt.embed_tokens.embedding[...])
    for row in np.asarray(prompted.prompt[...]):
        assert (row == rows).all(axis=1).any()
    prompted.prompt[...] = opt.embed_tokens(TOKENS[0, :3])
    found = prompted(TOKENS[:1, 3:])
    np.testing.assert_allclose(found, plain[:1], rtol=1e-5, atol=1e-6)


def test_bad_adapters():
    opt = small()
    with pytest.raises(ValueError, match="rank must be positive, got 0"):
        lora.add_lora(opt, rank=0, rngs=nnx.Rngs(0))
    for length in (0, 12):
        with pytest.raises(ValueError, match=rf"length must .*\(12\), got {length}"):
            lora.add_prompt(opt, length=length, rngs=nnx.Rngs(0))
    lora.add_lora(opt, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="model must not have adapters already"):
        lora.add_lora(opt, rngs=nnx.Rngs(0))


ADDED = {
    "lora": lora.add_lora,
    "prompt": lora.add_prompt,
    "full": lambda opt, rngs: None,
}


@pytest.mark.parametrize(
    "name", ["lora", "prompt", pytest.param("full", marks=pytest.mark.slow)]
)
def test_tuning_changes_what_is_tuned_and_no_other_byte(name):
    opt = small(jnp.bfloat16)
    ADDED[name](opt, rngs=nnx.Rngs(1))
    graphdef, params, frozen = nnx.split(opt, lora.FILTERS[name], ...)
    tuned = {path for path, _ in nnx.to_flat_state(params)}
    before = flat(opt)
    assert tuned == (before.keys() if name == "full" else tuned & before.keys())
    tokens = TOKENS[:, :7]

    def loss_fn(params, frozen):
        logits = nnx.merge(graphdef, params, frozen)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    estimator = zo.central_difference(zo.gaussian(), 1, 1e-2)
    optimizer = zo.radazo(1e-2)

    @jax.jit
    def step(params, frozen, state, key):
        value, gradient = zo.value_and_grad(loss_fn, estimator)(key, params, frozen)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    for i in range(3):
        key = jax.random.key(i)
        params, state, value = step(params, frozen, state, key)
        assert jnp.isfinite(value)
    after = flat(nnx.merge(graphdef, params, frozen))
    assert after.keys() == before.keys()
    for path in before:
        same = before[path].tobytes() == after[path].tobytes()
        assert same != (path in tuned), path


# --- What a perturbed evaluation builds -------------------------------------------

DEEP = model.Config(
    vocab_size=1000,
    hidden_size=16,
    num_hidden_layers=16,
    ffn_dim=64,
    num_attention_heads=2,
    max_position_embeddings=200,
)


@pytest.mark.parametrize("what", ["hidden", "logits"])
@pytest.mark.parametrize(
    "law", ["gaussian", "low_rank", pytest.param("rademacher", marks=pytest.mark.slow)]
)
def test_a_perturbed_evaluation_builds_no_more_than_a_layer(law, what):
    graphdef, params = nnx.split(model.OPT(DEEP, rngs=nnx.Rngs(0)))
    tokens = TOKENS[:, :4]

    def fun(params):
        opt = nnx.merge(graphdef, params)
        return opt(tokens) if what == "logits" else opt.hidden(tokens)

    chosen = axes.specialize(LAWS[law], fun, params, layout_of(params))
    largest = max(computed_sizes(fun, chosen, params))
    table, matrix = 1000 * 16, 16 * 64
    # A dense draw makes two words for each number. The logits need the whole table,
    # but not with directions of low rank, and look-ups never do.
    if what == "hidden":
        assert largest[0] <= 2 * matrix, largest
    else:
        assert largest[0] < table if law == "low_rank" else largest[0] <= 2 * table


def test_the_program_has_no_constants_of_the_size_of_parameters():
    graphdef, params = nnx.split(small())
    jaxpr = jax.make_jaxpr(lambda p: nnx.merge(graphdef, p)(TOKENS))(params)
    assert isinstance(jaxpr, core.ClosedJaxpr)
    assert all(np.size(c) <= TOKENS.size for c in jaxpr.consts)


# --- Memory -----------------------------------------------------------------------

CASES = {
    "forward": memory.Case("125m", "v5e:1x1", "forward", "", ""),
    "zo_sgd": memory.Case("125m", "v5e:1x1", "zo_sgd", "full", "gaussian"),
    "radazo": memory.Case("125m", "v5e:1x1", "radazo", "lora", "rademacher"),
    "adam": memory.Case("125m", "v5e:1x1", "adam, remat", "full", ""),
}


@pytest.mark.parametrize("name", CASES)
def test_the_programs_whose_memory_is_measured(name):
    fun, args = memory.program(CASES[name])
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it.
        out = jax.eval_shape(fun, *args)
    if name == "forward":
        assert (out.shape, out.dtype) == ((), jnp.float32)
        return
    state, value = out
    assert (value.shape, value.dtype) == ((), jnp.float32)
    kinds = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
    assert kinds == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args[0])]
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    expected = 0 if name == "zo_sgd" else 2 * len(jax.tree.leaves(state.params))
    assert len(moments) == expected
    assert all(x.dtype == jnp.float32 for x in moments)


def test_steps_take_the_memory_of_their_forward_pass():
    path = pathlib.Path(__file__).parents[1] / "docs" / "evidence" / "llm_memory.json"
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert [memory.Case.of(row) for row in rows] == memory.CASES
    barred = [row for row in rows if "bar_met" in row]
    assert len(barred) == 6
    for row in barred:
        assert row["fits"] and row["total_GiB"] < 16
        assert row["total/forward"] <= 1.06 and row["peak/forward"] <= 1.06
