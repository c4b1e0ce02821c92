"""``perturb(fun)`` against its definition, on the programs of ``zoo.py``."""

import functools
import math
from collections.abc import Iterator

import flax.nnx as nnx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from zoo import PROGRAMS, normal

import radazo_jax as zo
from radazo_jax._src.directions.layout import layout_of
from radazo_jax._src.perturb import axes

SCALE = 0.1
SELECTED = [name for name, program in PROGRAMS.items() if program.selected]
# Programs that run once are not worth the compiler's efforts.
jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


class Hashed(zo.Law):
    """Numbers that depend on key and position and cost nothing to compile.

    What ``perturb`` does is the same for all laws that draw by position, and compiling
    Threefry takes most of the time of a small program.
    """

    def factor(self, params):
        del params
        return 1.0

    def draw(self, key, number, at):
        del number
        word = (at.lo + jax.random.key_data(key)[1]) * np.uint32(2654435761)
        return (word >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-23) - 1


LAWS = {
    "sphere": zo.sphere(),
    "gaussian": zo.gaussian(),
    "rademacher": zo.rademacher(),
    "coordinate": zo.coordinate(),
    "low_rank": zo.low_rank(),
    "low_rank(2)": zo.low_rank(2),
    "hashed": Hashed(),
}


def displaced(law, params, direction):
    """The definition: a leaf at a time, from the materialized direction."""
    u = law.materialize(direction, params)
    return jax.tree.map(lambda p, v: p + SCALE * v, params, u)


def arrays(tree):
    """What of an output can leave a compiled function, and be compared."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    ]


def sample(law, params, seed=0):
    return law.sample(jax.random.key(seed), params)


def samples(law, params, num=3):
    keys = jax.random.split(jax.random.key(0), num)
    return jax.vmap(lambda key: law.sample(key, params))(keys)


def both(fun, law, params, *args):
    """The perturbed function and its definition, of a direction."""
    return (
        lambda u: arrays(zo.perturb(fun)(params, u, SCALE, *args)),
        lambda u: arrays(fun(displaced(law, params, u), *args)),
    )


def assert_equal(got, expected, tolerance):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        wide = np.float64 if jnp.issubdtype(b.dtype, jnp.floating) else b.dtype
        a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
        finite = np.abs(b[np.isfinite(b)]) if b.size else np.ones(1)
        largest = max(1.0, float(np.max(finite, initial=0)))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * largest)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name", [name if name in SELECTED else slow(name) for name in PROGRAMS]
)
@pytest.mark.parametrize(
    ("law", "how"),
    [
        ("low_rank(2)", "jit"),
        slow("hashed", "vmap"),
        slow("hashed", "jit"),
        slow("low_rank(2)", "vmap"),
        slow("gaussian", "jit"),
        slow("rademacher", "vmap"),
    ],
)
def test_is_the_program_at_the_perturbed_point(law, how, name):
    law, program = LAWS[law], PROGRAMS[name]
    with program.context():
        fun, params, *args = program.build()
        perturbed, definition = both(fun, law, params, *args)
        if how == "jit":
            direction = sample(law, params)
            got, expected = jit(perturbed)(direction), jit(definition)(direction)
        else:
            directions = samples(law, params)
            got = jit(jax.vmap(perturbed))(directions)
            expected = jit(lambda us: lax.map(definition, us))(directions)
        assert_equal(got, expected, program.tolerance)


@pytest.mark.parametrize("name", SELECTED)
@pytest.mark.parametrize(
    "law", ["sphere", slow("gaussian"), slow("rademacher"), slow("coordinate")]
)
def test_every_law_under_scan_over_directions(law, name):
    law, program = LAWS[law], PROGRAMS[name]
    with program.context():
        fun, params, *args = program.build()
        perturbed, definition = both(fun, law, params, *args)
        directions = samples(law, params)
        expected = jit(lambda us: lax.map(definition, us))(directions)
        got = jit(lambda us: lax.scan(lambda c, u: (c, perturbed(u)), 0, us)[1])(
            directions
        )
        assert_equal(got, expected, program.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", SELECTED)
@pytest.mark.parametrize("law", ["gaussian", "low_rank"])
def test_eagerly(law, name):
    law, program = LAWS[law], PROGRAMS[name]
    with program.context():
        fun, params, *args = program.build()
        perturbed, definition = both(fun, law, params, *args)
        direction = sample(law, params)
        assert_equal(perturbed(direction), definition(direction), program.tolerance)


@pytest.mark.parametrize(
    "name",
    [
        name if program.selected else slow(name)
        for name, program in PROGRAMS.items()
        if program.differentiable
    ],
)
def test_gradient_with_respect_to_the_parameters(name):
    law, program = LAWS["hashed"], PROGRAMS[name]
    with program.context():
        fun, params, *args = program.build()
        params = jax.tree.map(jnp.asarray, params)

        def loss(params, *args):
            outputs = [
                x
                for x in arrays(fun(params, *args))
                if jnp.issubdtype(x.dtype, jnp.floating)
            ]
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in outputs)

        direction = sample(law, params)
        got = jit(jax.grad(lambda p: zo.perturb(loss)(p, direction, SCALE, *args)))(
            params
        )
        moved = displaced(law, params, direction)
        expected = jit(jax.grad(lambda p: loss(p, *args)))(moved)
        # A gradient sums what the outputs hold, and its rounding too.
        assert_equal(arrays(got), arrays(expected), 10 * program.tolerance)


# --- What is not an array ----------------------------------------------------------


@pytest.mark.parametrize("law", ["gaussian", "low_rank"])
def test_outputs_that_are_not_arrays(law):
    law = LAWS[law]
    fun, params, *args = PROGRAMS["outputs"].build()
    direction = sample(law, params)
    got = zo.perturb(fun)(params, direction, SCALE, *args)
    expected = fun(displaced(law, params, direction), *args)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for name in ("string", "none", "number", "float", "flag", "empty"):
        assert got[name] == expected[name]
        assert type(got[name]) is type(expected[name])
    assert isinstance(got["numpy"], np.ndarray)
    assert_equal(arrays(got), arrays(expected), 1e-5)


def test_keyword_arguments_and_static_ones():
    """The names of ``fun``'s arguments mean the same arguments in its perturbation."""

    def fun(params, x, power=2, *, shift):
        return (x @ params) ** power + shift

    params, x = normal(4, 5), normal(2, 4)
    law = zo.gaussian()
    direction = sample(law, params)
    expected = fun(displaced(law, params, direction), x, power=3, shift=1.0)
    compiled = jax.jit(zo.perturb(fun), static_argnames="power")
    for scale in (SCALE, jnp.float32(SCALE)):
        for f in (zo.perturb(fun), compiled):
            got = f(params, direction, scale, x, power=3, shift=1.0)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("law", ["gaussian", "low_rank"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_effects_happen_once(law, compiled, capsys):
    seen = []

    def fun(params, x):
        jax.debug.callback(lambda w: seen.append(np.asarray(w)), params)
        jax.debug.print("first row {}", params[0, 0] * 0)

        def step(x, i):
            jax.debug.callback(lambda i: seen.append(int(i)), i)
            return x @ params, None

        x, _ = lax.scan(step, x, jnp.arange(3))
        jax.debug.print("done {}", jnp.sum(x) * 0, ordered=True)
        return lax.cond(x[0, 0] == 7, lambda: jax.debug.print("never"), lambda: None)

    law = LAWS[law]
    params, x = normal(4, 4), normal(2, 4)
    direction = sample(law, params)
    perturbed = jax.jit(zo.perturb(fun)) if compiled else zo.perturb(fun)
    perturbed(params, direction, SCALE, x)
    jax.effects_barrier()
    printed = capsys.readouterr().out
    assert printed.count("first row") == 1
    assert printed.count("done") == 1
    assert "never" not in printed
    [leaf] = [w for w in seen if isinstance(w, np.ndarray)]
    expected = displaced(law, params, direction)
    np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)
    assert sorted(i for i in seen if isinstance(i, int)) == [0, 1, 2]


def test_flax_state_that_the_function_writes_into():
    """Outside of any jit, where the definition accepts it."""
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(norm, nnx.Param, ...)
    law = zo.gaussian()
    direction = sample(law, params)

    def fun(params, rest, x):
        return nnx.merge(graph, params, rest)(x)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected = fun(displaced(law, params, direction), rest, normal(3, 4))
        _, _, rest = nnx.split(norm, nnx.Param, ...)
        got = zo.perturb(fun)(params, direction, SCALE, rest, normal(3, 4))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("law", ["gaussian", "low_rank"])
def test_leaves_of_64_bits(law):
    with jax.enable_x64(True):
        law = LAWS[law]
        params = jnp.linspace(-1.0, 1.0, 20, dtype=jnp.float64).reshape(4, 5)
        x = jnp.full((2, 4), 1 / 3, jnp.float64)
        perturbed, definition = both(lambda p, x: (x @ p, p), law, params, x)
        direction = sample(law, params)
        # The draws are float32 numbers; the products of low rank are of those.
        scale = np.abs(SCALE * np.asarray(law.materialize(direction, params))).max()
        got, expected = perturbed(direction), definition(direction)
        assert got[0].dtype == jnp.float64
        np.testing.assert_allclose(got[1], expected[1], atol=1e-7 * scale)
        np.testing.assert_allclose(got[0], expected[0], atol=1e-7 * scale)
        # Where nothing is perturbed, nothing is rounded.
        got = zo.perturb(lambda p, x: x @ p)(params, direction, 0.0, x)
        np.testing.assert_allclose(got, x @ params, rtol=1e-15, atol=1e-15)


WIDE_PRODUCTS = {
    "dot_general": (
        lambda w, x: x @ w,
        lambda *shape: jnp.ones(shape, jnp.float64),
        (3, 4),
        (2, 3),
    ),
    "convolution": (
        lambda w, x: lax.conv_general_dilated(
            x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        lambda *shape: jnp.ones(shape, jnp.float64),
        (1, 3, 4),
        (1, 2, 3),
    ),
}


@pytest.mark.parametrize("name", WIDE_PRODUCTS)
@pytest.mark.parametrize("size", [1e39, 1e-50])
def test_products_of_64_bits_with_low_rank(name, size):
    """Of inputs beyond the range of float32."""
    with jax.enable_x64(True):
        fun, ones, shape, x_shape = WIDE_PRODUCTS[name]
        law = zo.low_rank()
        params = ones(*shape)
        x = size * ones(*x_shape)
        perturbed, definition = both(fun, law, params, x)
        direction = sample(law, params)
        [got], [expected] = perturbed(direction), definition(direction)
        # The elements of a materialized direction are float32 numbers.
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6 * size)


def test_a_float_is_a_leaf_of_32_bits():
    law, x = zo.gaussian(), jnp.ones(2, jnp.bfloat16)
    params = {"a": 0.5, "b": jnp.asarray(0.5)}
    direction = sample(law, params)

    def fun(params, x):
        return params["a"] * x, params["b"] * x

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        moved = displaced(law, jax.tree.map(jnp.float32, params), direction)
        expected = fun(moved, x)
        got = zo.perturb(fun)(params, direction, SCALE, x)
    assert all(y.dtype == jnp.float32 for y in got)
    assert_equal(got, expected, 1e-6)


@pytest.mark.parametrize("law", ["gaussian", "low_rank"])
def test_leaks_no_tracer(law):
    params, x = normal(4, 5), normal(2, 4)
    direction = sample(LAWS[law], params)
    with jax.checking_leaks():
        zo.perturb(lambda w, x: {"y": x @ w, "name": "y"})(params, direction, SCALE, x)


# --- Random programs ----------------------------------------------------------------


def _permute(draw, shape):
    order = tuple(draw(st.permutations(range(len(shape)))))
    return lambda w: jnp.transpose(w, order)


def _merge(draw, shape):
    axis = draw(st.integers(0, max(len(shape) - 2, 0)))
    new = (*shape[:axis], math.prod(shape[axis : axis + 2]), *shape[axis + 2 :])
    return lambda w: w.reshape(new)


def _split(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    size = shape[axis]
    first = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    new = (*shape[:axis], first, size // first, *shape[axis + 1 :])
    return lambda w: w.reshape(new)


def _slice(draw, shape):
    kept = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        kept.append(slice(start, stop, draw(st.integers(1, 2))))
    return lambda w: w[tuple(kept)]


def _flip(draw, shape):
    axes = draw(st.sets(st.integers(0, len(shape) - 1)))
    return lambda w: jnp.flip(w, tuple(axes))


def _expand(draw, shape):
    axis = draw(st.integers(0, len(shape)))
    return lambda w: jnp.expand_dims(w, axis)


def _squeeze(draw, shape):
    del draw
    if math.prod(shape) == 1:
        return lambda w: w
    return jnp.squeeze


def _take(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    mode = draw(st.sampled_from(["clip", "fill", "wrap", None]))
    size = shape[axis]
    indices = st.lists(st.integers(-size - 1, size + 1), min_size=1, max_size=3)
    ids = np.array(draw(indices), np.int32)
    ids = ids if mode else np.clip(ids, -size, size - 1)
    return lambda w: jnp.nan_to_num(jnp.take(w, jnp.asarray(ids), axis, mode=mode))


def _gather(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    mode = draw(st.sampled_from(["clip", "fill", "promise_in_bounds"]))
    size, width = shape[axis], draw(st.integers(1, shape[axis]))
    low, high = (0, size - width) if mode[0] == "p" else (-2 * size, 2 * size)
    ids = draw(st.lists(st.integers(low, high), min_size=1, max_size=3))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, len(shape) + 1)),
        collapsed_slice_dims=(),
        start_index_map=(axis,),
    )
    sizes = (*shape[:axis], width, *shape[axis + 1 :])
    fill = draw(st.sampled_from([0.0, -2.5]))
    ids = np.array(ids, np.int32)[:, None]
    return lambda w: lax.gather(
        w, jnp.asarray(ids), numbers, sizes, mode=mode, fill_value=fill
    )


def _dynamic_slice(draw, shape):
    sizes = [draw(st.integers(1, size)) for size in shape]
    starts = [draw(st.integers(-2 * size - 1, 2 * size)) for size in shape]
    wraps = draw(st.booleans())
    return lambda w: lax.dynamic_slice(
        w, [jnp.int32(i) for i in starts], sizes, allow_negative_indices=wraps
    )


def _product(draw, shape):
    axis, left = draw(st.integers(0, len(shape) - 1)), draw(st.booleans())
    other = normal(2, shape[axis])
    if left:
        return lambda w: jnp.tensordot(other, w, ((1,), (axis,)))
    return lambda w: jnp.tensordot(w, other, ((axis,), (1,)))


def _batched_product(draw, shape):
    axis, batch = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, 4))
    batch %= len(shape)
    if batch == axis:
        return lambda w: w
    letters = "abcdefgh"[: len(shape)]
    out = letters.replace(letters[axis], "")
    other = normal(shape[batch], 2, shape[axis])
    spec = f"{letters[batch]}z{letters[axis]},{letters}->z{out}"
    return lambda w: jnp.einsum(spec, other, w)


def _scan(draw, shape):
    del shape
    reverse = draw(st.booleans())

    def scan(w):
        zeros = jnp.zeros(w.shape[1:])
        step = lambda c, x: (c + x, 2 * x)  # noqa: E731
        total, parts = lax.scan(step, zeros, w, reverse=reverse)
        return parts + total[None]

    return scan


def _sine(draw, shape):
    del draw, shape
    return jnp.sin


OPERATIONS = [
    _permute,
    _merge,
    _split,
    _slice,
    _flip,
    _expand,
    _squeeze,
    _take,
    _gather,
    _dynamic_slice,
    _product,
    _batched_product,
    _scan,
    _sine,
]


@hypothesis.settings(max_examples=15)
@hypothesis.given(data=st.data())
@pytest.mark.parametrize("law", ["hashed", "low_rank"])
def test_random_programs(law, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    # A leaf before it, so that its positions do not start at 0.
    params, steps = {"a": normal(3), "w": normal(*shape)}, []
    for _ in range(data.draw(st.integers(1, 5))):
        if not shape or len(shape) > 6:
            break
        steps.append(data.draw(st.sampled_from(OPERATIONS))(data.draw, shape))
        shape = jax.eval_shape(
            steps[-1], jax.ShapeDtypeStruct(shape, jnp.float32)
        ).shape

    def fun(params):
        return functools.reduce(lambda w, step: step(w), steps, params["w"])

    law = LAWS[law]
    perturbed, definition = both(fun, law, params)
    got, expected = jit(lambda u: (perturbed(u), definition(u)))(sample(law, params))
    assert_equal(got, expected, 2e-5)


# --- What is never formed -----------------------------------------------------------

# Primitives that move numbers and compute none.
MOVES = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "gather",
    "optimization_barrier",
    "reshape",
    "rev",
    "row_major",
    "slice",
    "squeeze",
    "transpose",
}


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All equations that compute something, those of inner programs included."""
    for eqn in jaxpr.eqns:
        inner = [
            x.jaxpr if isinstance(x, core.ClosedJaxpr) else x
            for value in eqn.params.values()
            for x in (value if isinstance(value, tuple | list) else [value])
            if isinstance(x, core.ClosedJaxpr | core.Jaxpr)
        ]
        for sub in inner:
            yield from equations(sub)
        if not inner:
            yield eqn


def computed_sizes(fun, law, params, *args, num=None) -> list[tuple[int, str]]:
    """The size of each value that the perturbed function computes, and by what.

    Of ``num`` directions under ``vmap``, or of one.
    """

    def perturbed(params, direction, *args):
        return zo.perturb(fun)(params, direction, SCALE, *args)

    direction = samples(law, params, num) if num else sample(law, params)
    if num:
        perturbed = jax.vmap(perturbed, in_axes=(None, 0, *(None for _ in args)))
    jaxpr = jax.make_jaxpr(perturbed)(params, direction, *args)
    return [
        (math.prod(v.aval.shape), eqn.primitive.name)
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name not in MOVES
        for v in eqn.outvars
    ]


def nnx_program(module, *args):
    graph, params = nnx.split(module)
    return lambda params, *args: nnx.merge(graph, params)(*args), params, *args


def attend(params, h):
    return h @ params.T


def scan_stack(params, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]


# The largest leaf of each is the matrix; all else in it is much smaller.
NEVER_FORMED = {
    "dense": lambda: (lambda w, x: x @ w, normal(20, 30), normal(2, 20)),
    "nnx.Linear": lambda: nnx_program(
        nnx.Linear(20, 30, rngs=nnx.Rngs(0)), normal(2, 20)
    ),
    "nnx.LinearGeneral out": lambda: nnx_program(
        nnx.LinearGeneral(20, (5, 6), rngs=nnx.Rngs(0)), normal(2, 20)
    ),
    "nnx.LinearGeneral in": lambda: nnx_program(
        nnx.LinearGeneral((5, 6), 20, axis=(-2, -1), rngs=nnx.Rngs(0)), normal(2, 5, 6)
    ),
    "nnx.Embed": lambda: nnx_program(
        nnx.Embed(30, 20, rngs=nnx.Rngs(0)), jnp.array([3, 4])
    ),
    "look-up": lambda: (lambda w, i: w[i], normal(30, 20), jnp.array([3, -1])),
    "tied": lambda: (attend, normal(30, 20), normal(2, 20)),
    "tied, looked up too": lambda: (
        lambda w, i: w[i] @ w.T,
        normal(30, 20),
        jnp.array([3, 4]),
    ),
    "einsum, weight right": lambda: (
        lambda w, x: jnp.einsum("bti,io->bto", x, w),
        normal(20, 30),
        normal(1, 2, 20),
    ),
    "einsum, weight left": lambda: (
        lambda w, x: jnp.einsum("oi,bi->ob", w, x),
        normal(30, 20),
        normal(2, 20),
    ),
    "bfloat16": lambda: (
        lambda w, x: x @ w.astype(jnp.float32),
        normal(20, 30, dtype=jnp.bfloat16),
        normal(2, 20),
    ),
    "narrow compute": lambda: (
        lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
        normal(20, 30),
        normal(2, 20),
    ),
    "remat": lambda: (
        jax.checkpoint(lambda w, x: jnp.tanh(x @ w)),
        normal(20, 30),
        normal(2, 20),
    ),
}


@pytest.mark.parametrize("name", NEVER_FORMED)
@pytest.mark.parametrize("num", [None, 2], ids=["one", "vmap"])
def test_low_rank_never_forms_the_matrix(name, num):
    law = zo.low_rank(2)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        fun, params, *args = NEVER_FORMED[name]()
        law = axes.specialize(law, lambda p: fun(p, *args), params, layout_of(params))
        full = max(leaf.size for leaf in jax.tree.leaves(params))
        sizes = computed_sizes(fun, law, params, *args, num=num)
    assert max(sizes)[0] < full, max(sizes)


@pytest.mark.parametrize("law", LAWS)
def test_a_scanned_stack_is_perturbed_slice_by_slice(law):
    params, x = normal(7, 6, 6), normal(2, 6)
    sizes = computed_sizes(scan_stack, LAWS[law], params, x)
    # Of the factors of low rank, all may be drawn ahead; of a dense draw, no more than
    # the two words of each number of one matrix.
    bound = 7 * 6 * 2 if law.startswith("low_rank") else 2 * 6 * 6
    assert max(sizes)[0] <= bound, max(sizes)


def test_a_scanned_stack_of_low_rank_forms_no_slice():
    params, x = normal(3, 20, 20), normal(2, 20)
    sizes = computed_sizes(scan_stack, zo.low_rank(2), params, x)
    assert max(sizes)[0] < 400, max(sizes)


@pytest.mark.parametrize(
    "look_up",
    [
        lambda w, i: w[i],
        lambda w, i: w.at[i].get(mode="clip"),
        lambda w, i: w.at[i].get(mode="fill"),
        lambda w, i: w.at[i].get(mode="fill", fill_value=0.0),
        lambda w, i: jnp.take(w, i, axis=0),
        lambda w, i: w.T[:, i],
        lambda w, i: w.astype(jnp.bfloat16)[i],
        lambda w, i: jax.vmap(lambda i: w[i])(i),
        lambda w, i: lax.map(lambda i: w[i], i),
        lambda w, i: lax.cond(i[0] > 0, lambda: w[i], lambda: w[i + 1]),
    ],
    ids=[
        "default",
        "clip",
        "fill",
        "fill with 0",
        "take",
        "transposed",
        "cast",
        "vmap",
        "map",
        "cond",
    ],
)
@pytest.mark.parametrize("law", ["gaussian", "sphere", "rademacher", "low_rank"])
def test_a_look_up_never_draws_the_table(law, look_up):
    params, ids = normal(30, 20), jnp.array([3, -4])
    sizes = computed_sizes(look_up, LAWS[law], params, ids)
    assert max(sizes)[0] <= 2 * 2 * 20, max(sizes)


def waits(fun, law, params, *args) -> list[list[tuple[int, ...]]]:
    """The shapes of what each barrier of the perturbed function ties together."""

    def perturbed(params, direction, *args):
        return zo.perturb(fun)(params, direction, SCALE, *args)

    jaxpr = jax.make_jaxpr(perturbed)(params, sample(law, params), *args)
    return [
        [atom.aval.shape for atom in eqn.invars]
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name == "optimization_barrier"
    ]


def test_layers_one_after_another_wait_for_their_inputs():
    # Or all perturbed layers would be alive together.
    params = [jnp.ones((300, 300)), jnp.ones((300, 300))]
    x = jnp.ones((5, 300))
    tied = waits(lambda p, x: jnp.tanh(x @ p[0]) @ p[1], zo.gaussian(), params, x)
    assert sum((5, 300) in shapes for shapes in tied) == 2


@pytest.mark.parametrize("unroll", [1, 2])
def test_a_leaf_used_in_every_step_waits_for_the_step_not_for_its_slice(unroll):
    # Waiting for the slice would copy it out of its stack; waiting for nothing would
    # build the leaf before the loop. Steps unrolled are layers one after another.
    def fun(w, xs):
        return lax.scan(lambda c, x: (c, x @ w), 0, xs, unroll=unroll)[1]

    w, xs = jnp.ones((300, 300)), jnp.ones((4, 5, 300))
    tied = waits(fun, zo.rademacher(), w, xs)
    assert tied
    assert any((5, 300) in shapes for shapes in tied) == (unroll > 1)
