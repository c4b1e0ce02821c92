"""Products with a large perturbed matrix, of which one block at a time is built.

XLA's GPU backend does not fuse random numbers into a product, but stores the matrix
that is multiplied. A perturbed embedding can take more memory than all activations.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from radazo_jax._src.directions.elements import LazyElements
from radazo_jax._src.perturb.equations import bind
from radazo_jax._src.perturb.views import View

# A matrix of more elements than `_MAX_BUILT` is built in blocks. A block and its
# product have at most `_BLOCK` elements together: 16 MiB, if all of them are float32.
_MAX_BUILT, _BLOCK = 2**24, 2**22


def product(
    eqn: core.JaxprEqn, inputs: Sequence[Any], built: Sequence[jax.Array]
) -> Callable[[], list[jax.Array]] | None:
    """Returns a function that evaluates a product with one block after another.

    Args:
      eqn: Any equation.
      inputs: The inputs of the equation, arrays and views.
      built: The inputs, with views built.

    Returns:
      A function to the outputs of the equation, for a program of one device; `None` if
      the equation is no product with a large matrix that has to be drawn.
    """
    large = [side for side, value in enumerate(inputs) if _is_large(value)]
    # A block of an array that is sharded would be gathered.
    sharded = jax.sharding.get_abstract_mesh().size > 1
    if eqn.primitive.name != "dot_general" or len(large) != 1 or sharded:
        return None
    [side] = large
    view = inputs[side]
    contracted, batch = (axes[side] for axes in eqn.params["dimension_numbers"])
    free = [a for a in range(len(view.shape)) if a not in (*contracted, *batch)]
    result: Any = eqn.outvars[0].aval
    # A program may enable 64 bits for an equation of wide dtypes, but not for a loop.
    if not free or 0 in result.shape or result.dtype.itemsize > 4:
        return None
    axis = max(free, key=lambda a: view.shape[a])
    # The free axes of the right side are the last ones of the result.
    before = len(batch) if side == 0 else len(result.shape) - len(free)
    axis_of_result = before + free.index(axis)
    length = view.shape[axis]
    both = math.prod(view.shape) + math.prod(result.shape)
    size = max(1, _BLOCK * length // both)
    order = _order_in_memory(view)
    # Blocks along the outermost axis of a whole leaf hold neighbors.
    rows = tuple(range(len(order))) if view.order == tuple(order) else None
    rows_of_block = rows if order[0] == axis else None
    lying = view.map(
        view.base.transpose(order), lambda mark: mark.transpose(order), rows
    )

    def in_blocks() -> list[jax.Array]:
        def add(i: jax.Array, found: jax.Array) -> jax.Array:
            # The last block overlaps the one before it, with equal elements.
            start = jnp.minimum(i * size, length - size)

            def block(x: jax.Array) -> jax.Array:
                at = order.index(axis)
                if x.shape[at] == 1:
                    return x
                return lax.dynamic_slice_in_dim(x, start, size, at)

            sides = list(built)
            part = lying.map(block(lying.base), block, rows_of_block).build()
            sides[side] = part.transpose(np.argsort(order))
            [of_block] = bind(eqn, sides)
            return lax.dynamic_update_slice_in_dim(
                found, of_block, start, axis_of_result
            )

        # All of it is overwritten. Because it is filled with a number of the other
        # side, it is not allocated before that side is computed.
        fill = built[1 - side].reshape(-1)[0].astype(result.dtype)
        found = jnp.broadcast_to(fill, result.shape)
        return [lax.fori_loop(0, -(-length // size), add, found)]

    return in_blocks


def _is_large(value: Any) -> bool:
    """Whether a value is a view of many elements that are drawn to be used."""
    lazy = isinstance(value, View) and isinstance(value.u, LazyElements)
    return lazy and value.on_use is None and math.prod(value.shape) > _MAX_BUILT


def _order_in_memory(view: View) -> list[int]:
    """The axes of a view in the order that they have in its leaf.

    A slice of a leaf that was transposed would be cut from a transposed copy.
    """
    axes = range(len(view.shape))
    varying = (axis for mark in view.marks for axis in axes if mark.shape[axis] > 1)
    return list(dict.fromkeys((*varying, *axes)))
