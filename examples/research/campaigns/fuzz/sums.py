"""Reductions, windows and products."""

from .build import (
    COMPLEX,
    FLOATS,
    INEXACT,
    INTS,
    NUMBERS,
    REAL,
    Builder,
    Refused,
    maker,
)
from .program import typename

LOGICAL = (*INTS, "bool")


def _reduction(name, dtypes):
    def make(b: Builder):
        x = b.pick(dtypes)
        axes = b.some(len(x.shape))
        return b.emit(f"lax.{name}({x}, {axes})")

    return make


for _name, _dtypes in {
    "reduce_sum": NUMBERS,
    "reduce_prod": NUMBERS,
    "reduce_max": REAL,
    "reduce_min": REAL,
    "reduce_and": LOGICAL,
    "reduce_or": LOGICAL,
    "reduce_xor": INTS,
}.items():
    maker("sums", _name)(_reduction(_name, _dtypes))


def _cumulative(name, dtypes):
    def make(b: Builder):
        x = b.of_rank(1, dtypes)
        reverse = b.rng.random() < 0.5
        return b.emit(f"lax.{name}({x}, {b.axis(x)}, reverse={reverse})")

    return make


for _name, _dtypes in {
    "cumsum": NUMBERS,
    "cumprod": NUMBERS,
    "cummax": REAL,
    "cummin": REAL,
    "cumlogsumexp": FLOATS,
}.items():
    maker("sums", _name)(_cumulative(_name, _dtypes))


@maker("sums", "argmax", "argmin")
def _(b: Builder):
    x = b.of_rank(1, REAL)
    name, dtype = b.rng.choice(["argmax", "argmin"]), b.rng.choice(["int32", "uint8"])
    return b.emit(f"lax.{name}({x}, {b.axis(x)}, {typename(dtype)})")


@maker("sums", "reduce")
def _(b: Builder):
    x = b.pick(FLOATS)
    axes, start = b.some(len(x.shape)), b.make((), x.dtype.name)
    text = b.rng.choice(["lax.sub(x, y)", "lax.max(x, lax.mul(y, y))"])
    return b.emit(f"lax.reduce({x}, {start}, lambda x, y: {text}, {axes})")


def _window(b: Builder, x) -> str:
    sizes = tuple(b.rng.randint(1, 2) for _ in x.shape)
    strides = tuple(b.rng.randint(1, 2) for _ in x.shape)
    padding = b.rng.choice(["'VALID'", "'SAME'"])
    return f"{sizes}, {strides}, {padding}"


def _windowed(operation, start, dtypes):
    def make(b: Builder):
        x = b.of_rank(1, dtypes)
        # Only an initial value that is known tells JAX which sum it is.
        first = f"np.array({start}, {typename(x.dtype)})"
        if operation.startswith("lambda"):
            first = b.make((), x.dtype.name).name
        return b.emit(f"lax.reduce_window({x}, {first}, {operation}, {_window(b, x)})")

    return make


maker("sums", "reduce_window_sum")(_windowed("lax.add", "0", NUMBERS))
maker("sums", "reduce_window_max")(_windowed("lax.max", "-np.inf", ("float32",)))
maker("sums", "reduce_window_min")(_windowed("lax.min", "np.inf", ("float32",)))
maker("sums", "reduce_window")(_windowed("lambda x, y: x - y", "", ("float32",)))


@maker("sums", "select_and_scatter_add")
def _(b: Builder):
    x = b.of_rank(1, ("float32",))
    pool = f"lax.reduce_window(x, -jnp.inf, lax.max, {_window(b, x)})"
    return b.emit(f"jax.grad(lambda x: {pool}.sum())({x})")


@maker("sums", "select_and_gather_add")
def _(b: Builder):
    x = b.of_rank(1, ("float32",))
    pool = f"lax.reduce_window(x, -jnp.inf, lax.max, {_window(b, x)})"
    y = b.like(x)
    return b.emit(f"jax.jvp(lambda x: {pool}, ({x},), ({y},))[1]")


@maker("sums", "select_and_scatter")
def _(b: Builder):
    x = b.of_rank(1, ("float32",))
    window = (1,) * len(x.shape)
    y, start = b.like(x), b.make((), "float32")
    return b.emit(
        "jax._src.lax.windowed_reductions._select_and_scatter("
        f"{x}, lax.ge, {window}, {window}, {((0, 0),) * len(x.shape)}, "
        f"{y}, {start}, lax.sub)"
    )


# --- Products ---------------------------------------------------------------------


def _matrix(b: Builder, shape, dtype):
    """A matrix of this type; often a leaf, since a reshaped one may have no factors."""
    leaf = not b.depth and dtype in FLOATS and b.rng.random() < 0.5
    return b.param(shape, dtype) if leaf else b.make(shape, dtype)


@maker("products", "dot_general")
def _(b: Builder):
    x = b.of_rank(1, (*INEXACT, "int32"), 4)
    batch = [a for a in range(len(x.shape)) if b.rng.random() < 0.2]
    free = [a for a in range(len(x.shape)) if a not in batch]
    contracted = b.rng.sample(free, b.rng.randint(0, min(2, len(free))))
    shared = [*batch, *contracted]
    others = [b.rng.randint(1, 3) for _ in range(b.rng.randint(0, 2))]
    shape = [*(x.shape[a] for a in shared), *others]
    order = b.permutation(len(shape))
    y = _matrix(b, tuple(shape[i] for i in order), x.dtype.name)
    at = [order.index(i) for i in range(len(shared))]
    left = (tuple(contracted), tuple(at[len(batch) :]))
    stacked = (tuple(batch), tuple(at[: len(batch)]))
    if b.rng.random() < 0.5:
        x, y, left, stacked = y, x, left[::-1], stacked[::-1]
    wide = b.rng.choice(["None", "None", "jnp.float32", typename(x.dtype)])
    return b.emit(
        f"lax.dot_general({x}, {y}, {(left, stacked)}, preferred_element_type={wide})"
    )


@maker("products", "conv_general_dilated")
def _(b: Builder):
    rng = b.rng
    rank = rng.randint(0, 2)
    groups, batches = rng.choice([(1, 1), (1, 1), (1, 1), (2, 1), (1, 2)])
    features, out = 2, rng.choice([2, 4]) if groups * batches > 1 else rng.randint(1, 3)
    sizes = [rng.randint(1, 2) for _ in range(rank)]
    dtype = b.dtype((*FLOATS, *COMPLEX))
    kernel = [out, features // groups, *sizes]
    image = [2 * batches // rng.choice([1, 2]) or 1, features, *([3] * rank)]
    specs, shapes = [], []
    for shape in (image, kernel):
        order = b.permutation(len(shape))
        specs.append(order)
        placed = [0] * len(shape)
        for i, at in enumerate(order):
            placed[at] = shape[i]
        shapes.append(tuple(placed))
    specs.append(b.permutation(rank + 2))
    x, w = b.make(shapes[0], dtype), _matrix(b, shapes[1], dtype)
    numbers = f"lax.ConvDimensionNumbers({specs[0]}, {specs[1]}, {specs[2]})"
    padding = rng.choice(["'SAME'", "'VALID'"])
    strides = tuple(rng.randint(1, 2) for _ in range(rank))
    dilation = tuple(rng.randint(1, 2) for _ in range(rank))
    return b.emit(
        f"lax.conv_general_dilated({x}, {w}, {strides}, {padding}, "
        f"rhs_dilation={dilation}, dimension_numbers={numbers}, "
        f"feature_group_count={groups}, batch_group_count={batches})"
    )


@maker("others", "ragged_dot_general")
def _(b: Builder):
    x = b.pick(("float32",), lambda v: len(v.shape) == 2)
    w = b.make((2, x.shape[1], 3), "float32")
    first = b.rng.randint(0, x.shape[0])
    groups = f"jnp.array([{first}, {x.shape[0] - first}], jnp.int32)"
    return b.emit(f"lax.ragged_dot({x}, {w}, {groups})")


@maker("others", "fft")
def _(b: Builder):
    kind = b.rng.choice(["fft", "ifft", "rfft"])
    x = b.of_rank(1, ("float32",) if kind == "rfft" else ("complex64",))
    if not x.size:
        raise Refused
    return b.emit(f"lax.fft({x}, {kind!r}, ({x.shape[-1]},))")


@maker("others", "scaled_dot")
def _(b: Builder):
    x, y = b.make((2, 4), "bfloat16"), b.make((4, 3), "bfloat16")
    s, t = b.make((2, 2), "bfloat16"), b.make((2, 3), "bfloat16")
    numbers = (((1,), (0,)), ((), ()))
    return b.emit(
        f"lax.scaled_dot({x}, {y}, lhs_scale={s}, rhs_scale={t}, "
        f"dimension_numbers={numbers}, preferred_element_type=jnp.float32)"
    )
