"""The keys from which the steps of a run draw their directions and their batches."""

import functools

import jax
import jax.numpy as jnp

from radazo_jax._src import xla
from radazo_jax._src.contracts import Draw
from radazo_jax._src.numbers import generator

# What a key is for, as the number that `jax.random.split` gives it.
DIRECTIONS, BATCH = 0, 1


def draw_of(key: jax.Array, step: jax.Array) -> Draw:
    """The draw of a step of the run with this key."""
    # The key of the first step is the key of the run: no other step has it.
    run_key = key_of(key, jnp.zeros((), jnp.int32), DIRECTIONS)
    return Draw(key_of(key, step, DIRECTIONS), run_key, step)


# Traced once for all programs, which all have these equations.
@functools.partial(jax.jit, static_argnames=["use"], inline=True)
def key_of(key: jax.Array, step: jax.Array, use: int) -> jax.Array:
    """The key of a step for its directions or for its batch.

    They are the keys of `jax.random.split(jax.random.fold_in(key, step))`.
    """

    def data(words: jax.Array, step: jax.Array) -> jax.Array:
        made = jax.random.wrap_key_data(words, impl=impl)
        for number in (step.astype(jnp.uint32), jnp.uint32(use)):
            made = generator.fold_in(made, number)
        return jax.random.key_data(made)

    impl = jax.random.key_impl(key)
    # Apart from the draws, each of which XLA would have compute the key anew.
    found = xla.in_one_kernel(data, jax.random.key_data(key), step)
    return jax.random.wrap_key_data(found, impl=impl)
