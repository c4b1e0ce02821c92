"""Views of leaves that are sliced, transposed, reshaped or looked up in.

The elements of the leaf are rearranged by the equation of the program itself. The
functions here rearrange the marks, which broadcast: an operation on an axis of the view
is applied to the marks that vary along it. If an index is known only at run time, they
use the primitive of the equation: the public functions of JAX would normalize indices
that the program has normalized already.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from radazo_jax._src.base.xla import row_major
from radazo_jax._src.perturb.views import View

OfMark = Callable[[jax.Array], jax.Array]


def transpose(permutation: Sequence[int]) -> OfMark:
    return functools.partial(lax.transpose, permutation=permutation)


def reshape(shape: tuple[int, ...], sizes: Sequence[int]) -> OfMark:
    """Reshapes a mark, of which axes that do not meet stay apart."""
    groups = _reshape_groups(shape, tuple(sizes))

    def of_mark(mark: jax.Array) -> jax.Array:
        full, new = list(mark.shape), list(sizes)
        for old_axes, new_axes in groups:
            if all(mark.shape[a] == 1 for a in old_axes):
                for a in new_axes:
                    new[a] = 1
            else:
                for a in old_axes:
                    full[a] = shape[a]
        return jnp.broadcast_to(mark, full).reshape(new)

    return of_mark


def slice_(
    starts: Sequence[int], limits: Sequence[int], strides: Sequence[int]
) -> OfMark:
    def of_mark(mark: jax.Array) -> jax.Array:
        kept = [slice(None)] * mark.ndim
        for axis, size in enumerate(mark.shape):
            if size > 1:
                kept[axis] = slice(starts[axis], limits[axis], strides[axis])
        return mark[tuple(kept)]

    return of_mark


def dynamic_slice(
    primitive: core.Primitive, starts: Sequence[jax.Array], sizes: Sequence[int]
) -> OfMark:
    def of_mark(mark: jax.Array) -> jax.Array:
        along = [min(n, size) for n, size in zip(mark.shape, sizes, strict=True)]
        return primitive.bind(mark, *starts, slice_sizes=tuple(along))

    return of_mark


def reverse(dimensions: Sequence[int]) -> OfMark:
    def of_mark(mark: jax.Array) -> jax.Array:
        return lax.rev(mark, [a for a in dimensions if mark.shape[a] > 1])

    return of_mark


def at(view: View, i: jax.Array, base: jax.Array) -> View:
    """Returns slice i of a stack, of elements `base`, in a loop along axis 0."""

    def of_mark(mark: jax.Array) -> jax.Array:
        if mark.shape[0] == 1:
            return mark.reshape(mark.shape[1:])
        return lax.dynamic_index_in_dim(mark, i, 0, keepdims=False)

    order = view.order
    inner = order and order[0] == 0 and tuple(axis - 1 for axis in order[1:])
    base = row_major(base) if view.in_loop else base
    found = view.map(base, of_mark, inner or None)
    return dataclasses.replace(found, in_loop=True)


def gather(
    view: View, starts: jax.Array, base: jax.Array, params: Mapping[str, Any]
) -> View:
    """Returns a look-up that has read `base`: only the elements read are drawn."""
    if view.u is None:
        return dataclasses.replace(view, base=base)
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    batch_axes = [a for a in range(base.ndim) if a not in numbers.offset_dims]
    window_axes = iter(numbers.offset_dims)
    coordinates = []
    inside = jnp.ones((1,) * base.ndim, bool)
    zero = jnp.zeros((1,) * base.ndim, jnp.uint32)
    for axis, size in enumerate(view.shape):
        coordinate = zero
        if axis not in numbers.collapsed_slice_dims:
            target = next(window_axes)
            shape = [1] * base.ndim
            shape[target] = sizes[axis]
            coordinate = jnp.arange(sizes[axis], dtype=jnp.uint32).reshape(shape)
        if axis in numbers.start_index_map:
            start = starts[..., numbers.start_index_map.index(axis)]
            if start.dtype.itemsize < 4:
                start = start.astype(jnp.int32)
            shape = [1] * base.ndim
            for a, extent in zip(batch_axes, start.shape, strict=True):
                shape[a] = extent
            start = start.reshape(shape)
            # Out of bounds the look-up clamps, or fills.
            clamped = jnp.clip(start, 0, size - sizes[axis])
            inside = inside & (start == clamped)
            coordinate = coordinate + clamped.astype(jnp.uint32)
        coordinates.append(coordinate)

    def of_mark(mark: jax.Array) -> jax.Array:
        if mark.size == 1:
            return mark.reshape((1,) * base.ndim)
        along = tuple(
            coordinate if size > 1 else zero
            for coordinate, size in zip(coordinates, mark.shape, strict=True)
        )
        return mark.at[along].get(mode="promise_in_bounds")

    found = view.map(base, of_mark)
    fill = params["fill_value"]
    # To NaN, which no fill value stands for, anything may be added.
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    if fills and fill is not None and not math.isnan(fill):
        return found.only_where(inside)
    return found


def _reshape_groups(
    old: tuple[int, ...], new: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
    """Runs of old axes and of new ones that hold the same elements."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news = [], []
        left = right = 1
        if i < len(old):
            olds.append(i)
            left, i = old[i], i + 1
        if j < len(new):
            news.append(j)
            right, j = new[j], j + 1
        while left != right:
            if left < right:
                olds.append(i)
                left, i = left * old[i], i + 1
            else:
                news.append(j)
                right, j = right * new[j], j + 1
        groups.append((olds, news))
    return groups
