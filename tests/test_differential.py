"""Models of Flax, Equinox, Haiku, transformers: mean estimates against `jax.grad`.

An estimate of one direction is a random vector whose expectation is the gradient. Of
`NUM` of them, drawn under keys of their own, the means along a few fixed vectors v have
the standard errors s / √NUM; the statistic z = (mean - gradient · v) / error is normal,
by the central limit theorem. All keys are fixed. Some 1,800 statistics are compared in
all; that any of them exceeds 5 has the probability 1,800 · 5.7e-7 < 2e-3.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tables
from jax.flatten_util import ravel_pytree
from tables import LAWS, slow

import radazo_jax as zo

NUM, LARGEST = 4000, 5.0
# The bias of a central difference is of the order μ² d / 2 · |∇Δf|: below a tenth of a
# percent of the gradient here, where the standard error is two percent.
SMOOTHING = 3e-3

IMAGES = jax.random.normal(jax.random.key(1), (4, 6, 6, 1))
TOKENS = jax.random.normal(jax.random.key(2), (2, 5, 4))
ROWS = jax.random.normal(jax.random.key(3), (8, 5))
LABELS = jnp.arange(4) % 3


@pytest.fixture(autouse=True)
def as_frameworks_need_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def cross_entropy(logits):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[:, None], axis=1)
    return -jnp.mean(picked)


def squares(output):
    return jnp.mean((output - 0.3) ** 2)


# --- Models: each returns a loss and its parameters -----------------------------------


def flax_cnn():
    """The network of Flax's MNIST example, narrower."""
    nn = pytest.importorskip("flax.linen")

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
    nn = pytest.importorskip("flax.linen")

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
    nn = pytest.importorskip("flax.linen")
    model = nn.RNN(nn.LSTMCell(3))
    params = model.init(jax.random.key(0), TOKENS)
    return lambda p: squares(model.apply(p, TOKENS)), params


def nnx_mlp():
    nnx = pytest.importorskip("flax.nnx")

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
    eqx = pytest.importorskip("equinox")
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
    hk = pytest.importorskip("haiku")
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
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"Flax{name}"):
        pytest.skip("transformers has no Flax models from version 5 on")
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


# --- The statistic --------------------------------------------------------------------


def vectors(gradient):
    """Of length 1: along the gradient, along each leaf of it, and two at random."""
    leaves, treedef = jax.tree.flatten(gradient)
    alone = [
        jax.tree.unflatten(treedef, [x * (i == j) for j, x in enumerate(leaves)])
        for i in range(len(leaves))
    ]
    rows = jnp.stack([ravel_pytree(tree)[0] for tree in (gradient, *alone)])
    random = jax.random.normal(jax.random.key(7), (2, rows.shape[1]))
    rows = jnp.concatenate([rows, random])
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True)


def statistics(loss, params, law, factor=1.0):
    """z along each of the vectors."""
    estimator = zo.central_difference(law, num_directions=1, smoothing=SMOOTHING)
    estimate = zo.value_and_grad(loss, estimator)

    @tables.jit
    def run(params, keys):
        gradient = jax.grad(loss)(params)
        along = vectors(gradient)

        def one(key):
            return along @ ravel_pytree(estimate(key, params)[1])[0]

        return jax.lax.map(one, keys, batch_size=200), along @ ravel_pytree(gradient)[0]

    drawn, expected = run(params, jax.random.split(jax.random.key(5), NUM))
    drawn, expected = factor * np.asarray(drawn, np.float64), np.asarray(expected)
    # A leaf that the loss does not depend on, but for rounding, tells nothing.
    told = np.abs(expected) > 1e-4 * np.abs(expected[0])
    error = drawn.std(axis=0, ddof=1) / np.sqrt(NUM)
    return ((drawn.mean(axis=0) - expected) / error)[told]


# The others are run with one law: each law with each model takes twenty minutes.
SMALL = [equinox_mlp, haiku_mlp]
# With a covariance of its own, the mean is that times the gradient.
OTHERS = [law for law in LAWS if law not in ("sphere", "smooth")]
FAST = [(equinox_mlp, "low_rank")]


@pytest.mark.parametrize(
    ("model", "law"),
    [
        *FAST,
        *(slow(m, "sphere") for m in MODELS),
        *(slow(m, law) for m in SMALL for law in OTHERS if (m, law) not in FAST),
    ],
)
def test_the_mean_of_estimates_is_the_gradient(model, law):
    z = statistics(*model(), LAWS[law])
    assert np.abs(z).max() < LARGEST, z


def test_a_bias_is_found():
    """Estimates that are 15 percent too long: seven standard errors."""
    assert np.abs(statistics(*haiku_mlp(), LAWS["gaussian"], 1.15)).max() > LARGEST
