"""Many replies at once, as one pure function that can be perturbed.

    replies = generate_tokens(model, prompts, lengths, 64, key, 1.0, stop=(2,))

Each row has a prompt of its own length and a cache of keys and values. The loop ends
when all rows have ended.

A population is `jax.vmap` of `radazo_jax.perturb` of it. The condition of a loop under
`vmap` would differ from member to member, and each member's cache would be copied at
each token. `axis_names` names the axes of `vmap`: the loop then ends when the rows of
all members have ended.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import radazo_jax as zo
from radazo_llm.models.attention import EMPTY, Cache
from radazo_llm.models.model import LanguageModel

AXIS_NAMES = ("directions", "sides")  # Of `of_members`.


class Replies(NamedTuple):
    """The reply to each prompt.

    Attributes:
      tokens: int32 [B, num_tokens]; 0 after the end.
      lengths: The number of tokens before the end: int32 [B].
      ended: Whether a stop token ended it: bool [B].
    """

    tokens: jax.Array
    lengths: jax.Array
    ended: jax.Array


class _Loop(NamedTuple):
    """The state of the loop over tokens; arrays of rows are [B]."""

    number: jax.Array  # Of the latest token, int32 ().
    goes_on: jax.Array  # Whether any row of any member has not ended, bool ().
    token: jax.Array
    replies: Replies
    cache: Cache


def _with_token(
    replies: Replies, token: jax.Array, number: jax.Array, ends: jax.Array
) -> Replies:
    """The replies with another token, at place `number`."""
    is_end = jnp.any(token[:, None] == ends[None], axis=1)
    alive = ~replies.ended & ~is_end
    kept = jnp.where(alive, token, 0)[:, None]
    tokens = lax.dynamic_update_slice(replies.tokens, kept, (jnp.int32(0), number))
    return Replies(tokens, replies.lengths + alive.astype(jnp.int32), ~alive)


def _without_padding(cache: Cache, lengths: jax.Array) -> Cache:
    """The cache after prompts, without what follows them, which no token sees."""
    padding = cache.positions >= lengths[:, None]
    positions = jnp.where(padding, EMPTY, cache.positions)
    return dataclasses.replace(cache, positions=positions)


def generate_tokens(
    model: LanguageModel,
    prompts: jax.Array,
    lengths: jax.Array,
    num_tokens: int,
    key: jax.Array,
    temperature: jax.typing.ArrayLike,
    *,
    stop: Sequence[int] = (),
    axis_names: Sequence[str] = (),
) -> Replies:
    """The tokens that follow each prompt.

    Args:
      model: A model of any family, with or without adapters.
      prompts: int32 [B, T], padded on the right with any token.
      lengths: The tokens of each prompt, at least 1: int32 [B].
      num_tokens: The largest number of tokens to generate.
      key: The key of the draws, consumed. All members of a population may share it:
        their replies then differ by their parameters alone.
      temperature: 0 takes the likeliest token; above, tokens are drawn with logits
        divided by it. If it is the number 0 and not an array, no noise is drawn.
      stop: Tokens that end a reply, and are not part of it.
      axis_names: The axes of a `jax.vmap` around this function; without it, they are
        ignored.

    Raises:
      ValueError: If the model has too few positions, or `num_tokens` is not positive.
    """
    batch, width = prompts.shape
    longest, total = model.config.max_position_embeddings, width + num_tokens
    if num_tokens < 1 or total > longest:
        raise ValueError(
            "num_tokens must be positive, and fit behind the prompts into the model's "
            f"{longest} positions; got {num_tokens} after {width}."
        )
    greedy = isinstance(temperature, int | float) and temperature == 0
    heat = jnp.asarray(temperature, jnp.float32)
    ends = jnp.asarray(tuple(stop), jnp.int32)

    def choose(hidden: jax.Array, number: jax.Array) -> jax.Array:
        logits = model.logits(hidden)
        if greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        noise = jax.random.gumbel(jax.random.fold_in(key, number), logits.shape)
        noise = noise * heat  # As dividing the logits, and of use at 0 too.
        return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)

    names = tuple(filter(_is_bound, axis_names))

    def any_left(alive: jax.Array) -> jax.Array:
        count = jnp.sum(alive, dtype=jnp.int32)
        return (lax.psum(count, names) if names else count) > 0

    def body(loop: _Loop) -> _Loop:
        at = lengths + loop.number
        x, cache = model.run(model.embed(loop.token[:, None]), at, loop.cache)
        number = loop.number + 1
        token = choose(x[:, 0], number)
        replies = _with_token(loop.replies, token, number, ends)
        return _Loop(number, any_left(~replies.ended), token, replies, cache)

    x = model.embed(prompts)
    x, cache = model.run(x, 0, model.empty_cache(batch, total))
    cache = _without_padding(cache, lengths)
    last = (lengths - 1)[:, None, None]
    hidden = jnp.take_along_axis(x, last, axis=1)[:, 0]
    zero = jnp.int32(0)
    token = choose(hidden, zero)
    counts = jnp.zeros(batch, jnp.int32)
    empty = Replies(jnp.zeros((batch, num_tokens), jnp.int32), counts, counts > 0)
    replies = _with_token(empty, token, zero, ends)
    start = _Loop(zero, any_left(~replies.ended), token, replies, cache)
    return lax.while_loop(
        lambda loop: loop.goes_on & (loop.number < num_tokens - 1), body, start
    ).replies


@functools.partial(
    jax.jit, static_argnames=("graphdef", "num_tokens", "temperature", "stop")
)
def replies_of(
    graphdef: Any,
    states: tuple[Any, ...],
    prompts: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    *,
    num_tokens: int,
    temperature: float,
    stop: tuple[int, ...],
) -> Replies:
    """The tokens that follow each prompt, compiled, of a model in parts."""
    model = nnx.merge(graphdef, *states)
    options = num_tokens, key, temperature
    return generate_tokens(model, prompts, lengths, *options, stop=stop)


def _is_bound(axis_name: str) -> bool:
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def of_members(
    fun: Callable[[Any], Any], params: Any, points: zo.estimators.Points
) -> Any:
    """A function at each member of a population, without a copy of the parameters.

    Args:
      fun: A function of the parameters to a tree of arrays. It may take `AXIS_NAMES`.
      params: The parameters.
      points: The members, whose directions are best cached.

    Returns:
      The tree, whose arrays have an axis of members first: [K · m, ...].
    """

    def at(direction: Any, scale: jax.Array) -> Any:
        return zo.perturb(fun)(params, direction, scale)

    along = jax.vmap(at, (None, 0), axis_name=AXIS_NAMES[1])
    found = jax.vmap(along, axis_name=AXIS_NAMES[0])(points.directions, points.scales)
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), found)
