"""The models whose memory is measured, as shapes of parameters and a loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Model(NamedTuple):
    """A model that nothing has been allocated for.

    Attributes:
      params: A tree of ``jax.ShapeDtypeStruct``.
      loss: ``loss(params, batch)``, a scalar.
      batch: Its second argument, likewise abstract.
      layer_bytes: The size of the parameters of one layer.
    """

    params: Any
    loss: Any
    batch: Any
    layer_bytes: int


def decoder(
    num_layers: int = 24,
    width: int = 2048,
    num_heads: int = 32,
    vocabulary: int = 50272,
    length: int = 1024,
    batch_size: int = 4,
    dtype: Any = jnp.bfloat16,
    one_by_one: bool = True,
    weights: Callable[[Any], Any] = lambda tree: tree,
    activations: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> Model:
    """A decoder like OPT: scanned layers before a tied embedding.

    Attention and logits are computed sequence by sequence if ``one_by_one``, as one who
    only runs the model forward would do in order to save memory. ``weights`` and
    ``activations`` are applied to those of a layer, and may say how they are sharded.
    """
    mapped = lax.map if one_by_one else lambda fun, xs: jax.vmap(fun)(xs)

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def norm(*stack: int) -> dict[str, Any]:
        return {"scale": of(*stack, width), "bias": of(*stack, width)}

    def dense(inputs: int, outputs: int) -> dict[str, Any]:
        return {
            "kernel": of(num_layers, inputs, outputs),
            "bias": of(num_layers, outputs),
        }

    layers = {
        "norm_1": norm(num_layers),
        "query": dense(width, width),
        "key": dense(width, width),
        "value": dense(width, width),
        "out": dense(width, width),
        "norm_2": norm(num_layers),
        "up": dense(width, 4 * width),
        "down": dense(4 * width, width),
    }
    params = {
        "embedding": of(vocabulary, width),
        "positions": of(length, width),
        "layers": layers,
        "norm": norm(),
    }

    def normalize(p: Any, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normal = jax.nn.standardize(wide, axis=-1, epsilon=1e-5).astype(dtype)
        return normal * p["scale"] + p["bias"]

    def project(p: Any, x: jax.Array) -> jax.Array:
        return x @ p["kernel"] + p["bias"]

    def attend(qkv: tuple[jax.Array, ...]) -> jax.Array:
        heads = [x.reshape(length, num_heads, width // num_heads) for x in qkv]
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        return mixed.reshape(length, width)

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        p = weights(p)
        y = normalize(p["norm_1"], x)
        qkv = tuple(project(p[name], y) for name in ("query", "key", "value"))
        x = activations(x + project(p["out"], mapped(attend, qkv)))
        y = jax.nn.relu(project(p["up"], normalize(p["norm_2"], x)))
        return activations(x + project(p["down"], y)), None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        embedding = weights(params["embedding"])
        x = jnp.take(embedding, tokens, axis=0, mode="clip")
        x = activations(x + weights(params["positions"]))
        x, _ = lax.scan(layer, x, params["layers"])
        x = normalize(params["norm"], x)

        def cross_entropy(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, targets = pair
            logits = jnp.dot(x, embedding.T, preferred_element_type=jnp.float32)
            found = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
            return jnp.mean((jax.nn.logsumexp(logits, axis=1) - found)[:-1])

        return jnp.mean(mapped(cross_entropy, (x, jnp.roll(tokens, -1, axis=1))))

    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    return Model(params, loss, tokens, _num_bytes(layers) // num_layers)


def dense_layers(
    num_layers: int = 12,
    width: int = 4096,
    batch_size: int = 256,
    dtype: Any = jnp.bfloat16,
    scanned: bool = False,
) -> Model:
    """Layers of one matrix each, one after another or scanned."""
    matrix = jax.ShapeDtypeStruct((width, width), dtype)
    inputs = jax.ShapeDtypeStruct((batch_size, width), dtype)

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if scanned:
            x, _ = lax.scan(layer, x, params)
        else:
            for w in params:
                x, _ = layer(x, w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params: Any = [matrix] * num_layers
    if scanned:
        params = jax.ShapeDtypeStruct((num_layers, width, width), dtype)
    return Model(params, loss, inputs, _num_bytes(matrix))


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
