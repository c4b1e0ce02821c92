"""Gathers and scatters: all dimension numbers, all modes, all kinds of indices."""

from .build import FLOATS, Builder, Refused, maker
from .program import Value

MODES = ("clip", "fill", "promise_in_bounds", "fill", None)
MOVED = (*FLOATS, "complex64", "int32")


def _indices(b: Builder, x: Value, axis: int, mode: str | None) -> Value:
    shape, size = b.rng.choice([(), (2,), (3,), (2, 3), (0,)]), x.shape[axis]
    inside = mode == "promise_in_bounds"
    if inside and not size:
        raise Refused
    low, high = (0, size - 1) if inside else (-2 * size - 1, 2 * size + 1)
    found = b.integers(shape, low, high)
    if inside:
        # What is computed of a leaf may be anything.
        text = f"jnp.clip({found}.astype(jnp.int32), 0, {size - 1})"
        [found] = b.emit(text)
    return found


def _take(b: Builder):
    x = b.of_rank(1, MOVED)
    axis, mode = b.axis(x), b.rng.choice([*MODES, "wrap"])
    ids = _indices(b, x, axis, mode)
    fill = ""
    if mode == "fill" and b.rng.random() < 0.5:
        fill = ", fill_value=" + b.rng.choice(["0", "-2", "1"])
    text = f"jnp.take({x}, {ids}, axis={axis}, mode={mode!r}{fill})"
    return b.emit(text, is_view=x.is_view)


def _at(b: Builder):
    """Indices and slices, in brackets."""
    x = b.of_rank(1, MOVED)
    keys, shape = [], b.rng.choice([(2,), (3,), ()])
    for size in x.shape:
        kind = b.rng.choice(["slice", "index", "number"])
        if kind == "slice":
            keys.append(b.rng.choice([":", "::-1", "1:", ":-1", "::2"]))
        elif kind == "index":
            keys.append(b.integers(shape, -size - 1, size + 1).name)
        else:
            keys.append(str(b.rng.randint(-size, max(size - 1, -size))))
    mode = b.rng.choice(MODES)
    if mode == "promise_in_bounds":
        mode = "clip"
    text = f"{x}.at[{', '.join(keys)}].get(mode={mode!r})"
    return b.emit(text, is_view=x.is_view)


def _numbers(b: Builder, x: Value):
    """Dimension numbers of a gather, and of the scatter that undoes it."""
    rank, rng = len(x.shape), b.rng
    batch = rng.choice([(), (2,), (3,), (2, 3)])
    batching, along = [], []
    if batch and rng.random() < 0.25:
        pairs = [
            (a, i) for a, n in enumerate(x.shape) for i, m in enumerate(batch) if n == m
        ]
        if pairs:
            a, i = rng.choice(pairs)
            batching, along = [a], [i]
    free = [a for a in range(rank) if a not in batching]
    start = rng.sample(free, rng.randint(0, len(free)))
    collapsed = sorted(rng.sample(free, rng.randint(0, len(free))))
    sizes = [
        min(1, n) if a in (*collapsed, *batching) else rng.randint(min(1, n), n)
        for a, n in enumerate(x.shape)
    ]
    offsets = rank - len(collapsed) - len(batching)
    out = offsets + len(batch)
    windows = sorted(rng.sample(range(out), offsets))
    return batch, start, collapsed, batching, along, sizes, windows


def _starts(b: Builder, x: Value, batch, start, sizes, inside) -> Value:
    shape = (*batch, len(start))
    if inside:
        room = min([x.shape[a] - sizes[a] for a in start], default=0)
        found = b.integers(shape, 0, room)
        return b.emit(f"jnp.clip({found}.astype(jnp.int32), 0, {room})")[0]
    largest = max([x.shape[a] for a in start], default=0)
    return b.integers(shape, -largest - 1, largest + 1)


@maker("look_ups", "gather")
def _(b: Builder):
    style = b.rng.random()
    if style < 0.3:
        return _take(b)
    if style < 0.5:
        return _at(b)
    x = b.of_rank(1, MOVED)
    batch, start, collapsed, batching, along, sizes, windows = _numbers(b, x)
    mode = b.rng.choice(MODES)
    starts = _starts(b, x, batch, start, sizes, mode == "promise_in_bounds")
    fill = ""
    if mode == "fill" and b.rng.random() < 0.5:
        fill = ", fill_value=" + b.rng.choice(["0", "-2", "1"])
    numbers = (
        f"lax.GatherDimensionNumbers({tuple(windows)}, {tuple(collapsed)}, "
        f"{tuple(start)}, {tuple(batching)}, {tuple(along)})"
    )
    text = f"lax.gather({x}, {starts}, {numbers}, {tuple(sizes)}, mode={mode!r}{fill})"
    return b.emit(text, is_view=x.is_view)


def _scatter(name):
    def make(b: Builder):
        x = b.of_rank(1, MOVED)
        batch, start, collapsed, batching, along, sizes, windows = _numbers(b, x)
        mode = b.rng.choice(MODES)
        starts = _starts(b, x, batch, start, sizes, mode == "promise_in_bounds")
        kept = [n for a, n in enumerate(sizes) if a not in (*collapsed, *batching)]
        window, rest = iter(kept), iter(batch)
        out = len(kept) + len(batch)
        shape = tuple(next(window) if a in windows else next(rest) for a in range(out))
        updates = b.make(shape, x.dtype.name)
        numbers = (
            f"lax.ScatterDimensionNumbers({tuple(windows)}, {tuple(collapsed)}, "
            f"{tuple(start)}, {tuple(batching)}, {tuple(along)})"
        )
        return b.emit(f"lax.{name}({x}, {starts}, {updates}, {numbers}, mode={mode!r})")

    return make


for _name in ("scatter", "scatter_add", "scatter_max", "scatter_min", "scatter_mul"):
    _primitive = _name.replace("_", "-")
    maker("writes", _primitive)(_scatter(_name))
maker("writes", "scatter-sub")(_scatter("scatter_sub"))
