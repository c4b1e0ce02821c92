"""The layout of arrays in the memory of a TPU."""

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from radazo_jax._src import targets


def row_major(x: jax.Array) -> jax.Array:
    """`x`, laid out by XLA's TPU backend as JAX lays out an argument.

    That backend chooses how a stack lies from the products with its slices. The layout
    of an argument reaches a loop over the stack, but not a loop in a loop, such as
    that over the layers in that over the directions; there it copies whole stacks,
    transposed, ahead of the loops, and holds both. A slice whose layout is given leaves
    the stack as it is, and is still read inside of its product.
    """
    return _row_major_p.bind(x)


def _constrain(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _lower_for_tpu(ctx: mlir.LoweringRuleContext, x: Any) -> Any:
    # JAX makes no promise that a stored program can hold the constraint, and would
    # refuse to export it. The constraint would gather a sharded array.
    stored = getattr(ctx.module_context.lowering_parameters, "for_export", True)
    if stored or not targets.of_one_device(ctx):
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
