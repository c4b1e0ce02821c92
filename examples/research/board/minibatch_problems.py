"""Small problems in minibatches, on which no constant of a rule was chosen."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH = 32
_HELD_OUT = 256
_SEED = 2026


class Problem(NamedTuple):
    """A loss on minibatches.

    Attributes:
      loss: `loss(params, (x, y))`, a mean over examples.
      start: The parameters at the start.
      train: The examples, (x, y), of which a minibatch has 32.
      held_out: Other examples.
    """

    loss: Callable[[Any, Any], jax.Array]
    start: Any
    train: Any
    held_out: Any

    def sample(
        self, key: jax.Array, num_examples: jax.typing.ArrayLike | None = None
    ) -> Any:
        """A minibatch, drawn with replacement from all or the first examples."""
        x, y = self.train
        limit = len(x) if num_examples is None else num_examples
        chosen = jax.random.randint(key, (BATCH,), 0, limit)
        return x[chosen], y[chosen]


def softmax() -> Problem:
    """Softmax regression from 0; standard deviations from 1 down to 1/1000."""
    keys = jax.random.split(jax.random.key(_SEED), 4)
    rotation, _ = jnp.linalg.qr(jax.random.normal(keys[0], (30, 30)))
    scales = jnp.logspace(0, -3, 30)
    x = jax.random.normal(keys[1], (2256, 30)) * scales @ rotation
    logits = 3 * x @ (jax.random.normal(keys[2], (30, 10)) / scales[:, None] ** 0.5)
    y = jax.random.categorical(keys[3], logits)
    start = {"w": jnp.zeros((30, 10)), "b": jnp.zeros(10)}
    return _split(cross_entropy(lambda p, x: x @ p["w"] + p["b"]), start, x, y)


def cancer() -> Problem:
    """A perceptron of two hidden layers on 30 measurements of tumors."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    start = _layers(jax.random.key(_SEED), (30, 32, 32, 2))
    return _split(cross_entropy(_perceptron), start, x, y, held_out=169)


def residual() -> Problem:
    """A residual network with normalization on images of digits."""
    keys = jax.random.split(jax.random.key(_SEED), 3)
    start = {
        "in": _layers(keys[0], (64, 24)),
        "blocks": [_layers(key, (24, 24, 24)) for key in jax.random.split(keys[1], 2)],
        "out": _layers(keys[2], (24, 10)),
    }

    def forward(params: Any, x: jax.Array) -> jax.Array:
        hidden = _perceptron(params["in"], x)
        for block in params["blocks"]:
            hidden = hidden + _perceptron(block, _normalized(hidden))
        return _perceptron(params["out"], _normalized(hidden))

    return _split(cross_entropy(forward), start, *_digits())


def recurrent() -> Problem:
    """A gated recurrent unit that adds the two marked numbers of twelve."""
    keys = jax.random.split(jax.random.key(_SEED), 4)
    values = jax.random.uniform(keys[0], (2256, 12), minval=-1, maxval=1)
    order = jax.vmap(lambda key: jax.random.permutation(key, 12))(
        jax.random.split(keys[1], 2256)
    )
    marks = (order < 2).astype(jnp.float32)
    x, y = jnp.stack([values, marks], axis=-1), jnp.sum(values * marks, axis=1)
    width = 16
    start = {
        "gates": _layers(keys[2], (2 + width, 2 * width))[0],
        "new": _layers(keys[3], (2 + width, width))[0],
        "out": jnp.zeros(width),
    }

    def forward(params: Any, x: jax.Array) -> jax.Array:
        def cell(hidden: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
            w, b = params["gates"]
            both = jnp.concatenate([at, hidden], axis=-1)
            reset, update = jnp.split(jax.nn.sigmoid(both @ w + b), 2, axis=-1)
            w, b = params["new"]
            new = jnp.tanh(jnp.concatenate([at, reset * hidden], axis=-1) @ w + b)
            return update * hidden + (1 - update) * new, None

        start = jnp.zeros((len(x), width))
        hidden, _ = jax.lax.scan(cell, start, jnp.swapaxes(x, 0, 1))
        return hidden @ params["out"]

    return _split(_squares(forward), start, x, y)


def transformer() -> Problem:
    """A transformer of one block on the next letter of 12, which follows from two."""
    width, letters, length = 12, 12, 9
    keys = jax.random.split(jax.random.key(_SEED), 8)
    table = 2 * jax.random.normal(keys[0], (letters, letters, letters))

    def text(key: jax.Array) -> jax.Array:
        def following(pair: Any, key: jax.Array) -> Any:
            new = jax.random.categorical(key, table[pair])
            return (pair[1], new), new

        zero = jnp.zeros((), jnp.int32)
        return jax.lax.scan(following, (zero, zero), jax.random.split(key, length))[1]

    x = jax.vmap(text)(jax.random.split(keys[1], 2256))
    start = {
        "letters": 0.3 * jax.random.normal(keys[2], (letters, width)),
        "places": 0.3 * jax.random.normal(keys[3], (length - 1, width)),
        "qkv": _layers(keys[4], (width, 3 * width)),
        "mix": _layers(keys[5], (width, width)),
        "feed": _layers(keys[6], (width, 2 * width, width)),
        "out": _layers(keys[7], (width, letters)),
    }
    mask = jnp.tril(jnp.ones((length - 1, length - 1), bool))

    def forward(params: Any, x: jax.Array) -> jax.Array:
        hidden = params["letters"][x[:, :-1]] + params["places"]
        heads = _perceptron(params["qkv"], _normalized(hidden))
        q, k, v = jnp.split(heads.reshape(*hidden.shape[:2], 2, -1), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])
        hidden = hidden + _perceptron(params["mix"], mixed.reshape(hidden.shape))
        hidden = hidden + _perceptron(params["feed"], _normalized(hidden))
        return _perceptron(params["out"], _normalized(hidden))

    return _split(cross_entropy(forward), start, x, x[:, 1:])


def heavy_tailed() -> Problem:
    """Regression by a perceptron, with noise of 2.1 degrees of freedom."""
    keys = jax.random.split(jax.random.key(_SEED), 4)
    x = jax.random.normal(keys[0], (2256, 20))
    y = 2 * jnp.sin(x @ jax.random.normal(keys[1], (20,)) / 4) + x[:, 0]
    y = y + jax.random.t(keys[2], 2.1, (2256,)) / 2
    start = _layers(keys[3], (20, 24, 1))
    loss = _squares(lambda p, x: _perceptron(p, x)[:, 0])
    return _split(loss, start, x, y)


def four_bits() -> Problem:
    """The scales and biases of a network with weights of 4 bits, on moved images."""
    whole, scales = zip(*_in_four_bits(), strict=True)
    parts = [(scale, b) for scale, (_, b) in zip(scales, _pretrained(), strict=True)]

    def forward(params: Any, x: jax.Array) -> jax.Array:
        weights = [(w * s, b) for w, (s, b) in zip(whole, params, strict=True)]
        return _perceptron(weights, x)

    return _split(cross_entropy(forward), parts, *_digits(moved=True))


def adapter(bits: int | None = None) -> Problem:
    """Adapters of rank 4 of a network that was trained on other images.

    Args:
      bits: The precision of its weights: 4, or `None` for float32.
    """
    layers, parts = _pretrained(), []
    if bits == 4:
        whole = [w * scale for w, scale in _in_four_bits()]
        layers = [(w, b) for w, (_, b) in zip(whole, layers, strict=True)]
    for (w, _), key in zip(
        layers, jax.random.split(jax.random.key(_SEED), len(layers)), strict=True
    ):
        down = jax.random.normal(key, (len(w), 4)) / np.sqrt(len(w))
        parts.append((down, jnp.zeros((4, w.shape[1]))))

    def forward(params: Any, x: jax.Array) -> jax.Array:
        weights = [
            (w + a @ c, b) for (w, b), (a, c) in zip(layers, params, strict=True)
        ]
        return _perceptron(weights, x)

    return _split(cross_entropy(forward), parts, *_digits(moved=True))


def reward() -> Problem:
    """A trained policy on moved images; the loss is the negative reward, about −5.8.

    The reward is 5, and as much as the digit that the policy draws is near.
    """
    digits = jnp.arange(10)

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        near = 1 - abs(digits - y[:, None]) / 9
        drawn = jax.nn.softmax(_perceptron(params, x))
        return -5 - jnp.mean(jnp.sum(drawn * near, axis=1))

    return _split(loss, _pretrained(), *_digits(moved=True))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "Softmax": softmax,
    "Tumors": cancer,
    "Heavy tails": heavy_tailed,
    "4 bits": four_bits,
    "Adapter": adapter,
    "Recurrent": recurrent,
    "Transformer": transformer,
    "Residual": residual,
    "Adapter of 4 bits": functools.partial(adapter, bits=4),
    "Reward": reward,
}


def _split(
    loss: Callable[[Any, Any], jax.Array],
    start: Any,
    x: Any,
    y: Any,
    held_out: int = _HELD_OUT,
) -> Problem:
    """A problem whose last examples are held out."""
    both = jnp.asarray(x), jnp.asarray(y)
    both = tuple(z.astype(jnp.float32) if z.dtype == jnp.float64 else z for z in both)
    train, last = (tuple(z[part] for z in both) for part in _parts(held_out))
    return Problem(loss, start, train, last)


def _parts(held_out: int) -> tuple[slice, slice]:
    return slice(None, -held_out), slice(-held_out, None)


def cross_entropy(forward: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        logits = forward(params, x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

    return loss


def _squares(forward: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((forward(params, x) - y) ** 2)

    return loss


def _layers(key: jax.Array, sizes: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Weights and biases, as He et al. begin."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(key, (n, m)) * np.sqrt(2 / n), jnp.zeros(m))
        for key, n, m in zip(keys, sizes, sizes[1:], strict=False)
    ]


def _perceptron(layers: Any, x: jax.Array) -> jax.Array:
    for i, (w, b) in enumerate(layers):
        x = (jax.nn.relu(x) if i else x) @ w + b
    return x


def _normalized(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, axis=-1)


def _digits(moved: bool = False) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    return (np.roll(x, 1, axis=1) if moved else x), y  # A pixel to the right.


@functools.cache
def _pretrained() -> Any:
    """A perceptron that Adam trained on the digits, by exact gradients."""
    problem = _split(
        cross_entropy(_perceptron),
        _layers(jax.random.key(_SEED), (64, 64, 10)),
        *_digits(),
    )
    optimizer = optax.adam(3e-3)

    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        gradient = jax.grad(problem.loss)(params, problem.sample(key))
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    begun = problem.start, optimizer.init(problem.start)
    keys = jax.random.split(jax.random.key(_SEED), 1500)
    return jax.jit(lambda begun: jax.lax.scan(step, begun, keys)[0][0])(begun)


def _in_four_bits() -> list[tuple[jax.Array, jax.Array]]:
    """The weights of that perceptron as whole numbers up to 7, and their scales."""
    scales = [jnp.max(abs(w), axis=0) / 7 for w, _ in _pretrained()]
    layers = zip(_pretrained(), scales, strict=True)
    return [(jnp.round(w / scale), scale) for (w, _), scale in layers]
