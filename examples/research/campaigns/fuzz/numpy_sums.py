"""Sums and products by NumPy: of the same numbers they are the same to the last bit.

NumPy may add in another order for another layout in memory, so each sum is over the
last axis of a new array.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np


def wide(dtype: Any) -> Any:
    """The dtype of computations, before they are rounded once."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.complex128
    return np.float64 if jnp.issubdtype(dtype, jnp.floating) else dtype


def reduced(reduce: Any) -> Any:
    """A reduction over some axes, by a function of the last one."""

    def run(x: Any, axes: Any, out_sharding: Any = None) -> Any:
        del out_sharding
        kept = [a for a in range(x.ndim) if a not in axes]
        sizes = [x.shape[a] for a in kept]
        count = math.prod(x.shape[a] for a in axes)
        rows = x.transpose([*kept, *axes]).reshape([*sizes, count])
        return reduce(rows.astype(wide(x.dtype))).astype(x.dtype)

    return run


def _sum(rows: Any) -> Any:
    return np.add.reduce(np.ascontiguousarray(rows), -1, dtype=rows.dtype)


reduce_sum = reduced(_sum)


def dot_general(
    x: Any, y: Any, dimension_numbers: Any, preferred_element_type: Any, **_: Any
) -> Any:
    contracted, batch = dimension_numbers
    out = x.dtype if preferred_element_type is None else preferred_element_type
    # The real part of a complex product is what is asked for by a real type.
    inner = next((z.dtype for z in (x, y) if z.dtype.kind == "c"), out)
    (a, free_a), (b, free_b) = (
        _by_kind(part.astype(wide(inner)), *axes)
        for part, *axes in zip((x, y), contracted, batch, strict=True)
    )
    made = _sum(a[:, :, None, :] * b[:, None, :, :])
    shape = [x.shape[i] for i in batch[0]] + [*free_a, *free_b]
    made = made if np.dtype(out).kind == "c" else made.real
    return made.reshape(shape).astype(out)


def _by_kind(x: Any, contracted: Any, batch: Any) -> tuple[Any, list[int]]:
    """An array of batch, free and contracted axes; and the sizes of the free ones."""
    free = [a for a in range(x.ndim) if a not in (*contracted, *batch)]
    sizes = [math.prod(x.shape[a] for a in axes) for axes in (batch, free, contracted)]
    ordered = x.transpose([*batch, *free, *contracted])
    return ordered.reshape(sizes), [x.shape[a] for a in free]


def convolution(x: Any, kernel: Any, **params: Any) -> Any:
    numbers = params["dimension_numbers"]
    out = params["preferred_element_type"] or x.dtype
    x, kernel = x.transpose(numbers.lhs_spec), kernel.transpose(numbers.rhs_spec)
    x, kernel = x.astype(wide(out)), kernel.astype(wide(out))

    def spread(x: Any, kernel: Any) -> tuple[Any, Any]:
        x = _padded(_dilated(x, params["lhs_dilation"]), params["padding"])
        return x, _dilated(kernel, params["rhs_dilation"])

    image, part = spread(x, kernel)
    # Padding counts nothing, even next to an infinity.
    there = spread(np.ones_like(x, bool), np.ones_like(kernel, bool))
    batches, features = params["batch_group_count"], params["feature_group_count"]
    groups, axis = features * batches, 1 if features > 1 else 0
    made = [
        _windows(*group, params["window_strides"])
        for group in zip(
            *(np.split(each, groups, axis) for each in (image, there[0])),
            *(np.split(each, groups) for each in (part, there[1])),
            strict=True,
        )
    ]
    return np.concatenate(made, 1).transpose(np.argsort(numbers.out_spec)).astype(out)


def _windows(
    image: Any, image_there: Any, kernel: Any, there: Any, strides: Any
) -> Any:
    """[n, o, …]: what each kernel makes of each window."""

    def rows(image: Any) -> Any:
        # [n, …, 1, i w]
        axes = tuple(range(2, image.ndim))
        seen = np.lib.stride_tricks.sliding_window_view(image, kernel.shape[2:], axes)
        seen = seen[(slice(None),) * 2 + tuple(slice(None, None, s) for s in strides)]
        seen = np.moveaxis(seen, 1, image.ndim - 1)
        sizes = seen.shape[: image.ndim - 1]
        return seen.reshape(*sizes, 1, math.prod(kernel.shape[1:]))

    known = rows(image_there) & there.reshape(len(there), -1)
    made = _sum(np.where(known, rows(image) * kernel.reshape(len(kernel), -1), 0))
    return np.moveaxis(made, -1, 1)


def _dilated(x: Any, factors: Any) -> Any:
    for axis, factor in enumerate(factors, 2):
        if factor > 1 and x.shape[axis] > 1:
            shape = list(x.shape)
            shape[axis] = (shape[axis] - 1) * factor + 1
            spread = np.zeros(shape, x.dtype)
            spread[(slice(None),) * axis + (slice(None, None, factor),)] = x
            x = spread
    return x


def _padded(x: Any, padding: Any) -> Any:
    for axis, (low, high) in enumerate(padding, 2):
        kept = slice(max(-low, 0), x.shape[axis] - max(-high, 0))
        width = [(0, 0)] * x.ndim
        width[axis] = max(low, 0), max(high, 0)
        x = np.pad(x[(slice(None),) * axis + (kept,)], width)
    return x
