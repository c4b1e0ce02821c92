"""Primitives that compute each element by itself."""

from .build import (
    ALL,
    COMPLEX,
    FLOATS,
    INEXACT,
    INTS,
    MAKERS,
    NUMBERS,
    REAL,
    SIGNED,
    Builder,
    Maker,
    maker,
)
from .program import typename

NOT_COMPLEX = (*REAL, "bool")
INTEGRAL = (*INTS, "bool")
SINGLE = ("float32", "float64")

# Functions of `lax` by the types that they take.
_UNARY = {
    INEXACT: (
        "acos acosh asin asinh atan atanh cos cosh exp exp2 expm1 log log1p logistic "
        "rsqrt sin sinh sqrt tan tanh"
    ),
    FLOATS: (
        "bessel_i0e bessel_i1e cbrt ceil digamma erf erf_inv erfc floor is_finite "
        "lgamma round"
    ),
    (*FLOATS, *SIGNED, *COMPLEX): "abs",
    NUMBERS: "neg sign square",
    COMPLEX: "conj real imag",
}
_BINARY = {
    NUMBERS: "add sub mul div",
    REAL: "rem nextafter",
    NOT_COMPLEX: "max min",
    ALL: "eq ne",
}
# Primitive: what makes it, for which types.
UNARY = {f: (f"lax.{f}", of) for of, names in _UNARY.items() for f in names.split()} | {
    "not": ("lax.bitwise_not", INTEGRAL),
    "clz": ("lax.clz", INTS),
    "population_count": ("lax.population_count", INTS),
    "copy": ("jnp.copy", ALL),
    "add_any": ("jax.grad(lambda x: lax.mul(x, x).sum())", SINGLE),
    "stop_gradient": ("jax._src.ad_util.stop_gradient_p.bind", INEXACT),
}
BINARY = {f: (f"lax.{f}", of) for of, names in _BINARY.items() for f in names.split()}
BINARY |= {f: (f"lax.{f}", NOT_COMPLEX) for f in ("ge", "gt", "le", "lt")}
BINARY |= {f: (f"lax.bitwise_{f}", INTEGRAL) for f in ("and", "or", "xor")}
BINARY |= {
    f"shift_{f}": (f"lax.shift_{f}", INTS)
    for f in ("left", "right_arithmetic", "right_logical")
}
BINARY |= {f: (f"lax.{f}", SINGLE) for f in ("igamma", "igammac", "zeta", "polygamma")}
BINARY |= {
    "igamma_grad_a": ("lax.igamma_grad_a", SINGLE),
    "pow": ("lax.pow", INEXACT),
    "atan2": ("lax.atan2", INEXACT),
    "nextafter": ("lax.nextafter", FLOATS),
    "mulhi": ("lax.mulhi", INTS),
    "complex": ("lax.complex", SINGLE),
}
BINARY |= {
    f"{f}_to": (f"jax._src.lax.lax.{f}_to_p.bind", FLOATS) for f in ("eq", "le", "lt")
}


def _unary(text, dtypes):
    def make(b: Builder):
        return b.emit(f"{text}({b.pick(dtypes)})")

    return make


def _binary(text, dtypes):
    def make(b: Builder):
        x = b.pick(dtypes)
        pair = [x, b.like(x)]
        b.rng.shuffle(pair)
        return b.emit(f"{text}({pair[0]}, {pair[1]})")

    return make


MAKERS.update(
    {name: Maker(name, "elementwise", _unary(*how)) for name, how in UNARY.items()}
)
MAKERS.update(
    {name: Maker(name, "elementwise", _binary(*how)) for name, how in BINARY.items()}
)


@maker("elementwise", "integer_pow")
def _(b: Builder):
    return b.emit(f"lax.integer_pow({b.pick(NUMBERS)}, {b.rng.randint(-3, 4)})")


@maker("elementwise", "reduce_precision")
def _(b: Builder):
    bits = b.rng.choice([(5, 10), (8, 7), (4, 3), (8, 23)])
    return b.emit(f"lax.reduce_precision({b.pick(FLOATS)}, {bits[0]}, {bits[1]})")


@maker("elementwise", "clamp")
def _(b: Builder):
    x = b.pick(NOT_COMPLEX)
    low = b.make(b.rng.choice([(), x.shape]), x.dtype.name)
    high = b.make(low.shape, x.dtype.name)
    return b.emit(f"lax.clamp({low}, {x}, {high})")


@maker("elementwise", "select_n")
def _(b: Builder):
    x = b.pick()
    y = b.like(x)
    shape = b.rng.choice([(), x.shape])
    if b.rng.random() < 0.5:
        which = b.make(shape, "bool")
        return b.emit(f"lax.select_n({which}, {x}, {y})")
    which = b.make(shape, "int32")
    index = f"lax.clamp(jnp.int32(0), {which}, jnp.int32(2))"
    return b.emit(f"lax.select_n({index}, {x}, {y}, {b.like(x)})")


@maker("elementwise", "regularized_incomplete_beta")
def _(b: Builder):
    x = b.pick(SINGLE)
    return b.emit(f"lax.betainc({x}, {b.like(x)}, {b.like(x)})")


@maker("moves", "convert_element_type")
def _(b: Builder):
    value = b.pick(ALL if b.rng.random() < 0.3 else FLOATS)
    among = ALL if b.rng.random() < 0.3 else FLOATS
    dtype = b.dtype(among)
    if value.dtype.name in FLOATS and b.rng.random() < 0.05:
        dtype = b.rng.choice(["float8_e4m3fn", "float8_e5m2"])
        text = f"lax.convert_element_type({value}, {typename(dtype)})"
        [value] = b.emit(text, is_view=value.is_view)
        dtype = "float32"
    return b.convert(value, dtype)


@maker("moves", "bitcast_convert_type")
def _(b: Builder):
    x = b.pick((*FLOATS, *INTS))
    new = b.rng.choice([d for d in (*FLOATS, *INTS) if b.wide or "64" not in d])
    return b.emit(f"lax.bitcast_convert_type({x}, {typename(new)})")


@maker("elementwise", "optimization_barrier")
def _(b: Builder):
    return b.emit(f"lax.optimization_barrier(({b.pick()}, {b.pick()}))")


@maker("elementwise", "tie")
def _(b: Builder):
    return b.emit(f"jax._src.lax.lax.tie_p.bind({b.pick()}, {b.pick()})")


@maker("elementwise", "name")
def _(b: Builder):
    return b.emit(f"jax._src.ad_checkpoint.checkpoint_name({b.pick()}, 'kept')")


@maker("elementwise", "device_put")
def _(b: Builder):
    return b.emit(f"jax.device_put({b.pick()}, jax.devices()[0])")
