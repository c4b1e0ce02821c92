"""The page on training stacks: its blocks run, and go down as our own loop does."""

import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import radazo_jax as zo
import radazo_jax.nnx as zo_nnx

os.environ.setdefault("KERAS_BACKEND", "jax")

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "stacks.md"
# What a section imports that may not be there.
NEEDS = {
    "Equinox": "equinox",
    "Haiku": "haiku",
    "Keras": "keras",
    "Tunix": "tunix",
    "Tunix with rewards": "tunix",
    "Qwix": "qwix",
}


def blocks():
    """Returns the code of each section, on its lines of the page for tracebacks."""
    text, found, section = PAGE.read_text(encoding="utf-8"), {}, ""
    for match in re.finditer(
        r"^## ([^\n]+)$|^```python\n(.*?)^```$", text, re.M | re.S
    ):
        if match[1]:
            section = match[1]
        else:
            line = text[: match.start(2)].count("\n")
            found[section] = "\n" * line + match[2]
    return found


BLOCKS = blocks()
DATA = BLOCKS.pop("")


@pytest.fixture(autouse=True)
def as_a_user_has_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def executed(section):
    if section in NEEDS:
        pytest.importorskip(NEEDS[section], reason='needs "radazo-jax[stacks]"')
    names = {"__name__": "stacks"}
    for source in (DATA, BLOCKS[section]):
        exec(compile(source, str(PAGE), "exec"), names)
    return names


def test_all_stacks_are_in_the_table():
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(.+?)\]\(#", text, re.M)
    assert listed == list(BLOCKS)


# Third parties warn at import, or when they read their variables with NumPy 2.4.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)


@pytest.mark.slow
@pytest.mark.parametrize("section", BLOCKS)
def test_the_block_of_a_stack_goes_down(section):
    losses = np.asarray(executed(section)["losses"], np.float64)
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.5 * losses[0], losses[[0, -1]]


def trained_by_keras(layers, num_steps):
    """The names of the recipe, run with other layers, and its first parameters."""
    pytest.importorskip("keras", reason='needs "radazo-jax[stacks]"')
    source, names = BLOCKS["Keras"], {}
    for line, other in (
        ("^layers = .*$", f"layers = {layers}"),
        ("^tx = ", "first = params\ntx = "),
        ("^for i in .*$", f"for i in range({num_steps}):"),
    ):
        source, count = re.subn(line, other, source, flags=re.M)
        assert count == 1
    import keras

    keras.utils.set_random_seed(0)
    for part in (DATA, source):
        exec(compile(part, str(PAGE), "exec"), names)
    return names


@pytest.mark.slow
def test_keras_takes_the_steps_of_a_loop_of_our_own():
    dense = 'keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)'
    names = trained_by_keras(dense, 200)
    x, y, tx, params = (names[name] for name in ("x", "y", "tx", "first"))

    def loss(params):
        w1, b1, w2, b2 = params
        return jnp.mean(((jnp.tanh(x @ w1 + b1) @ w2 + b2)[:, 0] - y) ** 2)

    @jax.jit
    def step(key, params, state):
        value, gradient = zo.value_and_grad(loss, names["estimator"])(key, params)
        updates, state = tx.update(gradient, state, params)
        return value, optax.apply_updates(params, updates), state

    state, losses = tx.init(params), []
    for i in range(200):
        value, params, state = step(jax.random.key(i), params, state)
        losses.append(value)
    np.testing.assert_allclose(names["losses"][:20], losses[:20], rtol=1e-3)
    np.testing.assert_allclose(names["losses"], losses, rtol=0.2)
    model = names["model"]
    errors = model.predict(x, verbose=0)[:, 0] - y
    assert np.mean(errors**2) < 2 * losses[-1]


@pytest.mark.slow
def test_statistics_and_masks_of_keras_are_those_of_the_first_evaluation():
    """Differences to another mask are 1000 times the slope, and more."""
    dense = 'keras.layers.Dense(4, "tanh")'
    layers = "keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)"
    layers = f"{dense}, {layers}, keras.layers.Dense(1)"
    names = trained_by_keras(layers, 1)
    weights, bias = names["first"][:2]
    kept = {v.name: np.asarray(v.value) for v in names["model"].non_trainable_variables}
    mean = np.tanh(names["x"] @ weights + bias).mean(axis=0)
    np.testing.assert_allclose(kept["moving_mean"], 0.01 * mean, rtol=1e-4, atol=1e-7)
    _, gradient = names["value_and_grad"](
        jax.random.key(0), names["params"], names["others"]
    )
    assert max(np.abs(leaf).max() for leaf in gradient) < 30


@pytest.mark.slow
@pytest.mark.parametrize("tuned", ["all parameters", "adapters of a decoder"])
def test_tunix_takes_the_steps_of_a_loop_of_our_own(tuned):
    names = executed("Tunix")
    if tuned == "all parameters":
        wrt, batch = nnx.Param, {"x": names["x"], "y": names["y"]}
        models = [nnx.Linear(3, 1, rngs=nnx.Rngs(0)) for _ in range(2)]
    else:
        wrt, batch = nnx.LoRAParam, tokens_of_tunix()
        models = [decoder_of_tunix() for _ in range(2)]

    class Trainer(names["ZerothOrderTrainer"]):
        def create_train_step_fn(self):
            self.wrt, self.losses = wrt, []
            step = super().create_train_step_fn()

            def train_step(model, optimizer, inputs):
                loss, _, norm = step(model, optimizer, inputs)
                return loss, loss, norm

            return train_step

        def _post_process_train_step(self, aux):
            self.losses.append(float(aux))

    config = names["TrainingConfig"](eval_every_n_steps=1000, max_steps=30)
    trainer = Trainer(models[0], zo.radazo(1e-2), config)
    if tuned == "all parameters":  # Tunix has a loss of its own, for decoders.
        trainer = trainer.with_loss_fn(names["loss_fn"])
    trainer.train([batch] * 30)

    optimizer = nnx.Optimizer(models[1], zo.radazo(1e-2), wrt=wrt)
    estimate = zo_nnx.value_and_grad(trainer.loss_fn, names["estimator"], wrt=wrt)

    @nnx.jit
    def step(i, model, optimizer):
        key = jax.random.fold_in(jax.random.key(0), i)
        loss, gradient = estimate(key, model, **batch)
        optimizer.update(model, gradient)
        return loss

    losses = [step(jnp.uint32(i), models[1], optimizer) for i in range(30)]
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(trainer.losses, losses, rtol=1e-5)
    found, expected = (jax.tree.leaves(nnx.state(m, nnx.Param)) for m in models)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def decoder_of_tunix():
    """Builds a model of Tunix, with adapters by Qwix."""
    qwix = pytest.importorskip("qwix")
    from tunix.models.qwen3 import model as qwen3

    sizes = {"num_layers": 1, "vocab_size": 16, "embed_dim": 8, "hidden_dim": 16}
    heads = {"num_heads": 2, "head_dim": 4, "num_kv_heads": 1}
    config = qwen3.ModelConfig(**sizes, **heads, rope_theta=10_000, norm_eps=1e-6)
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    provider = qwix.LoraProvider(module_path=".*(q|v)_proj", rank=2, alpha=2.0)
    inputs = model.get_model_input()
    return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **inputs)


def tokens_of_tunix():
    tokens = np.arange(20, dtype=np.int32).reshape(4, 5) % 16
    return {
        "input_tokens": tokens,
        "input_mask": np.ones_like(tokens),
        "positions": np.broadcast_to(np.arange(5, dtype=np.int32), (4, 5)),
        "attention_mask": np.broadcast_to(np.tri(5, dtype=bool), (4, 5, 5)),
    }


@pytest.mark.slow
def test_an_equinox_module_of_mixed_leaves():
    """Activations, integers and frozen arrays stay as they are."""
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    chosen = jax.tree.map(lambda _: False, model)
    chosen = eqx.tree_at(lambda m: m.layers[-1].bias, chosen, replace=True)
    params, static = eqx.partition(model, chosen)

    def loss_fn(params):
        return jnp.sum(eqx.combine(params, static)(jnp.ones(3)))

    estimator = zo.central_difference(zo.coordinate(replace=False))
    _, gradient = zo.value_and_grad(loss_fn, estimator)(jax.random.key(0), params)
    (leaf,) = jax.tree.leaves(gradient)
    # The loss is linear in the only coordinate.
    np.testing.assert_allclose(leaf, [1.0], rtol=1e-3)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
