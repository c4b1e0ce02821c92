"""Control flow, functions with rules of their own, and calls out of the program."""

from .build import FLOATS, Builder, Refused, maker
from .program import Block, Value

SINGLE = ("float32", "float64")


def _inner(b: Builder, *types: Value, length=3, views=False) -> tuple[Block, Builder]:
    """A function of arguments of these types, and what made it."""
    inner, args = b.block(*types, length=length, views=views)
    made = [value for s in inner.statements for value in s.outs]
    plain = [value for value in (made or args) if _is_array(value)]
    if not plain:
        raise Refused
    results = plain[-1 - b.rng.randint(0, min(2, len(plain) - 1)) :]
    return inner.close(args, results), inner


def _is_array(value: Value) -> bool:
    return "key" not in value.dtype.name and "float8" not in value.dtype.name


def _map_of(b: Builder, value: Value, *others: Value, views: bool = False) -> Block:
    """A function whose first result has the type of its first argument."""
    inner, args = b.block(value, *others, views=views)
    result = inner.make(value.shape, value.dtype.name)
    if result is args[0]:
        [result] = inner.emit(f"jnp.negative({result})")
    made = [v for s in inner.statements for v in s.outs if _is_array(v)]
    return inner.close(args, [result, *made[:1]])


def _reads_outside(block: Block) -> bool:
    return bool(block.reads() - {value.name for value in block.args})


def _applied(text: str):
    """A wrapper of a function that is applied to variables."""

    def make(b: Builder):
        types = [b.pick() for _ in range(b.rng.randint(1, 2))]
        block, _ = _inner(b, *types, views=True)
        if "vmap" in text and _reads_outside(block):
            raise Refused  # JAX keeps the variable itself, and loses it in `vmap`.
        names = ", ".join(map(str, types))
        return b.emit(f"{text.format(f=block)}({names})", block)

    return make


for _name, _text in {
    "jit": "jax.jit({f})",
    "remat2": "jax.checkpoint({f})",
    "composite": "lax.composite({f}, 'fuzz.composite')",
    "custom_vmap_call": "jax.custom_batching.sequential_vmap({f})",
}.items():
    maker("calls", _name)(_applied(_text))


@maker("calls", "scan")
def _(b: Builder):
    carry = b.pick((*FLOATS, "int32"))
    stacks = [b.of_rank(1, (*FLOATS, "int32")) for _ in range(b.rng.randint(0, 2))]
    stacks = [v for v in stacks if v.shape[0] == stacks[0].shape[0]]
    length = stacks[0].shape[0] if stacks else b.rng.randint(0, 3)
    slices = [Value("", v.shape[1:], v.dtype, v.is_view) for v in stacks]
    block = _map_of(b, carry, *slices, views=True)
    names = ", ".join(map(str, stacks))
    xs = f"({names},)" if names else "None"
    reverse, unroll = b.rng.random() < 0.3, b.rng.choice([1, 1, 2])
    step = f"lambda c, x: (lambda first, *rest: (first, rest))(*{block}(c, *x))"
    if not names:
        step = step.replace("*x", "*()")
    text = (
        f"(lambda end, ys: (end, *ys))(*lax.scan({step}, {carry}, {xs}, "
        f"length={length}, reverse={reverse}, unroll={unroll}))"
    )
    return b.emit(text, block)


@maker("calls", "while")
def _(b: Builder):
    carry = b.pick((*FLOATS, "int32"))
    block = _map_of(b, carry)
    times = b.rng.randint(0, 3)
    limit = f"jnp.int32({times})"
    if b.rng.random() < 0.4:  # Read in the condition, from outside.
        bound = b.pick(SINGLE, lambda v: v.shape == ())
        limit = f"jnp.where({bound} > 0, jnp.int32({times}), jnp.int32(1))"
    text = (
        f"lax.while_loop(lambda c: c[0] < {limit}, "
        f"lambda c: (c[0] + jnp.int32(1), {block}(c[1])[0]), "
        f"(jnp.int32(0), {carry}))"
    )
    return b.emit(text, block)


@maker("calls", "cond")
def _(b: Builder):
    value = b.pick()
    blocks = []
    for _ in range(b.rng.randint(2, 3)):
        inner, args = b.block(value, views=True)
        blocks.append(inner.close(args, [inner.make(value.shape, value.dtype.name)]))
    names = ", ".join(map(str, blocks))
    index = b.integers((), -1, 3)
    which = f"{index}.astype(jnp.int32)"
    return b.emit(f"lax.switch({which}, [{names}], {value})", *blocks)


@maker("calls", "platform_index")
def _(b: Builder):
    block = _map_of(b, value := b.pick())
    return b.emit(
        f"lax.platform_dependent({value}, cpu={block}, tpu=lambda x: {block}(x))",
        block,
    )


@maker("calls", "custom_jvp_call")
def _(b: Builder):
    x = b.pick(SINGLE)
    block = _map_of(b, x)
    text = (
        "(lambda f: (f.defjvp(lambda p, t: (f(*p), lax.mul(t[0], t[0]))), "
        f"f({x}))[1])(jax.custom_jvp(lambda x: {block}(x)[0]))"
    )
    return b.emit(text, block)


@maker("calls", "custom_vjp_call")
def _(b: Builder):
    x = b.pick(SINGLE)
    block = _map_of(b, x)
    text = (
        "(lambda f: (f.defvjp(lambda x: (f(x), x), lambda x, t: (lax.mul(t, x),)), "
        f"f({x}))[1])(jax.custom_vjp(lambda x: {block}(x)[0]))"
    )
    return b.emit(text, block)


@maker("calls", "linear_call")
def _(b: Builder):
    x = b.pick(SINGLE)
    y = b.like(x)
    f = "lambda r, x: lax.mul(r, x)"
    return b.emit(f"jax.custom_derivatives.linear_call({f}, {f}, {x}, {y})")


@maker("calls", "custom_linear_solve")
def _(b: Builder):
    d, x = b.make((3,), "float32"), b.make((3,), "float32")
    return b.emit(
        f"lax.custom_linear_solve(lambda x: {d} * x, {x}, lambda f, x: x / {d})"
    )


@maker("calls", "closed_call", "call")
def _(b: Builder):
    block, _ = _inner(b, x := b.pick(), views=True)
    name = b.rng.choice(["call", "closed_call"])
    about = f"jax._src.api_util.debug_info('f', {block}, ({x},), {{}})"
    fun = f"jax._src.linear_util.wrap_init({block}, debug_info={about})"
    text = f"jax._src.core.{name}_p.bind({x}, subfuns=({fun},))"
    return b.emit(f"tuple({text})", block)


@maker("calls", "vmap")
def _(b: Builder):
    """No primitive, but it batches those inside."""
    x = b.of_rank(1, FLOATS)
    axis = b.axis(x)
    if not x.shape[axis]:
        raise Refused
    one = Value("", x.shape[:axis] + x.shape[axis + 1 :], x.dtype, x.is_view)
    block, _ = _inner(b, one, views=True)
    out = b.rng.choice([0, 0, -1])
    return b.emit(f"jax.vmap({block}, {axis}, {out})({x})", block)


@maker("calls", "ref")
def _(b: Builder):
    """Arrays that are written into."""
    x = b.of_rank(1, SINGLE)
    if not x.shape[0]:
        raise Refused
    y = b.make(x.shape[1:], x.dtype.name)
    text = f"(lambda r: (r.__setitem__(0, {y}), r[...])[1])(jax.new_ref({x}))"
    return b.emit(text)


def _outside(text: str):
    def make(b: Builder):
        x = b.pick(SINGLE)
        return b.emit(text.format(x=x))

    return make


for _name, _text in {
    "pure_callback": (
        "jax.pure_callback(lambda x: np.asarray(x) * 2, "
        "jax.ShapeDtypeStruct({x}.shape, {x}.dtype), {x}, "
        "vmap_method='sequential')"
    ),
    "io_callback": (
        "jax.experimental.io_callback(lambda x: np.asarray(x) + 1, "
        "jax.ShapeDtypeStruct({x}.shape, {x}.dtype), {x})"
    ),
    "debug_callback": "(jax.debug.callback(lambda x: None, {x}), lax.neg({x}))[1]",
    "debug_print": "(jax.debug.print('{{}}', {x}), lax.neg({x}))[1]",
    "call_exported": "jax.export.export(jax.jit(jnp.sin))({x}).call({x})",
    "dce_sink": "(lax.dce_sink({x}), lax.neg({x}))[1]",
}.items():
    maker("outside", _name)(_outside(_text))
