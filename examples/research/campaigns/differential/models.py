"""Small models in the form of the examples of Flax, Equinox, Haiku and transformers.

Each returns a loss and its parameters.
"""

import functools
import importlib

import jax
import jax.numpy as jnp

IMAGES = jax.random.normal(jax.random.key(1), (4, 6, 6, 1))
TOKENS = jax.random.normal(jax.random.key(2), (2, 5, 4))
ROWS = jax.random.normal(jax.random.key(3), (8, 5))
LABELS = jnp.arange(4) % 3


def cross_entropy(logits):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[:, None], axis=1)
    return -jnp.mean(picked)


def squares(output):
    return jnp.mean((output - 0.3) ** 2)


def flax_cnn():
    """The network of Flax's MNIST example, narrower."""
    nn = importlib.import_module("flax.linen")

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.Conv(3, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
            return nn.Dense(3)(x.reshape(x.shape[0], -1))

    model = CNN()
    params = model.init(jax.random.key(0), IMAGES)
    return lambda p: cross_entropy(model.apply(p, IMAGES)), params


def flax_transformer():
    """A block of attention, as in Flax's WMT example."""
    nn = importlib.import_module("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
            return nn.Dense(4)(nn.gelu(nn.Dense(6)(nn.LayerNorm()(x + h))))

    model = Block()
    params = model.init(jax.random.key(0), TOKENS)
    return lambda p: squares(model.apply(p, TOKENS)), params


def flax_lstm():
    """The recurrent network of Flax's sequence examples: a scan."""
    nn = importlib.import_module("flax.linen")
    model = nn.RNN(nn.LSTMCell(3))
    params = model.init(jax.random.key(0), TOKENS)
    return lambda p: squares(model.apply(p, TOKENS)), params


def nnx_mlp():
    nnx = importlib.import_module("flax.nnx")

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(5, 6, rngs=rngs)
            self.norm = nnx.LayerNorm(6, rngs=rngs)
            self.out = nnx.Linear(6, 2, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.gelu(self.norm(self.hidden(x))))

    graphdef, params = nnx.split(MLP(nnx.Rngs(0)), nnx.Param)
    return lambda p: squares(nnx.merge(graphdef, p)(ROWS)), params


def equinox_of(make, apply):
    eqx = importlib.import_module("equinox")
    params, static = eqx.partition(make(eqx), eqx.is_inexact_array)
    return lambda p: squares(apply(eqx.combine(p, static))), params


def equinox_mlp():
    key = jax.random.key(0)
    return equinox_of(
        lambda eqx: eqx.nn.MLP(5, 2, 6, 2, jnp.tanh, key=key),
        lambda model: jax.vmap(model)(ROWS),
    )


def equinox_attention():
    key = jax.random.key(0)
    return equinox_of(
        lambda eqx: eqx.nn.MultiheadAttention(2, 4, key=key),
        lambda model: jax.vmap(lambda x: model(x, x, x))(TOKENS),
    )


def equinox_gru():
    """Equinox's example of a recurrent network: a scan over a cell."""
    key = jax.random.key(0)

    def run(cell):
        step = lambda h, x: (cell(x, h), None)  # noqa: E731
        return jax.vmap(lambda xs: jax.lax.scan(step, jnp.zeros(3), xs)[0])(TOKENS)

    return equinox_of(lambda eqx: eqx.nn.GRUCell(4, 3, key=key), run)


def haiku_of(forward, x, loss):
    hk = importlib.import_module("haiku")
    model = hk.without_apply_rng(hk.transform(functools.partial(forward, hk)))
    params = model.init(jax.random.key(0), x)
    return lambda p: loss(model.apply(p, x)), params


def haiku_mlp():
    return haiku_of(
        lambda hk, x: hk.nets.MLP([6, 4, 2], activation=jnp.tanh)(x), ROWS, squares
    )


def haiku_cnn():
    """The network of Haiku's MNIST example, with a convolution before it."""

    def forward(hk, x):
        x = jnp.tanh(hk.Conv2D(3, 3)(x))
        return hk.nets.MLP([4, 3], activation=jnp.tanh)(hk.Flatten()(x[:, ::2, ::2]))

    return haiku_of(forward, IMAGES, cross_entropy)


def haiku_lstm():
    def forward(hk, x):
        core = hk.LSTM(3)
        start = core.initial_state(x.shape[0])
        return hk.dynamic_unroll(core, x, start, time_major=False)[0]

    return haiku_of(forward, TOKENS, squares)


def transformers_of(name, config, **settings):
    """A model of the Flax port of transformers, which ends with version 4."""
    transformers = importlib.import_module("transformers")
    if not hasattr(transformers, f"Flax{name}"):
        raise ImportError("transformers has no Flax models from version 5 on")
    config = getattr(transformers, config)(vocab_size=7, **settings)
    model = getattr(transformers, f"Flax{name}")(config, input_shape=(1, 4))
    ids = jnp.array([[1, 2, 3, 4], [5, 6, 0, 1]], jnp.int32)
    return lambda p: squares(model(ids, params=p).logits), model.params


def transformers_gpt2():
    sizes = {"n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 2}
    return transformers_of("GPT2LMHeadModel", "GPT2Config", **sizes)


def transformers_bert():
    sizes = {
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 4,
        "max_position_embeddings": 4,
    }
    return transformers_of("BertForMaskedLM", "BertConfig", **sizes)


MODELS = [
    *(flax_cnn, flax_transformer, flax_lstm, nnx_mlp),
    *(equinox_mlp, equinox_attention, equinox_gru),
    *(haiku_mlp, haiku_cnn, haiku_lstm),
    *(transformers_gpt2, transformers_bert),
]
