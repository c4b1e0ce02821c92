"""Tokens that a model writes."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from radazo_llm.models.attention import Cache
from radazo_llm.models.model import LanguageModel

_MULTIPLE = 64  # Of tokens, so that prompts of many lengths share a program.


def generate(
    model: LanguageModel,
    tokens: Sequence[int],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    key: jax.Array,
    stop: Sequence[int] = (),
) -> Iterator[int]:
    """The tokens that follow, one by one.

    Args:
      model: A model of any family, with adapters or a soft prompt or without.
      tokens: The tokens to continue.
      max_tokens: The largest number; fewer if the model has no positions for them.
      temperature: 0 takes the likeliest token; above, tokens are drawn with logits
        divided by it.
      key: The key of the draws, consumed.
      stop: Tokens that end it, and are not returned.

    Raises:
      ValueError: If there is no token to continue, or no position for another, or
        the model has no embedding for a token.
    """
    longest = model.config.max_position_embeddings
    behind = 0 if model.prompt is None else len(model.prompt[...])
    number = len(tokens)
    if not 0 < number < longest - behind:
        raise ValueError(
            f"tokens must be from 1 to {longest - behind - 1}; got {number}."
        )
    if max(tokens) >= model.config.vocab_size:
        raise ValueError(
            "tokens must have ids below the model's vocab_size "
            f"({model.config.vocab_size}); got {max(tokens)}."
        )
    graphdef, state = nnx.split(model)
    total = min(behind + number + max_tokens, longest)
    padded = np.zeros((1, min(_rounded(number), longest - behind)), np.int32)
    padded[0, :number] = tokens
    room = max(_rounded(total), behind + padded.shape[1])
    step = functools.partial(_step, graphdef, state)
    cache, heat = model.empty_cache(1, room), jnp.float32(temperature)
    at, last = 0, behind + number - 1
    for i in range(total - behind - number):
        token, cache = step(
            padded, at, last - at, cache, heat, jax.random.fold_in(key, i), at == 0
        )
        if int(token) in stop:
            return
        yield int(token)
        at = last = last + 1
        padded = token.reshape(1, 1)


def _rounded(number: int) -> int:
    return -(-number // _MULTIPLE) * _MULTIPLE


@functools.partial(jax.jit, static_argnames="first", donate_argnames="cache")
def _step(
    graphdef: Any,
    state: Any,
    tokens: jax.Array,
    start: jax.Array,
    last: jax.Array,
    cache: Cache,
    temperature: jax.Array,
    key: jax.Array,
    first: bool,
) -> tuple[jax.Array, Cache]:
    """The token after number `last` of these."""
    model = nnx.merge(graphdef, state)
    x = model.embed(tokens)
    # Over the padding of the prompt.
    cache = dataclasses.replace(cache, slot=jnp.asarray(start, jnp.int32))
    x, cache = model.run(model.after_prompt(x) if first else x, start, cache)
    logits = model.logits(jnp.take(x[0], last, axis=0))
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, logits.argmax()).astype(jnp.int32), cache


def written(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """The text of tokens, as soon as it is certain."""
    stream = DecodeStream(skip_special_tokens=True)
    for token in tokens:
        yield stream.step(tokenizer, token) or ""
