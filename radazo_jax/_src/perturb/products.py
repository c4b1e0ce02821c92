"""Evaluation of equations, and rules of products with perturbed matrices."""

import contextlib
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.typing import DTypeLike

from radazo_jax._src.base import xla
from radazo_jax._src.base.trees import widest
from radazo_jax._src.directions.elements import (
    LazyElements,
    LowRankFactors,
    drop_constant_axes,
)
from radazo_jax._src.perturb.views import Value, View

_DEBUG_INFO = core.DebugInfo("perturb", "perturb", None, None)


def bind(eqn: core.JaxprEqn, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Evaluates one equation at arrays: its primitive, with its parameters."""
    given = {
        atom: value
        for atom, value in zip(eqn.invars, inputs, strict=True)
        if not isinstance(atom, core.Literal)
    }
    jaxpr = core.Jaxpr((), list(given), eqn.outvars, [eqn], eqn.effects, _DEBUG_INFO)
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*given.values())


def as_traced(eqn: core.JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """Returns the precision under which an equation was traced.

    A program can enable 64 bits for a part of itself. Its equations do not say so, but
    their dtypes do.
    """
    if jax.config.read("jax_enable_x64"):
        return contextlib.nullcontext()
    dtypes = [getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars)]
    if not any(isinstance(x, np.dtype) and x.itemsize >= 8 for x in dtypes):
        return contextlib.nullcontext()
    return jax.enable_x64(True)


def dot_general(
    eqn: core.JaxprEqn, x: jax.Array, view: View, view_is_left: bool
) -> list[jax.Array] | None:
    """Returns `lax.dot_general` with a view on one side; `None` if it must be built."""
    params = eqn.params
    contracted_left, contracted_right = params["dimension_numbers"][0]
    contracted = contracted_left if view_is_left else contracted_right
    view.used(contracted)
    if not _is_product(x, view):
        return None
    first, second = view.marks
    on_first, on_second = _varies_along(first), _varies_along(second)
    if not set(contracted).isdisjoint(on_second):
        first, second, on_first, on_second = second, first, on_second, on_first
    if not set(contracted) <= on_first - on_second:
        return None
    if not set(range(len(view.shape))) <= on_first | on_second:
        return None
    base = view.base.astype(view.dtype)
    sides = (base, x) if view_is_left else (x, base)
    [plain] = bind(eqn, sides)
    names_left, names_right, out = _names(*sides, params["dimension_numbers"])
    names_x, names_view = (
        (names_right, names_left) if view_is_left else (names_left, names_right)
    )
    wide = widest((x, base, plain))
    given = (view.scale.astype(view.norm.dtype) * view.norm, first, second)
    factors = [array.astype(wide) for array in given]
    noise = _chain(x, names_x, factors, names_view, out, params["precision"])
    return [(plain.astype(wide) + noise).astype(plain.dtype)]


def convolution(eqn: core.JaxprEqn, x: jax.Array, view: View) -> list[jax.Array] | None:
    """Returns `lax.conv_general_dilated` with a kernel that is a view, or `None`."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    out_axis, *rest = numbers.rhs_spec
    view.used(rest)
    grouped = params["feature_group_count"] * params["batch_group_count"] > 1
    if grouped or not _is_product(x, view):
        return None
    first, second = view.marks
    if out_axis in _varies_along(first):
        first, second = second, first
    if out_axis in _varies_along(first) or _varies_along(second) - {out_axis}:
        return None
    base = view.base.astype(view.dtype)
    [plain] = bind(eqn, [x, base])
    wide = widest((x, base, plain))
    given = (x, view.scale.astype(view.norm.dtype) * view.norm, first, second)
    x, scale, first, second = (array.astype(wide) for array in given)
    # The rank takes the place of the kernel's output features.
    shape = [*view.shape, first.shape[-1]]
    shape[out_axis] = 1
    kernel = jnp.moveaxis(
        jnp.broadcast_to(first, shape).squeeze(out_axis), -1, out_axis
    )
    inner = scale * eqn.primitive.bind(
        x, kernel, **{**params, "preferred_element_type": wide}
    )
    features = numbers.out_spec[1]
    outward = second.reshape(second.shape[out_axis], -1)
    noise = jnp.tensordot(inner, outward, axes=[(features,), (1,)])
    noise = jnp.moveaxis(noise, -1, features)
    return [(plain.astype(wide) + noise).astype(plain.dtype)]


def _is_product(x: jax.Array, view: View) -> bool:
    """Returns whether there are factors, and they are multiplied with a real array."""
    return isinstance(view.u, LowRankFactors) and jnp.issubdtype(x.dtype, jnp.floating)


def _chain(
    x: jax.Array,
    names_x: str,
    factors: Sequence[jax.Array],
    names_view: str,
    out: str,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """Computes (x · first) · second, scaled; Z names the axis of the rank.

    The factors have the dtype in which the products are summed.
    """
    scale, first, second = factors
    names_first, first = drop_constant_axes(first, names_view)
    names_second, second = drop_constant_axes(second, names_view)
    between = "".join(
        n for n in dict.fromkeys(names_x + names_first) if n in out or n in names_second
    )

    def product(x: jax.Array, factor: jax.Array) -> jax.Array:
        return jnp.einsum(
            f"{names_x},{names_first}Z->{between}Z",
            x,
            factor,
            precision=precision,
            preferred_element_type=first.dtype,
        )

    def in_halves() -> jax.Array:
        # A product of a library would read a copy of x in float32. Without the barrier,
        # XLA would merge this product with the product of x and the whole matrix, and
        # copy the matrix.
        again = lax.optimization_barrier(x)
        high, low = (product(again, half) for half in _halves(first, x.dtype))
        return high + low

    def widened() -> jax.Array:
        return product(x.astype(first.dtype), first)

    short = x.dtype.itemsize == 2 and first.dtype == jnp.float32
    inner = xla.on_one_gpu(in_halves, widened) if short else widened()
    # Scaled here, because this array is the smallest.
    inner = scale * inner
    return jnp.einsum(
        f"{between}Z,{names_second}Z->{out}", inner, second, precision=precision
    )


def _halves(factor: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Splits `factor` into two arrays of a 16-bit dtype, to twice as many digits."""
    digits = jnp.finfo(dtype)
    # XLA would drop a conversion to the dtype and back.
    high = lax.reduce_precision(factor, int(digits.nexp), int(digits.nmant))
    return high.astype(dtype), (factor - high).astype(dtype)


def _varies_along(factor: jax.Array) -> set[int]:
    return {axis for axis in range(factor.ndim - 1) if factor.shape[axis] > 1}


def _names(
    x: jax.Array, y: jax.Array, numbers: lax.DotDimensionNumbers
) -> tuple[str, str, str]:
    """Returns letters for the axes of both sides and of `lax.dot_general`'s result."""
    (left, right), (left_batch, right_batch) = numbers
    letters = iter(string.ascii_lowercase)
    names_left = [next(letters) for _ in range(x.ndim)]
    names_right = [next(letters) for _ in range(y.ndim)]
    pairs = zip((*left, *left_batch), (*right, *right_batch), strict=True)
    for a, b in pairs:
        names_right[b] = names_left[a]
    out = [names_left[a] for a in left_batch]
    out += [n for a, n in enumerate(names_left) if a not in (*left, *left_batch)]
    out += [n for b, n in enumerate(names_right) if b not in (*right, *right_batch)]
    return "".join(names_left), "".join(names_right), "".join(out)


# A matrix of more elements than `_MAX_BUILT` is built in blocks. A block and its
# product have at most `_BLOCK` elements together: 16 MiB, if all of them are float32.
_MAX_BUILT, _BLOCK = 2**24, 2**22


def product(
    eqn: core.JaxprEqn, inputs: Sequence[Value], built: Sequence[jax.Array]
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


def _is_large(value: Value) -> bool:
    """Returns whether a value is a view of many elements that are drawn to be used."""
    lazy = isinstance(value, View) and isinstance(value.u, LazyElements)
    return lazy and value.on_use is None and math.prod(value.shape) > _MAX_BUILT


def _order_in_memory(view: View) -> list[int]:
    """Returns the axes of a view in the order that they have in its leaf.

    A slice of a leaf that was transposed would be cut from a transposed copy.
    """
    axes = range(len(view.shape))
    varying = (axis for mark in view.marks for axis in axes if mark.shape[axis] > 1)
    return list(dict.fromkeys((*varying, *axes)))
