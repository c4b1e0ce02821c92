"""Products with a perturbed matrix of low rank, which is never formed.

x (W + s A Bᵀ) = x W + s (x A) Bᵀ, for any dimension numbers.
"""

import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from radazo_jax._src import targets
from radazo_jax._src.directions.elements import LowRankFactors, drop_constant_axes
from radazo_jax._src.perturb.equations import bind
from radazo_jax._src.perturb.views import View
from radazo_jax._src.trees import widest


def dot_general(
    eqn: core.JaxprEqn, x: jax.Array, view: View, view_is_left: bool
) -> list[jax.Array] | None:
    """`lax.dot_general` with a view on one side; `None` if it must be built."""
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
    given = (view.scale * view.norm, first, second)
    factors = [array.astype(wide) for array in given]
    noise = _chain(x, names_x, factors, names_view, out, params["precision"])
    return [(plain.astype(wide) + noise).astype(plain.dtype)]


def convolution(eqn: core.JaxprEqn, x: jax.Array, view: View) -> list[jax.Array] | None:
    """`lax.conv_general_dilated` with a kernel that is a view, or `None`."""
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
    given = (x, view.scale * view.norm, first, second)
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
    """Whether there are factors, and they are multiplied with a real array."""
    return isinstance(view.u, LowRankFactors) and jnp.issubdtype(x.dtype, jnp.floating)


def _chain(
    x: jax.Array,
    names_x: str,
    factors: Sequence[jax.Array],
    names_view: str,
    out: str,
    precision: Any,
) -> jax.Array:
    """(x · first) · second, scaled; Z names the axis of the rank.

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
    inner = targets.on_one_gpu(in_halves, widened) if short else widened()
    # Scaled here, because this array is the smallest.
    inner = scale * inner
    return jnp.einsum(
        f"{between}Z,{names_second}Z->{out}", inner, second, precision=precision
    )


def _halves(
    factor: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Two arrays of a 16-bit dtype with the sum `factor`, to twice as many digits."""
    digits = jnp.finfo(dtype)
    # XLA would drop a conversion to the dtype and back.
    high = lax.reduce_precision(factor, int(digits.nexp), int(digits.nmant))
    return high.astype(dtype), (factor - high).astype(dtype)


def _varies_along(factor: jax.Array) -> set[int]:
    return {axis for axis in range(factor.ndim - 1) if factor.shape[axis] > 1}


def _names(x: jax.Array, y: jax.Array, numbers: Any) -> tuple[str, str, str]:
    """Letters for the axes of both sides and of `lax.dot_general`'s result."""
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
