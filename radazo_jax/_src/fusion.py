"""Control of the compiler: which numbers it may draw again."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def tie(tree: Any, *after: jax.Array) -> Any:
    """`tree`, not to be read before the values `after` are computed.

    XLA's CPU backend ignores this: there `compute_once` has its own `after`.
    """
    return lax.optimization_barrier((tree, after))[0] if after else tree


def compute_once(
    fun: Callable[..., Any], *args: Any, after: Sequence[jax.Array] = ()
) -> Any:
    """`fun(*args)`, whose results XLA's CPU backend computes once and stores.

    That backend drops optimization barriers, then fuses elementwise producers into
    each of their consumers: random numbers that are read three times are drawn three
    times. It does not fuse across the boundary of a conditional, so on the CPU
    `fun` becomes the branch that is always taken. Elsewhere this is a plain call.

    Args:
      fun: A function of arrays to a tree of arrays.
      *args: The arguments of `fun`.
      after: Values that the CPU must compute before it enters `fun`.

    Returns:
      `fun(*args)`.
    """

    def on_cpu(*args: Any) -> Any:
        # The barrier stands until conditionals of constants have been simplified.
        word = lax.optimization_barrier(jnp.uint32(1))
        for value in () if _shards() else after:
            if value.size and jnp.issubdtype(value.dtype, jnp.floating):
                word += (value.reshape(-1)[0] > 0).astype(jnp.uint32)
        shapes = jax.eval_shape(fun, *args)

        def never(*args: Any) -> Any:
            del args
            # Of the same type in all: sharding, and axes of a shard_map they vary over.
            return jax.tree.map(jnp.zeros_like, shapes)

        return lax.cond(_always(word), fun, never, *args)

    return lax.platform_dependent(*args, cpu=on_cpu, default=fun)


@jax.custom_jvp
def rounded(values: jax.Array) -> jax.Array:
    """The same values, rounded to their dtype before anything is computed of them.

    XLA may fuse an operation that makes a value with one that reads it, and round
    once: a multiplication and a subtraction become one instruction. What is computed
    of the values then differs in the last bit from the same computation on values
    that were stored. No such instruction reaches through an operation on bits.

    It has the derivative of the identity, because JAX does not differentiate
    through bits.

    Args:
      values: An array of a real floating-point dtype.

    Returns:
      The values.
    """
    stored = f"uint{jnp.finfo(values.dtype).bits}"
    words = lax.bitcast_convert_type(values, stored)
    # Four bits are computed with as a byte.
    words = words.astype(f"uint{8 * values.dtype.itemsize}")
    # w² + w is even. Compilers do not know it.
    zeros = (words * words + words) & words.dtype.type(1)
    return lax.bitcast_convert_type((words ^ zeros).astype(stored), values.dtype)


@rounded.defjvp
def _(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return rounded(*primals), tangents[0]


def _shards() -> bool:
    """Whether the compiler may shard arrays over axes of the mesh.

    An element of such an array would have to be sent.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return any(
        size > 1 for name, size in mesh.shape.items() if name not in mesh.manual_axes
    )


@jax.custom_batching.custom_vmap
def _always(word: jax.Array) -> jax.Array:
    # An odd number is not zero, but XLA does not reason about bits.
    return (word | np.uint32(1)) != np.uint32(0)


@_always.def_vmap
def _(
    axis_size: int, in_batched: list[bool], words: jax.Array
) -> tuple[jax.Array, bool]:
    # One answer for the whole batch: under a batched predicate both branches would
    # run, and nothing be stored.
    del axis_size
    return _always(words[0] if in_batched[0] else words), False
