"""Common parts of the language models, in Flax NNX, for forward passes.

The layers are one stack of parameters that a scan runs over, so that a perturbed
evaluation (`radazo_jax.perturb`) builds no more than a layer at a time. `opt.py` and
`decoder.py` have the layers of the families.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

T = TypeVar("T", bound=nnx.Module)
INIT = nnx.initializers.normal(0.02)
EMPTY = 2**30  # A position after all others.
_LARGEST = float(jnp.finfo(jnp.float32).max)
_LANES = 128  # To this many numbers a TPU pads the last axis of an array.


class Config(Protocol):
    """The description of all models, as in their `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int

    def to_dict(self) -> dict[str, Any]:
        """The entries of the model's `config.json`."""

    def build(
        self, *, dtype: Any = jnp.bfloat16, remat: bool = False, rngs: nnx.Rngs
    ) -> "LanguageModel":
        """A model of these sizes, with random parameters."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far.

    The next tokens of all rows are written to the same slots, whatever their positions:
    a loop over tokens then writes a slice, and no more than it. Narrow heads lie side
    by side, so that a TPU pads nothing.

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


class LanguageModel(nnx.Module):
    """A decoder.

    Sequences are padded on the right: attention is causal, so that no mask is needed.

    Args:
      config: The sizes.
      dtype: The dtype of parameters and activations. The softmax of the attention,
        norms and logits are float32.
      remat: Whether a gradient by backpropagation computes each layer anew, rather
        than storing its activations.
      rngs: The keys of random parameters.
    """

    # The place of the model in a checkpoint, and prefixes of the parts of a layer.
    PREFIX: ClassVar[str]
    PARENTS: ClassVar[Mapping[str, str]]

    def __init__(self, config: Any, dtype: Any, remat: bool, rngs: nnx.Rngs) -> None:
        self.config, self.dtype, self.remat = config, dtype, remat
        # The place of the first layer in the model that these are layers of.
        self.first_layer = 0
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            embedding_init=INIT,
            **kinds(dtype, rngs),
        )
        # Embeddings before the tokens' embeddings, [P, width]; see lora.py.
        self.prompt: nnx.Variable | None = nnx.data(None)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """The input of the first layer for tokens int32 [B, T], [B, T, width]."""
        return self.embed_tokens(tokens)

    def after_prompt(self, x: jax.Array) -> jax.Array:
        """Embedded tokens after the soft prompt, if there is one."""
        if self.prompt is None:
            return x
        prompt = self.prompt[...].astype(x.dtype)
        prompt = jnp.broadcast_to(prompt[None], (len(x), *prompt.shape))
        return jnp.concatenate([prompt, x], axis=1)

    def run(
        self, x: jax.Array, start: Any = 0, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """The final hidden states of embedded tokens, [B, T, width].

        Args:
          x: The input of the first layer.
          start: The position of the first of them; of each row, int32 [B], if rows
            differ.
          cache: Keys and values of earlier tokens, if start is not 0; see
            `empty_cache`.

        Returns:
          The states, and the cache with these tokens.

        Raises:
          ValueError: If T is more than the model has positions.
        """
        longest = self.config.max_position_embeddings
        if x.shape[1] > longest:
            raise ValueError(
                f"tokens must be at most {longest} with the soft prompt "
                f"(max_position_embeddings); got {x.shape[1]}."
            )
        positions = jnp.arange(x.shape[1])
        if jnp.ndim(start):
            positions = start[:, None] + positions[None]
        else:
            positions = start + positions
        x, cache = self.through(self.at_positions(x, positions), positions, cache)
        return self.normalized(x), cache

    def through(
        self, x: jax.Array, positions: jax.Array, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """Returns the outputs of the last layer, before the final norm, and the cache.

        Args:
          x: Inputs of the first layer, [B, T, width].
          positions: int32 [T], or [B, T] if rows differ.
          cache: As for `run`.
        """
        graphdef, stack = nnx.split(self.layers)
        if cache is not None:
            new = jnp.broadcast_to(positions, x.shape[:2])
            at = jnp.int32(0), cache.slot
            seen = lax.dynamic_update_slice(cache.positions, new, at)
            cache = dataclasses.replace(cache, positions=seen)

        # nnx.scan would return the parameters, and so build perturbed ones.
        def body(carry: Any, of_layer: Any) -> tuple[Any, None]:
            x, cache = carry
            parameters, constants, number = of_layer
            layer = nnx.merge(graphdef, parameters)
            return layer(x, positions, cache, number, *constants), None

        body = jax.checkpoint(body) if self.remat else body
        numbers = np.arange(self.config.num_hidden_layers, dtype=np.int32)
        (x, cache), _ = lax.scan(body, (x, cache), (stack, self.of_layers(), numbers))
        if cache is not None:
            slot = cache.slot + x.shape[1]
            cache = dataclasses.replace(cache, slot=slot, empty=False)
        return x, cache

    def at_positions(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Embedded tokens, with embeddings of positions if the model has these."""
        del positions
        return x

    def of_layers(self) -> tuple[Any, ...]:
        """Constants that differ between layers, [layers, ...]."""
        return ()

    def empty_cache(self, batch_size: int, length: int) -> Cache:
        """Room for the keys and values of so many tokens, of all layers."""
        layers, heads, width = self.cache_shape
        fit = (n for n in range(1, heads + 1) if heads % n == 0 and n * width <= _LANES)
        n = max(fit, default=1)
        shape = layers, batch_size, heads // n, length, n * width
        keys, values = jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)
        positions = jnp.full((batch_size, length), EMPTY, jnp.int32)
        return Cache(keys, values, positions, jnp.int32(0), empty=True)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """The final hidden states of tokens int32 [B, T], [B, T, width].

        Args:
          tokens: The tokens; or floats [B, T, width], the outputs of earlier layers
            (see `frozen.py`).

        Raises:
          ValueError: If T is more than the model has positions.
        """
        if jnp.issubdtype(tokens.dtype, jnp.floating):
            x, _ = self.through(tokens, jnp.arange(tokens.shape[1]))
            return self.normalized(x)
        x, _ = self.run(self.after_prompt(self.embed(tokens)))
        return x[:, x.shape[1] - tokens.shape[1] :]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The logits of hidden states [..., width], float32 [..., vocab]."""
        embedding = self.embed_tokens.embedding[...]
        return jnp.dot(hidden, embedding.T, preferred_element_type=jnp.float32)

    def logits_of(self, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        """The logits of some tokens int32 [B, C], for states [B, width]."""
        rows = self.embed_tokens.embedding[tokens]
        product = "bd,bcd->bc"
        return jnp.einsum(product, hidden, rows, preferred_element_type=jnp.float32)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of tokens int32 [B, T], float32 [B, T, vocab]."""
        return self.logits(self.hidden(tokens))


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
            write(old, new, layer, cache.slot)
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


def _write(
    old: jax.Array, new: jax.Array, layer: jax.Array, slot: jax.Array
) -> jax.Array:
    at = *[0] * (old.ndim - 5), layer, 0, 0, slot, 0
    new = jnp.expand_dims(new.swapaxes(-3, -2), -5)
    return lax.dynamic_update_slice(old, new, at)


write = jax.custom_batching.custom_vmap(_write)
write.__doc__ = """Keys or values in which those of new tokens are written.

Under `vmap`, JAX makes a scatter of such a slice, which reads what it writes to.

Args:
  old: [..., layers, B, heads / n, S, n · width of a head], of members, if any.
  new: [..., B, T, heads / n, n · width of a head].
  layer: The number of the layer.
  slot: The slot of the first token.
"""


@write.def_vmap
def _write_for_members(
    axis_size: int, batched: list[bool], *args: jax.Array
) -> tuple[jax.Array, bool]:
    if any(batched[2:]):  # Members that are at different tokens.
        return jax.vmap(_write, [0 if x else None for x in batched])(*args), True
    old, new = (
        x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, is_batched in zip(args, batched[:2], strict=False)
    )
    return write(old, new, *args[2:]), True


def check_sizes(values: Mapping[str, Any]) -> None:
    """Raises a ValueError unless all are positive integers below 2^31."""
    for name, value in values.items():
        if type(value) is not int or not 0 < value < 2**31:
            raise ValueError(
                f"{name} must be a positive integer below 2^31; got {value!r:.80}."
            )


def one_of(known: Mapping[str, Any], name: str, value: Any) -> str:
    """The value; raises a ValueError unless it is a key of these."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(
            f"{name} must be one of {', '.join(known)}; got {value!r:.80}."
        )
    return value


def positive(values: Mapping[str, Any], name: str) -> float:
    """An entry that must be a positive number that float32 holds."""
    value = values.get(name)
    if type(value) not in (int, float) or not 0 < value <= _LARGEST:
        raise ValueError(f"{name} must be a positive number; got {value!r:.80}.")
    return float(value)


def stacked(num: int, make: Callable[[nnx.Rngs], T], rngs: nnx.Rngs) -> T:
    """``num`` modules as one, whose parameters have a leading axis of that length."""
    return nnx.split_rngs(splits=num)(nnx.vmap(make))(rngs)


def kinds(dtype: Any, rngs: nnx.Rngs) -> dict[str, Any]:
    """The arguments of Flax's layers for their parameters."""
    return {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
