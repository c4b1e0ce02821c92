"""Causal attention, and a cache of keys and values.

On a TPU, the last axis of an array is padded to 128 numbers. In a cache, narrow heads
lie side by side, so that nothing is padded.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EMPTY = 2**30  # A position after all others.
_LANES = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far.

    The next tokens of all rows are written to the same slots, whatever their positions:
    a loop over tokens then writes a slice, and no more than it.

    Attributes:
      keys: [layers, B, heads / n, S, n · width of a head], in S slots, n heads side by
        side.
      values: As `keys`.
      positions: The position of the token in each slot, int32 [B, S]; `EMPTY` if no
        token may see it.
      slot: The slot of the next token, int32 ().
      empty: Whether the next tokens are the first, which see none but themselves.
    """

    keys: jax.Array
    values: jax.Array
    positions: jax.Array
    slot: jax.Array
    empty: bool = dataclasses.field(metadata={"static": True})


def empty_cache(
    layers: int, heads: int, width: int, batch_size: int, length: int, dtype: Any
) -> Cache:
    """Room for the keys and values of so many tokens, in heads of some width."""
    fit = (n for n in range(1, heads + 1) if heads % n == 0 and n * width <= _LANES)
    n = max(fit, default=1)
    shape = layers, batch_size, heads // n, length, n * width
    keys, values = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
    positions = jnp.full((batch_size, length), EMPTY, jnp.int32)
    return Cache(keys, values, positions, jnp.int32(0), empty=True)


def apart(*products: jax.Array) -> list[jax.Array]:
    """Products whose layout does not depend on what is made of them.

    XLA's TPU backend would lay out queries, keys and values by head from the start, and
    transpose the matrices of each layer for it, at each token.
    """
    return list(lax.optimization_barrier(products))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    cache: Cache | None,
    layer: jax.Array,
    *,
    scale: float,
    window: Any = None,
    cap: float | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Causal attention, in which several heads of queries may share keys and values.

    Args:
      q: [B, T, heads, width of a head].
      k: [B, T, fewer heads, width of a head], as v.
      v: As k.
      positions: int32 [T], of the tokens, or [B, T] if rows differ.
      cache: The cache, to which new keys and values are written; without, positions
          start at 0.
      layer: The number of the layer.
      scale: The factor of the products.
      window: The number of positions that a token sees, with its own; by default all.
      cap: The soft limit of the scaled products.

    Returns:
      What was mixed, [B, T, heads · width], and the cache.
    """
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    # As the cache has them, heads lie side by side from the start.
    n = 1 if cache is None else cache.keys.shape[-1] // width
    k, v = (x.reshape(batch, length, groups // n, n * width) for x in (k, v))
    places, of_keys = positions, "bskd"
    if cache is not None:
        keys, values = (
            _write(old, new, layer, cache.slot)
            for old, new in ((cache.keys, k), (cache.values, v))
        )
        cache = dataclasses.replace(cache, keys=keys, values=values)
    if cache is not None and not cache.empty:
        k, v = (lax.dynamic_index_in_dim(x, layer, 0, False) for x in (keys, values))
        places, of_keys = cache.positions, "bksd"
    # One row for all, or each its own.
    positions, places = (x.reshape(-1, x.shape[-1]) for x in (positions, places))
    distance = (positions[:, :, None] - places[:, None])[:, None, None]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    q = q.reshape(batch, length, groups // n, n, heads // groups, width)
    q = q.transpose(0, 2, 4, 1, 3, 5).reshape(batch, groups // n, -1, n * width)
    products = _products(q, k, of_keys, n)
    products = products.reshape(batch, groups, -1, *seen.shape[-2:]) * scale
    if cap is not None:
        products = cap * jnp.tanh(products / cap)
    products = jnp.where(seen, products, -jnp.inf)
    weights = jax.nn.softmax(products).astype(v.dtype)
    weights = weights.reshape(batch, groups // n, n, q.shape[2], -1)
    mixed = _mixed(weights, v, of_keys)
    mixed = mixed.reshape(batch, groups // n, heads // groups, length, n, width)
    mixed = mixed.transpose(0, 3, 1, 4, 2, 5)
    return mixed.reshape(batch, length, heads * width), cache


# Below, n heads lie side by side. On a GPU, the products of each head read keys and
# values as they are stored. Elsewhere only the products of all n do, with zeros instead
# of the other heads. They have two axes of the batch before two of matrices, as XLA's
# CPU backend requires for it under `vmap`.


def _products(q: jax.Array, k: jax.Array, of_keys: str, n: int) -> jax.Array:
    """[B, G, n, Q, S] of queries [B, G, Q, n · width] and keys [B, S, G, n · width]."""
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def with_zeros(q: jax.Array, k: jax.Array) -> jax.Array:
        spread = jnp.where(_own(n, q.shape[-1]), q[:, :, None], 0)
        spread = spread.reshape(*q.shape[:2], -1, q.shape[-1])
        products = einsum(f"bkqd,{of_keys}->bkqs", spread, k)
        return products.reshape(*q.shape[:2], n, q.shape[2], -1)

    def head_by_head(q: jax.Array, k: jax.Array) -> jax.Array:
        q, k = (x.reshape(*x.shape[:-1], n, -1) for x in (q, k))
        return einsum(f"bkqhd,{of_keys[:-1]}hd->bkhqs", q, k)

    if n == 1:
        return einsum(f"bkqd,{of_keys}->bkqs", q, k)[:, :, None]
    return lax.platform_dependent(q, k, cuda=head_by_head, default=with_zeros)


def _mixed(weights: jax.Array, v: jax.Array, of_keys: str) -> jax.Array:
    """[B, G, Q, n · width] of weights [B, G, n, Q, S] and values, as keys."""
    n = weights.shape[2]

    def with_zeros(weights: jax.Array, v: jax.Array) -> jax.Array:
        rows = weights.reshape(*weights.shape[:2], -1, weights.shape[-1])
        mixed = jnp.einsum(f"bkqs,{of_keys}->bkqd", rows, v)
        mixed = mixed.reshape(*weights.shape[:-1], -1)
        return jnp.where(_own(n, v.shape[-1]), mixed, 0).sum(2)

    def head_by_head(weights: jax.Array, v: jax.Array) -> jax.Array:
        v = v.reshape(*v.shape[:-1], n, -1)
        mixed = jnp.einsum(f"bkhqs,{of_keys[:-1]}hd->bkqhd", weights, v)
        return mixed.reshape(*mixed.shape[:3], -1)

    if n == 1:
        return jnp.einsum(f"bkqs,{of_keys}->bkqd", weights[:, :, 0], v)
    return lax.platform_dependent(weights, v, cuda=head_by_head, default=with_zeros)


def _own(n: int, width: int) -> np.ndarray:
    """Which numbers of a row are of which head, [1, 1, n, 1, width]."""
    of_head = np.arange(width) * n // width == np.arange(n)[:, None]
    return of_head[None, None, :, None]


def _written(
    old: jax.Array, new: jax.Array, layer: jax.Array, slot: jax.Array
) -> jax.Array:
    """Keys or values of a cache, after new tokens of a layer.

    Args:
      old: [..., layers, B, heads / n, S, n · width of a head], of members, if any.
      new: [..., B, T, heads / n, n · width of a head].
      layer: The number of the layer.
      slot: The slot of the first token.
    """
    at = *[0] * (old.ndim - 5), layer, 0, 0, slot, 0
    new = jnp.expand_dims(new.swapaxes(-3, -2), -5)
    return lax.dynamic_update_slice(old, new, at)


# Under `vmap`, JAX would make a scatter of the slice, which reads what it writes to.
_write = jax.custom_batching.custom_vmap(_written)


@_write.def_vmap
def _write_of_members(
    axis_size: int, batched: list[bool], *args: jax.Array
) -> tuple[jax.Array, bool]:
    if any(batched[2:]):  # Members that are at different tokens.
        return jax.vmap(_written, [0 if x else None for x in batched])(*args), True
    old, new = (
        x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, is_batched in zip(args[:2], batched[:2], strict=True)
    )
    return _write(old, new, *args[2:]), True
