"""Primitives that move elements, or repeat them."""

import math

from .build import ALL, FLOATS, NUMBERS, REAL, Builder, Refused, maker
from .program import Value, typename

MOVED = (*FLOATS, "complex64", "complex128", "int32", "bool")


def _view(b: Builder, low: int = 0) -> Value:
    return b.pick(MOVED, lambda v: len(v.shape) >= low)


def _followed(b: Builder, value: Value, text: str):
    return b.emit(text, is_view=value.is_view)


@maker("moves", "transpose")
def _(b: Builder):
    x = _view(b, 1)
    order = b.permutation(len(x.shape))
    return _followed(b, x, f"lax.transpose({x}, {order})")


@maker("moves", "reshape")
def _(b: Builder):
    x = _view(b)
    sizes, left = [], x.size
    while left > 1 and len(sizes) < 4:
        sizes.append(b.rng.choice([n for n in range(1, left + 1) if left % n == 0]))
        left //= sizes[-1]
    sizes = [*sizes, left] if left != 1 else sizes
    sizes.insert(b.rng.randint(0, len(sizes)), 1) if b.rng.random() < 0.3 else None
    order = ""
    if x.shape and b.rng.random() < 0.1:
        order = f", dimensions={b.permutation(len(x.shape))}"
    return _followed(b, x, f"lax.reshape({x}, {tuple(sizes)}{order})")


@maker("moves", "squeeze")
def _(b: Builder):
    x = b.pick(MOVED, lambda v: 1 in v.shape)
    axes = tuple(a for a, n in enumerate(x.shape) if n == 1 and b.rng.random() < 0.8)
    return _followed(b, x, f"lax.squeeze({x}, {axes})")


@maker("moves", "broadcast_in_dim")
def _(b: Builder):
    x = _view(b)
    shape, axes = [], []
    repeats = b.rng.random() < 0.5
    for size in x.shape:
        while b.rng.random() < 0.3:
            shape.append(b.rng.choice([0, 2, 3]) if repeats else 1)
        axes.append(len(shape))
        shape.append(b.rng.choice([2, 3]) if size == 1 and repeats else size)
    if b.rng.random() < 0.3 or not shape:
        shape.append(1)
    text = f"lax.broadcast_in_dim({x}, {tuple(shape)}, {tuple(axes)})"
    return b.emit(text, is_view=x.is_view and math.prod(shape) == x.size)


@maker("moves", "rev")
def _(b: Builder):
    x = _view(b, 1)
    axes = b.some(len(x.shape))
    return _followed(b, x, f"lax.rev({x}, {axes})")


@maker("moves", "slice")
def _(b: Builder):
    x = _view(b, 1)
    starts, limits, strides = [], [], []
    for size in x.shape:
        start = b.rng.choice([0, 0, b.rng.randint(0, size)])
        starts.append(start)
        limits.append(b.rng.choice([size, b.rng.randint(start, size)]))
        strides.append(b.rng.choice([1, 1, 2, 3]))
    last = strides if b.rng.random() < 0.6 else None
    return _followed(b, x, f"lax.slice({x}, {starts}, {limits}, {last})")


@maker("look_ups", "dynamic_slice")
def _(b: Builder):
    x = _view(b, 1)
    sizes = tuple(b.rng.randint(min(1, n), n) for n in x.shape)
    starts = ", ".join(str(b.integers((), -n - 1, n + 1)) for n in x.shape)
    wraps = b.rng.random() < 0.5
    text = (
        f"lax.dynamic_slice({x}, ({starts},), {sizes}, allow_negative_indices={wraps})"
    )
    return _followed(b, x, text)


@maker("writes", "dynamic_update_slice")
def _(b: Builder):
    x = b.of_rank(1, MOVED)
    sizes = tuple(b.rng.randint(0, n) for n in x.shape)
    update = b.make(sizes, x.dtype.name)
    starts = ", ".join(str(b.integers((), -n - 1, n + 1)) for n in x.shape)
    return b.emit(f"lax.dynamic_update_slice({x}, {update}, ({starts},))")


@maker("others", "pad")
def _(b: Builder):
    x = b.of_rank(1, MOVED)
    config = [
        (b.rng.randint(-1, 2), b.rng.randint(-1, 2), b.rng.randint(0, 1))
        for _ in x.shape
    ]
    fill = b.make((), x.dtype.name)
    return b.emit(f"lax.pad({x}, {fill}, {config})")


@maker("moves", "concatenate")
def _(b: Builder):
    x = b.of_rank(1, MOVED)
    parts = [x, *(b.like(x) for _ in range(b.rng.randint(0, 2)))]
    names = ", ".join(map(str, parts))
    return b.emit(f"lax.concatenate([{names}], {b.axis(x)})")


@maker("moves", "stack")
def _(b: Builder):
    x = b.pick(MOVED)
    axis = b.rng.randint(0, len(x.shape))
    return b.emit(f"lax.stack([{x}, {b.like(x)}], {axis})")


@maker("others", "unstack")
def _(b: Builder):
    x = b.of_rank(1, MOVED)
    return b.emit(f"tuple(lax.unstack({x}, {b.axis(x)}))")


@maker("others", "split")
def _(b: Builder):
    x = b.of_rank(1, MOVED)
    axis = b.axis(x)
    first = b.rng.randint(0, x.shape[axis])
    sizes = (first, x.shape[axis] - first)
    return b.emit(f"tuple(lax.split({x}, {sizes}, {axis}))")


@maker("moves", "tile")
def _(b: Builder):
    x = b.of_rank(1, MOVED)
    return b.emit(f"lax.tile({x}, {[b.rng.randint(1, 2) for _ in x.shape]})")


@maker("moves", "iota")
def _(b: Builder):
    shape = b.shape()
    if not shape:
        raise Refused
    dtype = typename(b.dtype(NUMBERS))
    axis = b.rng.randrange(len(shape))
    return b.emit(f"lax.broadcasted_iota({dtype}, {shape}, {axis})")


@maker("moves", "empty")
def _(b: Builder):
    # Its elements are undefined: what has none can be compared.
    return b.emit(f"lax.empty((0, 3), {typename(b.dtype(FLOATS))})")


@maker("others", "sort")
def _(b: Builder):
    x = b.of_rank(1, (*REAL, "bool"))
    axis, stable = b.axis(x), b.rng.random() < 0.5
    if b.rng.random() < 0.4:
        return b.emit(f"lax.sort({x}, dimension={axis}, is_stable={stable})")
    y, keys = b.make(x.shape, b.dtype(FLOATS)), b.rng.randint(1, 2)
    pair = f"({x}, {y})"
    return b.emit(f"lax.sort({pair}, dimension={axis}, num_keys={keys})")


@maker("others", "top_k")
def _(b: Builder):
    x = b.of_rank(1, REAL)
    axis = b.axis(x)
    k = b.rng.randint(0, x.shape[axis])
    return b.emit(f"tuple(lax.top_k({x}, {k}, axis={axis}))")


@maker("others", "approx_top_k")
def _(b: Builder):
    x = b.of_rank(1, FLOATS)
    axis, name = b.axis(x), b.rng.choice(["min", "max"])
    return b.emit(f"lax.approx_{name}_k({x}, {min(1, x.shape[axis])}, {axis})")


@maker("moves", "copy")
def _(b: Builder):
    x = b.pick(ALL)
    return _followed(b, x, f"jnp.copy({x})")


@maker("others", "layout_constraint")
def _(b: Builder):
    x = b.of_rank(1, FLOATS)
    order = b.permutation(len(x.shape))
    layout = f"jax.experimental.layout.Layout({order})"
    return b.emit(f"jax.experimental.layout.with_layout_constraint({x}, {layout})")
