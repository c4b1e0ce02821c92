"""Control of XLA: what it computes once, for which devices, and in which layout."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from radazo_jax._src.base import trees
from radazo_jax._src.base.trees import Tree

_T = TypeVar("_T")


def tie(tree: _T, *after: jax.Array) -> _T:
    """Returns `tree`, which is read once the values `after` are computed.

    XLA's CPU backend ignores this: there `compute_once` has its own `after`.
    """
    return barrier((tree, after))[0] if after else tree


def barrier(tree: _T) -> _T:
    """Applies `lax.optimization_barrier`, to which a checker of keys lends them.

    JAX's takes a key for used up by each primitive that it does not know.
    """
    held = lax.optimization_barrier(jax.tree.map(trees.key_words, tree))
    return jax.tree.map(trees.of_key_words, held, tree)


def tie_on_tpu(tree: _T, *after: jax.Array) -> _T:
    """Applies `tie` for TPUs alone: other compilers would store what they fuse."""
    if not after:
        return tree
    return lax.platform_dependent(
        tree, *after, tpu=tie, default=lambda tree, *after: tree
    )


def compute_once(
    fun: Callable[..., _T], *args: Tree, after: Sequence[jax.Array] = ()
) -> _T:
    """Calls `fun(*args)`, whose results XLA's CPU backend computes once and stores.

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
    # Traced once for both platforms and for the shapes.
    fun = jax.jit(fun, inline=True)

    def on_cpu(*args: Tree) -> _T:
        # The barrier stands until conditionals of constants have been simplified.
        word = lax.optimization_barrier(jnp.uint32(1))
        for value in () if _shards() else after:
            if value.size and jnp.issubdtype(value.dtype, jnp.floating):
                word += (value.reshape(-1)[0] > 0).astype(jnp.uint32)
        shapes = jax.eval_shape(fun, *args)

        def never(*args: Tree) -> _T:
            del args
            # Of the same type in all: sharding, and axes of a shard_map they vary over.
            return jax.tree.map(jnp.zeros_like, shapes)

        return lax.cond(_always(word), fun, never, *args)

    return lax.platform_dependent(*args, cpu=on_cpu, default=fun)


def in_one_kernel(fun: Callable[..., _T], *args: Tree) -> _T:
    """Calls `fun(*args)` for numbers; XLA's CPU backend compiles it as one kernel.

    That backend compiles each fusion by itself, which takes most of the time of a
    first call, and computes what several fusions read in each of them. A small loop
    becomes one kernel, so on the CPU `fun` is the body of a loop that ends after it.
    Elsewhere, and if it is differentiated, this is a plain call.

    Args:
      fun: A function of small arrays to a tree of small arrays.
      *args: The arguments of `fun`, trees of arrays, at least one.

    Returns:
      `fun(*args)`.
    """
    fun = jax.jit(fun, inline=True)

    def on_cpu(*args: Tree) -> _T:
        first = jax.tree.leaves(args)[0]
        # Read from an argument, so that the compiler does not know how often it loops.
        begins = _always((first.reshape(-1)[0] != 0).astype(jnp.uint32))
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(fun, *args))

        def body(carry: tuple[jax.Array, _T]) -> tuple[jax.Array, _T]:
            return jnp.zeros_like(carry[0]), fun(*args)

        return lax.while_loop(lambda carry: carry[0], body, (begins, zeros))[1]

    @jax.custom_jvp
    def call(*args: Tree) -> _T:
        return lax.platform_dependent(*args, cpu=on_cpu, default=fun)

    call.defjvp(functools.partial(jax.jvp, fun))
    return call(*args)


@jax.custom_jvp
def rounded(values: jax.Array) -> jax.Array:
    """Rounds values to their dtype before anything is computed of them.

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
    bits = jnp.finfo(values.dtype).bits
    if bits < 8:
        # XLA's CPU backend cannot read some arrays of four bits as words.
        return rounded(values.astype(jnp.float32)).astype(values.dtype)
    words = lax.bitcast_convert_type(values, f"uint{bits}")
    # w² + w is even. Compilers do not know it.
    zeros = (words * words + words) & words.dtype.type(1)
    return lax.bitcast_convert_type(words ^ zeros, values.dtype)


@rounded.defjvp
def _(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return rounded(*primals), tangents[0]


def _shards() -> bool:
    """Returns whether the compiler may shard arrays over axes of the mesh.

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


def of_one_device(ctx: mlir.LoweringRuleContext) -> bool:
    """Returns whether an equation is lowered for the program of a single device."""
    return getattr(ctx.module_context.axis_context, "num_devices", None) == 1


def on_one_gpu(fun: Callable[[], Tree], otherwise: Callable[[], Tree]) -> Tree:
    """Calls `fun()` in the program of a single GPU, else `otherwise()`.

    Args:
      fun: A function of no arguments.
      otherwise: A function of no arguments, to the same shapes and dtypes.

    Returns:
      The result of one of them.
    """
    otherwise = jax.jit(otherwise, inline=True)
    alone = _on_one_device(fun, otherwise)
    return lax.platform_dependent(cpu=otherwise, tpu=otherwise, default=alone)


def on_one_cpu(fun: Callable[[], Tree], otherwise: Callable[[], Tree]) -> Tree:
    """Calls `fun()` in the program of a single CPU, else `otherwise()`."""
    otherwise = jax.jit(otherwise, inline=True)
    alone = _on_one_device(fun, otherwise)
    return lax.platform_dependent(cpu=alone, default=otherwise)


def _on_one_device(
    fun: Callable[[], Tree], otherwise: Callable[[], Tree]
) -> Callable[[], Tree]:
    # The compiler removes the branch that is never taken.
    return lambda: lax.cond(_one_device_p.bind(), fun, otherwise)


# A primitive, because only its lowering sees what the program is for.
_one_device_p = core.Primitive("one_device")
_one_device_p.def_impl(lambda: jnp.zeros((), jnp.bool_))
_one_device_p.def_abstract_eval(lambda: jax.typeof(np.bool_(False)))
mlir.register_lowering(
    _one_device_p, lambda ctx: [mlir.ir_constant(np.bool_(of_one_device(ctx)))]
)


def on_any_mesh(program: Callable[..., _T], out_sharding: Tree) -> Callable[..., _T]:
    """Lets the compiler shard the arrays of a program if a mesh has explicit axes.

    Args:
      program: A function of arrays.
      out_sharding: The sharding of its results, for these axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes:
        return program
    return jax.sharding.auto_axes(
        program, axes=mesh.explicit_axes, out_sharding=out_sharding
    )


def specs_of(params: optax.Params) -> Tree:
    """Returns the partition specs of arrays by their types, a tree like `params`."""
    return jax.tree.map(lambda p: jax.typeof(p).sharding.spec, params)


def row_major(x: jax.Array) -> jax.Array:
    """Lets XLA's TPU backend lay out `x` as JAX lays out an argument.

    That backend chooses how a stack lies from the products with its slices. The layout
    of an argument reaches a loop over the stack, but not a loop in a loop, such as
    the loop over the layers in the loop over the directions. There the backend copies
    whole stacks, transposed, ahead of the loops, and holds both. A slice whose layout
    is given leaves the stack as it is. Use it in a loop in a loop alone, because it
    costs the memory of a few slices.
    """
    return _row_major_p.bind(x)


def _constrain(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _lower_for_tpu(ctx: mlir.LoweringRuleContext, x: Any) -> Any:
    # JAX makes no promise that a stored program can hold the constraint, and would
    # refuse to export it. The constraint would gather a sharded array.
    stored = getattr(ctx.module_context.lowering_parameters, "for_export", True)
    if stored or not of_one_device(ctx):
        return [x]
    return mlir.lower_fun(_constrain, multiple_results=False)(ctx, x)


# A primitive of its own, because only its lowering sees what the program is for.
_row_major_p = core.Primitive("row_major")
_row_major_p.def_impl(lambda x: x)
_row_major_p.def_abstract_eval(lambda x: x)
ad.deflinear2(_row_major_p, lambda cotangent, _: [cotangent])
batching.defvectorized(_row_major_p)
mlir.register_lowering(_row_major_p, lambda ctx, x: [x])
mlir.register_lowering(_row_major_p, _lower_for_tpu, platform="tpu")
