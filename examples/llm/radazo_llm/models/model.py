"""Common parts of the language models, in Flax NNX, for forward passes.

The layers are one stack of parameters that a scan runs over, so that a perturbed
evaluation (`radazo_jax.perturb`) builds no more than a layer at a time. `opt.py` and
`decoder.py` have the layers of the families.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from radazo_llm.models.attention import Cache, empty_cache

T = TypeVar("T", bound=nnx.Module)
INIT = nnx.initializers.normal(0.02)
_LARGEST = float(jnp.finfo(jnp.float32).max)


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


class Embedding(nnx.Embed):
    """Embeddings of tokens, whose products with hidden states may be logits."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The logits of hidden states [..., width], float32 [..., vocab]."""
        embedding = self.embedding[...]
        return jnp.dot(hidden, embedding.T, preferred_element_type=jnp.float32)


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
        self.embed_tokens = Embedding(
            config.vocab_size,
            config.hidden_size,
            embedding_init=INIT,
            **kinds(dtype, rngs),
        )

    def embed(self, tokens: jax.Array) -> jax.Array:
        """The input of the first layer for tokens int32 [B, T], [B, T, width]."""
        return self.embed_tokens(tokens)

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
                f"tokens must be at most {longest} (max_position_embeddings); got "
                f"{x.shape[1]}."
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
        return empty_cache(*self.cache_shape, batch_size, length, self.dtype)

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
        return self.run(self.embed(tokens))[0]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The logits of hidden states [..., width], float32 [..., vocab]."""
        return self.embed_tokens.logits(hidden)

    def logits_of(self, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        """The logits of some tokens int32 [B, C], for states [B, width]."""
        rows = self.embed_tokens(tokens)
        product = "bd,bcd->bc"
        return jnp.einsum(product, hidden, rows, preferred_element_type=jnp.float32)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of tokens int32 [B, T], float32 [B, T, vocab]."""
        return self.logits(self.hidden(tokens))


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
