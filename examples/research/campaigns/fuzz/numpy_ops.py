"""Operations that NumPy does in a thousandth of the time that XLA compiles them in.

Both programs that are compared go through them, so that what they do to odd values
need not be what XLA does, only the same in both.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from scipy import special

from . import numpy_sums


def _slice(x: Any, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    strides = strides or [1] * x.ndim
    at = zip(start_indices, limit_indices, strides, strict=True)
    return x[tuple(slice(a, b, s) for a, b, s in at)]


def _broadcast(x: Any, shape: Any, broadcast_dimensions: Any, sharding: Any) -> Any:
    del sharding
    new = [1] * len(shape)
    for axis, at in enumerate(broadcast_dimensions):
        new[at] = x.shape[axis]
    return np.broadcast_to(x.reshape(new), shape)


def _reshape(x: Any, new_sizes: Any, dimensions: Any, sharding: Any) -> Any:
    del sharding
    return (x if dimensions is None else x.transpose(dimensions)).reshape(new_sizes)


def _convert(x: Any, new_dtype: Any, weak_type: Any, sharding: Any) -> Any:
    del weak_type, sharding
    if jnp.issubdtype(new_dtype, np.integer) and x.dtype.kind not in "biu":
        limits = jnp.iinfo(new_dtype)
        x = np.clip(np.nan_to_num(x.astype(np.float64)), limits.min, limits.max)
        x = np.where(x >= limits.max, 0, x)  # float64 cannot hold 2⁶³ - 1.
    return x.astype(new_dtype)


def _iota(dtype: Any, shape: Any, dimension: Any, sharding: Any) -> Any:
    del sharding
    new = [1] * len(shape)
    new[dimension] = shape[dimension]
    return np.broadcast_to(np.arange(shape[dimension]).reshape(new), shape).astype(
        dtype
    )


def _bitcast(x: Any, new_dtype: Any) -> Any:
    size, new = x.dtype.itemsize, np.dtype(new_dtype).itemsize
    if size == new:
        return x.view(new_dtype)
    x = np.ascontiguousarray(x if size < new else x[..., None])
    return x.view(new_dtype)[..., 0] if size < new else x.view(new_dtype)


def _divided(x: Any, y: Any) -> Any:
    """Integers are rounded towards zero, and x / 0 is -1."""
    if x.dtype.kind not in "iu":  # That of bfloat16 is V.
        return np.divide(x, y)
    quotient = x // np.where(y == 0, x.dtype.type(1), y)
    inexact = (x != quotient * y) & ((x < 0) != (y < 0))
    return np.where(y == 0, x.dtype.type(0) - x.dtype.type(1), quotient + inexact)


def _complex(x: Any, y: Any) -> Any:
    made = np.empty(x.shape, np.result_type(x, np.complex64))
    made.real, made.imag = x, y
    return made


def _integer_power(x: Any, y: int) -> Any:
    """Multiplies as often as the power says, whatever the numbers are."""
    made = np.ones_like(x)
    for _ in range(abs(y)):
        made = made * x
    return made if y >= 0 else np.divide(np.ones_like(x), made)


def _rounded(x: Any, rounding_method: Any) -> Any:
    if rounding_method == lax.RoundingMethod.TO_NEAREST_EVEN:
        return np.round(x)
    return np.trunc(x + np.copysign(0.5, x))


def _select(which: Any, *cases: Any) -> Any:
    return np.where(which, cases[1], cases[0])


def _dynamic_slice(x: Any, *starts: Any, slice_sizes: Any) -> Any:
    sizes = zip(x.shape, starts, slice_sizes, strict=True)
    first = [min(max(int(i), 0), n - k) for n, i, k in sizes]
    at = zip(first, slice_sizes, strict=True)
    return x[tuple(slice(i, i + k) for i, k in at)]


def _gather(
    x: Any, starts: Any, dimension_numbers: Any, slice_sizes: Any, **p: Any
) -> Any:
    numbers = dimension_numbers
    window_axes = numbers.offset_dims
    batch_shape = starts.shape[:-1]
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [a for a in range(x.ndim) if a not in dropped]
    rank = len(batch_shape) + len(kept)
    batch_axes = [a for a in range(rank) if a not in window_axes]
    shape = [0] * rank
    for a, n in zip(batch_axes, batch_shape, strict=True):
        shape[a] = n
    for a, axis in zip(window_axes, kept, strict=True):
        shape[a] = slice_sizes[axis]
    at, inside = [], np.ones(shape, bool)
    grid = np.indices(shape)
    batch = tuple(grid[a] for a in batch_axes)
    for axis, size in enumerate(x.shape):
        index = np.zeros(shape, np.int64)
        if axis in numbers.start_index_map:
            start = starts[..., numbers.start_index_map.index(axis)][batch]
            start = start.astype(object if start.dtype == np.uint64 else np.int64)
            last = size - slice_sizes[axis]
            inside &= (start >= 0) & (start <= last)
            index = np.clip(start, 0, last).astype(np.int64)
        if axis in numbers.operand_batching_dims:
            i = numbers.operand_batching_dims.index(axis)
            index = batch[numbers.start_indices_batching_dims[i]]
        if axis in kept:
            index = index + grid[window_axes[kept.index(axis)]]
        at.append(index)
    found = x[tuple(at)]
    if p["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        fill = _fill(x.dtype) if p["fill_value"] is None else p["fill_value"]
        found = np.where(inside, found, np.array(fill).astype(x.dtype))
    return found


def _fill(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if dtype.kind == "b":
        return True
    limits = jnp.iinfo(dtype)
    return limits.min if limits.min < 0 else limits.max


_MOVED = {
    "slice": _slice,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": lambda x, permutation: x.transpose(permutation),
    "squeeze": lambda x, dimensions: np.squeeze(x, tuple(dimensions)),
    "rev": lambda x, dimensions: np.flip(x, dimensions),
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "tile": lambda x, reps: np.tile(x, reps),
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "iota": _iota,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    "reduce_sum": numpy_sums.reduce_sum,
    "dot_general": numpy_sums.dot_general,
    "conv_general_dilated": numpy_sums.convolution,
}
_COMPUTED = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shift_left": np.left_shift,
    "shift_right_logical": np.right_shift,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "max": np.maximum,
    "min": np.minimum,
    "select_n": _select,
    "copy": lambda x: x,
    "neg": np.negative,
    "div": _divided,
    "complex": _complex,
}
# In float64, and rounded to the dtype.
_ELEMENTARY = {
    "cos": np.cos,
    "erf_inv": special.erfinv,
    "exp": np.exp,
    "floor": np.floor,
    "integer_pow": _integer_power,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": special.expit,
    "round": _rounded,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "tanh": np.tanh,
}
_FLOATING = {jnp.dtype(n) for n in ("float32", "float64", "float16", "bfloat16")}
_COMPLEX = {jnp.dtype(n) for n in ("complex64", "complex128")}
_INTEGRAL = {jnp.dtype(f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)}
_BOOL, _WORDS = {jnp.dtype("bool")}, {jnp.dtype("uint32")}
_KNOWN = _FLOATING | _COMPLEX | _INTEGRAL | _BOOL
# Operations that NumPy does not have for all dtypes.
_ONLY = {
    **dict.fromkeys(("add", "mul", "sub", "neg"), _KNOWN - _BOOL),
    **dict.fromkeys(("eq", "ne", "copy"), _KNOWN),
    **dict.fromkeys(("lt", "le", "gt", "ge", "max", "min"), _KNOWN - _COMPLEX),
    **dict.fromkeys(("and", "or", "xor"), _INTEGRAL | _BOOL),
    **dict.fromkeys(("shift_left", "shift_right_logical"), _WORDS),
    "select_n": _BOOL,
    "div": _FLOATING | _INTEGRAL,
    **dict.fromkeys(("real", "imag"), _COMPLEX),
    **dict.fromkeys(("reduce_sum", "dot_general"), _KNOWN - _BOOL),
    "conv_general_dilated": _FLOATING | _COMPLEX,
    **dict.fromkeys(_ELEMENTARY, _FLOATING),
}


def by_numpy(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> Any:
    """The result if NumPy has the operation; else `None`."""
    name, dtypes = eqn.primitive.name, [getattr(x, "dtype", None) for x in inputs]
    if not any(name in table for table in (_MOVED, _COMPUTED, _ELEMENTARY)):
        return None
    if any(dtype not in _KNOWN for dtype in dtypes):
        return None
    if inputs and dtypes[0] not in _ONLY.get(name, _KNOWN):
        return None
    arrays = [np.asarray(x, order="C") for x in inputs]
    if name in _MOVED:
        return _moved(eqn, dtypes, arrays)
    if name in _ELEMENTARY:
        return _elementary(eqn, arrays[0])
    return _COMPUTED[name](*arrays)


def _elementary(eqn: core.JaxprEqn, x: Any) -> Any:
    params = {key: p for key, p in eqn.params.items() if key != "accuracy"}
    computed = _ELEMENTARY[eqn.primitive.name](x.astype(np.float64), **params)
    return computed.astype(x.dtype)


def _moved(eqn: core.JaxprEqn, dtypes: Sequence[Any], inputs: Sequence[Any]) -> Any:
    name, new = eqn.primitive.name, eqn.outvars[0].aval.dtype
    if new not in _KNOWN or "one_hot" in str(eqn.params.get("mode", "")).lower():
        return None
    if name == "convert_element_type" and dtypes[0].kind == "c" != new.kind:
        return None
    if name == "dynamic_slice" and len(inputs) != 1 + np.ndim(inputs[0]):
        return None
    if name == "conv_general_dilated" and 0 in eqn.outvars[0].aval.shape:
        return np.zeros(eqn.outvars[0].aval.shape, new)
    return _MOVED[name](*inputs, **eqn.params)
