"""A small language model, to train from a random start."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


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
    is_next = tokens[:, 1:, None] == jnp.arange(logits.shape[2])
    found = jnp.sum(logits, axis=2, where=is_next)
    return jnp.mean(jax.nn.logsumexp(logits, axis=2) - found)


def _normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return jax.nn.standardize(wide, epsilon=1e-5).astype(x.dtype) * scale
