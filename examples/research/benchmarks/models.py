"""The models whose memory is measured, as shapes of parameters and a loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.programs import num_bytes


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

    Attention and logits are computed sequence by sequence if ``one_by_one``, to save
    memory in a forward pass. ``weights`` and ``activations`` are applied to the weights
    and the activations of a layer; they may constrain the sharding.
    """
    mapped = lax.map if one_by_one else lambda fun, xs: jax.vmap(fun)(xs)

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

    params = _decoder_params(num_layers, width, vocabulary, length, dtype)
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    return Model(params, loss, tokens, num_bytes(params["layers"]) // num_layers)


def _decoder_params(
    num_layers: int, width: int, vocabulary: int, length: int, dtype: Any
) -> dict[str, Any]:
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
    return {
        "embedding": of(vocabulary, width),
        "positions": of(length, width),
        "layers": layers,
        "norm": norm(),
    }


def _rotated(x: jax.Array) -> jax.Array:
    """Queries or keys [B, T, H, size] with their positions."""
    length, size = x.shape[1], x.shape[3]
    frequency = 1e4 ** (-jnp.arange(0, size, 2) / size)
    angle = jnp.arange(length)[:, None, None] * frequency
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned.astype(x.dtype)


def grouped_query_decoder(num_layers: int = 16) -> Model:
    """A decoder like Llama, written as one does who does not think of memory.

    Queries share keys and values in groups, the feed-forward part is a SwiGLU, and one
    product of the activations with the embedding makes all logits, in float32.
    """
    vocabulary, batch_size, length, dtype = 32000, 4, 1024, jnp.bfloat16
    width, hidden = 2048, 5504
    num_heads, num_shared_heads, size = 16, 4, 128

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    layers = {
        "norm_1": of(num_layers, width),
        "query": of(num_layers, width, num_heads * size),
        "key": of(num_layers, width, num_shared_heads * size),
        "value": of(num_layers, width, num_shared_heads * size),
        "out": of(num_layers, num_heads * size, width),
        "norm_2": of(num_layers, width),
        "gate": of(num_layers, width, hidden),
        "up": of(num_layers, width, hidden),
        "down": of(num_layers, hidden, width),
    }
    params = {"embedding": of(vocabulary, width), "layers": layers, "norm": of(width)}

    def normalize(scale: jax.Array, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide**2, axis=-1, keepdims=True)
        return (wide * lax.rsqrt(square + 1e-5)).astype(dtype) * scale

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        y = normalize(p["norm_1"], x)
        query, key, value = (
            (y @ p[name]).reshape(batch_size, length, -1, size)
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(
            _rotated(query), _rotated(key), value, is_causal=True
        )
        x = x + mixed.reshape(batch_size, length, -1) @ p["out"]
        y = normalize(p["norm_2"], x)
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x, _ = lax.scan(layer, params["embedding"][tokens], params["layers"])
        logits = lax.dot_general(
            normalize(params["norm"], x),
            params["embedding"],
            (((2,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        targets = jnp.roll(tokens, -1, axis=1)
        found = jnp.take_along_axis(logits, targets[..., None], axis=2)[..., 0]
        return jnp.mean((jax.nn.logsumexp(logits, axis=2) - found)[:, :-1])

    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    return Model(params, loss, tokens, num_bytes(layers) // num_layers)


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
    return Model(params, loss, inputs, num_bytes(matrix))
