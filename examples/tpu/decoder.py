"""A small language model, what it learns, and how both are laid out on a mesh."""

from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Of the tokens that follow their rule; the others are any.
_RULED = 0.9
# With `--shard-params tensor`, the axis of a leaf that lies over `model`: the outputs
# of a first matrix and the inputs of the second, so that they need one sum together.
_TENSOR = {
    "embedding": 0,
    "query": 2,
    "key": 2,
    "value": 2,
    "up": 2,
    "out": 1,
    "down": 1,
}


class Sizes(NamedTuple):
    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    dtype: str


def init(key: jax.Array, sizes: Sizes) -> dict[str, Any]:
    """The parameters of a decoder: scanned layers before a tied embedding."""
    layers, width, dtype = sizes.layers, sizes.width, jnp.dtype(sizes.dtype)
    shapes = {
        "embedding": (sizes.vocabulary, width),
        "positions": (sizes.length, width),
        "query": (layers, width, width),
        "key": (layers, width, width),
        "value": (layers, width, width),
        "out": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
    }
    keys = jax.random.split(key, len(shapes))
    params = {}
    for one, (name, shape) in zip(keys, shapes.items(), strict=True):
        scale = width**-0.5 if len(shape) == 2 else shape[1] ** -0.5
        params[name] = (scale * jax.random.normal(one, shape)).astype(dtype)
    norms = {"norm_1": (layers, width), "norm_2": (layers, width), "norm": (width,)}
    return params | {name: jnp.ones(shape, dtype) for name, shape in norms.items()}


def loss_fn(params: dict[str, Any], tokens: jax.Array, heads: int) -> jax.Array:
    """The cross-entropy of tokens [B, T], each predicted from the previous ones."""
    layers = {
        name: p for name, p in params.items() if p.ndim == 3 or name[:-1] == "norm_"
    }

    def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        y = _normalize(x, p["norm_1"])
        qkv = [
            (y @ p[name]).reshape(*y.shape[:2], heads, -1)
            for name in ("query", "key", "value")
        ]
        mixed = jax.nn.dot_product_attention(*qkv, is_causal=True)
        x = x + mixed.reshape(y.shape) @ p["out"]
        return x + jax.nn.relu(_normalize(x, p["norm_2"]) @ p["up"]) @ p["down"], None

    x = jnp.take(params["embedding"], tokens, axis=0, mode="clip") + params["positions"]
    x, _ = lax.scan(layer, x, layers)
    x = _normalize(x, params["norm"])[:, :-1]
    logits = jnp.matmul(x, params["embedding"].T, preferred_element_type=jnp.float32)
    # A sum rather than a look-up: in logits that lie over two axes, inside the
    # evaluations that are spread over a third, XLA's partitioner fails at the latter.
    is_next = tokens[:, 1:, None] == jnp.arange(logits.shape[2])
    found = jnp.sum(logits, axis=2, where=is_next)
    return jnp.mean(jax.nn.logsumexp(logits, axis=2) - found)


def _normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return jax.nn.standardize(wide, epsilon=1e-5).astype(x.dtype) * scale


def specs(params: Any, how: str, size: int) -> Any:
    """The sharding of the parameters, a tree of `PartitionSpec`.

    Args:
      params: Arrays or their shapes.
      how: `no`: all on every device. `tensor`: matrices and the embedding cut so that
        activations are, too. `fsdp`: every leaf cut along its longest axis, and put
        together when it is used.
      size: The number of devices along the axis `model`.
    """

    def spec(path: Any, leaf: Any) -> jax.P:
        if how == "tensor":
            axis = _TENSOR.get(path[-1].key)
        else:
            axes = [i for i, n in enumerate(leaf.shape) if n % size == 0]
            axis = max(axes, key=lambda i: leaf.shape[i], default=None)
        if how == "no" or axis is None:
            return jax.P()
        if leaf.shape[axis] % size:
            raise click.ClickException(
                f"--shard-params {how} cuts axis {axis} of {path[-1].key} "
                f"{list(leaf.shape)} for {size} devices along model, which do not "
                "divide it"
            )
        return jax.P(*(None,) * axis, "model")

    return jax.tree_util.tree_map_with_path(spec, params)


def batch(seed: int, step: int, size: int, sizes: Sizes) -> np.ndarray:
    """Tokens [size, length], a function of the seed and the step.

    Most tokens follow from the last by a rule, a permutation that the seed draws.
    """
    rule = np.random.default_rng(seed).permutation(sizes.vocabulary)
    rng = np.random.default_rng((seed, step))
    shape = (size, sizes.length)
    tokens = rng.integers(sizes.vocabulary, size=shape, dtype=np.int32)
    ruled = rng.random(shape) < _RULED
    for i in range(1, sizes.length):
        tokens[:, i] = np.where(ruled[:, i], rule[tokens[:, i - 1]], tokens[:, i])
    return tokens


def entropy(vocabulary: int) -> float:
    """The least loss that a model can have on these tokens."""
    other = (1 - _RULED) / vocabulary
    ruled = _RULED + other
    return -ruled * np.log(ruled) - (vocabulary - 1) * other * np.log(other)
