"""Programs to perturb: one function each, small, and one line in every test of them.

A builder returns the function, its parameters and its further arguments. What the
tests must know of a program stands in its decorator.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax


@dataclasses.dataclass(frozen=True)
class Program:
    """One entry of the zoo.

    Attributes:
      build: Returns ``(fun, params, *args)``.
      differentiable: Whether ``jax.grad`` of it means something.
      tolerance: How far the result may be off, of the largest value that it holds.
      flax: Whether Flax runs in it, which mixes dtypes and ranks.
      selected: Whether it is among the few that all laws are tried on.
    """

    build: Callable[[], tuple[Any, ...]]
    differentiable: bool = True
    tolerance: float = 2e-5
    flax: bool = False
    selected: bool = False

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """The promotion that the program needs."""
        if not self.flax:
            yield
            return
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield


PROGRAMS: dict[str, Program] = {}

# A leaf of 16 bits holds p + s·u rounded once; the definition rounds u, s·u and the
# sum. Three roundings of half a unit in the last place, and the layers amplify them.
BFLOAT16 = 8 * 2**-8
FLOAT16 = 8 * 2**-11


def program(**known: Any) -> Callable[[Callable[[], tuple[Any, ...]]], Any]:
    """Puts a builder into the table."""

    def add(build: Callable[[], tuple[Any, ...]]) -> Any:
        PROGRAMS[build.__name__] = Program(build, **known)
        return build

    return add


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Numbers that depend on the shape alone."""
    rng = np.random.RandomState(sum(shape) * 7 + len(shape))
    return jnp.asarray(rng.normal(size=shape), dtype) * jnp.asarray(0.5, dtype)


def tokens(*shape: int, below: int) -> jax.Array:
    return jnp.asarray(np.random.RandomState(3).randint(0, below, shape), jnp.int32)


# --- Networks -----------------------------------------------------------------------


@program(selected=True)
def mlp():
    def fun(params, x):
        for w, b in params[:-1]:
            x = jnp.tanh(x @ w + b[None])
        w, b = params[-1]
        return jax.nn.log_softmax(x @ w + b[None])

    params = [(normal(5, 7), normal(7)), (normal(7, 6), normal(6))]
    return fun, params, normal(4, 5)


@program()
def cnn_with_batch_norm():
    def fun(params, x):
        x = lax.conv_general_dilated(
            x,
            params["conv"],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        mean = jnp.mean(x, (0, 1, 2), keepdims=True)
        var = jnp.var(x, (0, 1, 2), keepdims=True)
        x = (x - mean) * lax.rsqrt(var + 1e-3)
        x = jax.nn.relu(x * params["scale"][None, None, None] + params["bias"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return x.reshape(x.shape[0], -1) @ params["head"], mean

    params = {
        "conv": normal(3, 3, 2, 4),
        "scale": 1 + normal(4),
        "bias": normal(1, 1, 1, 4),
        "head": normal(16, 3),
    }
    return fun, params, normal(2, 4, 4, 2)


@program()
def convolutions():
    def fun(params, x):
        conv = functools.partial(lax.conv_general_dilated, x, padding="SAME")
        numbers = ("NHWC", "HWIO", "NHWC")
        return {
            "depthwise": conv(
                params["depthwise"],
                window_strides=(1, 1),
                dimension_numbers=numbers,
                feature_group_count=4,
            ),
            "grouped": conv(
                params["grouped"],
                window_strides=(2, 1),
                dimension_numbers=numbers,
                feature_group_count=2,
            ),
            "odd numbers": conv(
                params["odd"],
                window_strides=(1, 2),
                rhs_dilation=(1, 2),
                dimension_numbers=("NHWC", "IHOW", "HCNW"),
            ),
            # The image is the parameter too.
            "of itself": lax.conv(
                params["odd"],
                jnp.transpose(params["odd"], (0, 2, 1, 3)),
                (1, 1),
                "SAME",
            ),
        }

    params = {
        "depthwise": normal(3, 3, 1, 4),
        "grouped": normal(2, 2, 2, 6),
        "odd": normal(4, 3, 3, 2),
    }
    return fun, params, normal(2, 5, 4, 4)


@program()
def gru():
    def fun(params, xs):
        def cell(h, x):
            gates = x @ params["input"] + h @ params["hidden"] + params["bias"][None]
            r, z, n = jnp.split(gates, 3, axis=-1)
            n = jnp.tanh(n * jax.nn.sigmoid(r))
            h = (1 - jax.nn.sigmoid(z)) * n + jax.nn.sigmoid(z) * h
            return h, h

        start = jnp.broadcast_to(params["start"][None], (xs.shape[1], 4))
        last, hs = lax.scan(cell, start, xs)
        return last, hs

    params = {
        "input": normal(3, 12),
        "hidden": normal(4, 12),
        "bias": normal(12),
        "start": normal(4),
    }
    return fun, params, normal(5, 2, 3)


@program()
def decoder():
    """Scanned layers, attention, and one table that embeds and unembeds."""

    def norm(x, scale):
        x = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        return x * scale[None, None]

    def fun(params, ids):
        table = params["embedding"]
        h = table[ids] + params["position"][None, : ids.shape[1]]

        def layer(h, p):
            x = norm(h, p["norm"])
            q = jnp.einsum("btd,dnh->btnh", x, p["q"])
            k = jnp.einsum("btd,dnh->btnh", x, p["k"])
            v = jnp.einsum("btd,dnh->btnh", x, p["v"])
            x = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            h = h + jnp.einsum("btnh,nhd->btd", x, p["o"])
            return h + jax.nn.gelu(h @ p["up"]) @ p["down"], None

        h, _ = lax.scan(layer, h, params["layers"])
        return h @ table.T

    layers, width, heads, size = 2, 6, 2, 3
    params = {
        "embedding": normal(9, width),
        "position": normal(8, width),
        "layers": {
            "norm": 1 + normal(layers, width),
            "q": normal(layers, width, heads, size),
            "k": normal(layers, width, heads, size) + 0.1,
            "v": normal(layers, width, heads, size) - 0.1,
            "o": normal(layers, heads, size, width),
            "up": normal(layers, width, 8),
            "down": normal(layers, 8, width),
        },
    }
    return fun, params, tokens(2, 4, below=9)


@program()
def mixture_of_experts():
    def fun(params, x):
        scores = jax.nn.softmax(x @ params["router"])
        weights, chosen = lax.top_k(scores, 2)
        up, down = params["up"][chosen], params["down"][chosen]
        h = jax.nn.silu(jnp.einsum("td,tkdf->tkf", x, up))
        return jnp.einsum("tkf,tkfd,tk->td", h, down, weights), chosen

    params = {"router": normal(4, 3), "up": normal(3, 4, 5), "down": normal(3, 5, 4)}
    return fun, params, normal(6, 4)


@program()
def ensemble_under_vmap():
    def fun(params, x, members):
        def one(p, x):
            return jnp.tanh(x @ p["w"] + p["b"][None]) @ p["w"].T

        def look_up(p, i):
            return p["w"][i]

        return (
            jax.vmap(one, in_axes=(0, None))(params, x),
            jax.vmap(one, in_axes=({"w": 0, "b": 0}, 0), out_axes=1)(
                params, jnp.stack([x, x + 1, x - 1])
            ),
            jax.vmap(look_up)(params, members),
            jax.vmap(lambda w: w[:, 1], in_axes=2, out_axes=-1)(params["w"]),
        )

    params = {"w": normal(3, 4, 5), "b": normal(3, 5)}
    return fun, params, normal(2, 4), jnp.array([0, 3, -1])


@program()
def lora():
    """A frozen weight comes as an argument; a sum and a product of factors."""

    def fun(params, frozen, x):
        merged = frozen + params["a"] @ params["b"]
        return x @ merged, x @ params["a"] @ params["b"], params["a"].T @ params["a"]

    params = {"a": normal(5, 3), "b": normal(3, 4)}
    return fun, params, normal(5, 4), normal(2, 5)


# --- Flax ---------------------------------------------------------------------------


@program(flax=True)
def flax_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(7, 6, rngs=rngs)
            self.conv = nnx.Conv(6, 6, kernel_size=(3,), rngs=rngs)
            self.norm = nnx.BatchNorm(6, use_running_average=False, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
            self.general = nnx.LinearGeneral((6,), (2, 4), rngs=rngs)
            self.linear = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, ids):
            x = self.norm(self.conv(self.embed(ids)))
            x = jnp.tanh(x + self.attention(x))
            return self.linear(self.general(x)), self.embed.attend(x)

    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def fun(params, rest, ids):
        # Flax wants what it writes into to be of the trace that it writes in.
        net = nnx.merge(graph, params, jax.tree.map(lambda x: x, rest))
        out = net(ids)
        return out, nnx.state(net, nnx.BatchStat)

    return fun, params, rest, tokens(2, 5, below=7)


@program(flax=True)
def flax_linen():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, ids, *, train):
            embed = linen.Embed(7, 6)
            x = linen.LayerNorm()(embed(ids))
            x = linen.Conv(6, (3,))(x)
            x = linen.remat(linen.Dense)(4)(x)
            x = linen.Dropout(0.5, deterministic=not train)(x)
            return embed.attend(linen.DenseGeneral(6, axis=(-1,))(x))

    ids = tokens(2, 5, below=7)
    net = Net()
    params = net.init(jax.random.key(0), ids, train=False)

    def fun(params, ids, key):
        return net.apply(params, ids, train=True, rngs={"dropout": key})

    return fun, params, ids, jax.random.key(1)


# --- Control flow -------------------------------------------------------------------


@program(selected=True)
def remat():
    def fun(params, x):
        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(x @ w + params["b"][None])

        x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, params["stack"])
        policy = jax.checkpoint_policies.dots_saveable
        return jax.checkpoint(lambda x: x @ params["stack"][0], policy=policy)(x)

    return fun, {"stack": normal(3, 4, 4), "b": normal(4)}, normal(2, 4)


@program(selected=True)
def branches():
    def fun(params, x, i):
        w = params["w"]
        cond = lax.cond(i > 0, lambda w: x @ w, lambda w: 2 * (x @ w.T), w)
        by_value = lax.cond(w[0, 0] > 100, lambda: w, lambda: -w)
        switched = lax.switch(
            i, [lambda x: x @ w, lambda x: jnp.zeros((2, 4)), lambda x: x], x
        )
        constant = lax.cond(i > 0, lambda: (w[1], 1.0), lambda: (w[2], 2.0))
        certain = lax.cond(True, lambda w: w[1:], lambda w: w[:-1], w)
        clamped = lax.switch(i + 7, [lambda: w[0], lambda: params["v"]])
        return cond, by_value, switched, constant, certain, clamped

    return fun, {"w": normal(4, 4), "v": normal(4)}, normal(2, 4), jnp.int32(1)


@program(selected=True, differentiable=False)
def while_loops():
    def fun(params, x):
        w, b = params["w"], params["b"]

        def go_on(state):
            i, x = state
            return (i < 5) & (jnp.sum(x**2) < 10 + b[0] ** 2)

        in_closure = lax.while_loop(go_on, lambda s: (s[0] + 1, s[1] @ w), (0, x))
        as_state = lax.while_loop(
            lambda s: s[0] < 2,
            lambda s: (s[0] + 1, 0.5 * (s[1] @ w)),
            (jnp.int32(0), w),
        )
        return in_closure, as_state

    return fun, {"w": normal(4, 4), "b": normal(4)}, normal(2, 4)


@program()
def fori_loops():
    def fun(params, x):
        w = params["w"]
        in_closure = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w[i]), x)
        as_state = lax.fori_loop(0, 2, lambda i, w: jnp.sin(w) * params["b"], w)
        backward = lax.fori_loop(0, 3, lambda i, x: x + w[2 - i, :2], x)
        return in_closure, as_state, backward

    return fun, {"w": normal(3, 4, 4), "b": normal(1, 1, 4)}, normal(2, 4)


@program()
def scans():
    def fun(params, x):
        stack, other, bias = params["stack"], params["other"], params["bias"]

        def step(x, leaf):
            return jnp.tanh(x @ leaf), x[0, 0]

        def two(x, leaves):
            w, v, b = leaves
            return jnp.tanh(x @ w @ v + b[None]), v

        def twice(x, w):
            return jnp.tanh(x @ w @ stack[1]), w + stack[0]

        def of_constants(carry, w):
            return (jnp.float32(0), 1.0, w[0]), None

        def counted(carry, _):
            i, x = carry
            return (i + 1, jnp.tanh(x @ stack[i])), i

        return {
            "reverse": lax.scan(step, x, stack, reverse=True),
            "several": lax.scan(two, x, (stack, other, bias), unroll=2),
            "all unrolled": lax.scan(step, x, stack, unroll=True),
            "also in the closure": lax.scan(twice, x, stack),
            "constants": lax.scan(of_constants, (jnp.float32(1), 0.0, x[0]), stack),
            "no xs": lax.scan(counted, (0, x), length=3),
            "transposed": lax.scan(step, x, jnp.transpose(stack, (1, 0, 2))[::-1]),
            "a part": lax.scan(step, x, stack[1:]),
            "one": lax.scan(step, x, stack[2:]),
            "map": lax.map(lambda w: w.T @ w, stack, batch_size=2),
        }

    params = {"stack": normal(4, 4, 4), "other": normal(4, 4, 4), "bias": normal(4, 4)}
    return fun, params, normal(2, 4)


@program()
def nested_scans():
    def fun(params, x):
        def outer(x, layers):
            def inner(x, w):
                return jnp.tanh(x @ w), w[0]

            return lax.scan(inner, x, layers, reverse=True)

        def sliced(x, layers):
            return lax.scan(lambda x, w: (x + w @ x.T @ x, None), x[:2], layers[:, :2])

        return lax.scan(outer, x, params), lax.scan(sliced, x, params[:, 1:])

    return fun, normal(2, 3, 4, 4), normal(2, 4)


@program()
def associative_operations():
    def fun(params, x):
        del x
        return {
            "associative_scan": lax.associative_scan(jnp.multiply, params),
            "reverse": lax.associative_scan(jnp.add, params, reverse=True, axis=1),
            "cumsum": jnp.cumsum(params, 0),
            "cumprod": lax.cumprod(params, 1, reverse=True),
            "cummax": lax.cummax(params),
            "logsumexp": jax.nn.logsumexp(params, 0),
        }

    return fun, normal(4, 3), normal(2)


# --- Transformations and calls -----------------------------------------------------


@program(selected=True)
def custom_derivatives():
    """Their rules are not the derivatives of what they compute."""

    @jax.custom_vjp
    def doubled(x, w):
        return x @ w

    doubled.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda kept, g: (3 * g @ kept[1].T, 2 * kept[0].T @ g),
    )

    @jax.custom_jvp
    def straight_through(w):
        return jnp.round(w * 4) / 4

    straight_through.defjvps(lambda dw, out, w: dw)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def power(n, w):
        return w**n

    power.defvjp(lambda n, w: (power(n, w), w), lambda n, w, g: (5 * g,))

    def fun(params, x):
        w = params["w"]
        return doubled(x, w), straight_through(w + 0.1), power(2, w), jax.nn.relu(w)

    return fun, {"w": normal(4, 5)}, normal(3, 4)


@program(selected=True)
def custom_rules_on_leaves():
    """A rule that a leaf enters as it is."""

    @jax.custom_jvp
    def straight_through(w):
        return jnp.round(w)

    straight_through.defjvps(lambda dw, out, w: dw)

    def fun(params, x):
        return x @ straight_through(params), jax.nn.relu(params), jax.nn.silu(params)

    return fun, 4 * normal(4, 5), normal(3, 4)


@program()
def nested_jits():
    @jax.jit
    def inner(w, x):
        return x @ w.T

    @functools.partial(jax.jit, static_argnums=1)
    def outer(p, n, x):
        return inner(p["w"], x) * n + inner(x, p["w"][:2]).T.sum(), p

    def fun(params, x):
        return outer(params, 3, x), jax.jit(lambda p: p)(params)

    return fun, {"w": normal(3, 4)}, normal(2, 4)


@program()
def derivatives_inside():
    """The function itself differentiates."""

    def fun(params, x):
        def inner(w, x):
            return jnp.sum(jnp.tanh(x @ w) ** 2)

        gradient = jax.grad(inner)(params, x)
        _, tangent = jax.jvp(lambda x: jnp.tanh(x @ params), (x,), (x,))
        _, pullback = jax.vjp(lambda w: jnp.cos(x @ w), params)
        adapted = params - 0.1 * gradient
        return inner(adapted, x), tangent, pullback(tangent)

    return fun, normal(4, 5), normal(3, 4)


@program()
def closures():
    constant = np.linspace(0.0, 1.0, 12, dtype=np.float32).reshape(4, 3)
    on_device = normal(3, 2)

    def fun(params, x):
        def scaled(w):
            return (x @ constant) @ w + jnp.sum(x)

        return jax.jit(scaled)(params), constant @ params, on_device.T @ params

    return fun, normal(3, 5), normal(2, 4)


@program()
def uses():
    """Twice, never, through the shape alone, and returned as it is."""

    def fun(params, x):
        return {
            "twice": x @ params["w"] @ params["w"].T,
            "with itself": params["w"] * params["w"] + params["w"],
            "shape": jnp.ones(params["shape only"].shape) * params["shape only"].size,
            "as it is": params["as it is"],
            "tree": params["tree"],
            "again": params["as it is"],
            "argument": x,
            "constant": jnp.arange(3),
        }

    params = {
        "w": normal(4, 5),
        "never": normal(3),
        "shape only": normal(2, 2),
        "as it is": normal(3, 4),
        "tree": {"a": [normal(2), (normal(3),)]},
    }
    return fun, params, normal(2, 4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    """A module as a registered dataclass."""

    w: jax.Array
    b: jax.Array | None
    activation: Callable[[jax.Array], jax.Array] = dataclasses.field(
        metadata={"static": True}
    )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x @ self.w
        return self.activation(x if self.b is None else x + self.b[None])


@program()
def trees():
    def fun(params, x):
        for layer in params["layers"]:
            x = layer(x)
        a, (b, none), c = params["rest"]
        assert none is None
        return x * a + b, params["layers"], c["x"]

    params = {
        "layers": (
            Dense(normal(4, 5), normal(5), jnp.tanh),
            Dense(normal(5, 3), None, jax.nn.relu),
        ),
        "rest": [jnp.float32(0.5), (jnp.float32(2.0), None), {"x": normal(2), "y": []}],
    }
    return fun, params, normal(2, 4)


@program(differentiable=False)
def outputs():
    """Integers, booleans, numbers, and what is no array at all."""

    def fun(params, x, *, flag, scale=1.0):
        h = scale * (x @ params)
        return {
            "integer": jnp.argmax(h, -1),
            "boolean": h > 0,
            "any": jnp.any(params > 0),
            "count": jnp.sum(params > 0),
            "cast": params.astype(jnp.int32),
            "complex": params.astype(jnp.complex64),
            "key": jax.random.key(0),
            "numpy": np.arange(2),
            "string": "text",
            "none": None,
            "number": 3,
            "float": 0.5,
            "flag": flag,
            "empty": (),
        }

    return functools.partial(fun, flag=True, scale=2.0), normal(4, 5), normal(2, 4)


# --- Products -----------------------------------------------------------------------


@program()
def einsums():
    def fun(params, x):
        w, t, m = params["w"], params["t"], params["m"]
        of = jnp.einsum
        return {
            "right": of("bi,io->bo", x, w),
            "left": of("io,bi->ob", w, x),
            "transposed": of("ob,io->bi", of("io,bi->ob", w, x), w),
            "outer": of("bi,jo->bijo", x, w),
            "two axes": of("nhd,hdb->bn", t, jnp.ones((3, 5, 2))),
            "heads": of("bn,nhd->bhd", jnp.ones((2, 4)), t),
            "batch": of("nb,nhd->nbdh", jnp.ones((4, 2)), t),
            "batch of columns": of("do,dhn->dnho", jnp.ones((5, 2)), t.T),
            "stack summed": of("nhd,nd->h", t, jnp.ones((4, 5))),
            "diagonal": of("ii->i", m),
            "trace": of("ii", m),
            "sum": of("io->o", w),
            "scalar": of("io,->oi", w, jnp.float32(2)),
            "bilinear": of("bi,ij,bj->b", x, m, x),
            "tensordot": jnp.tensordot(w, t, ((1,), (2,))),
            "outer of leaves": jnp.tensordot(w[0], t[0, 0], 0),
            "elements": of("bi,bi->bi", x, w.T[:2]),
            "kron": jnp.kron(w[:2], jnp.ones((2, 1))),
            "vector": w.T @ x[0],
            "row": x @ w[:, 1],
            "one column": x @ w[:, 1:2],
            "one row": x[:, :1] @ w[1:2],
            "empty": jnp.zeros((0, 4)) @ w,
            "contracted away": jnp.zeros((2, 0)) @ w[:0],
            "with literal": lax.dot_general(np.float32(2), w, (((), ()), ((), ()))),
        }

    params = {"w": normal(4, 5), "t": normal(4, 3, 5), "m": normal(4, 4)}
    return fun, params, normal(2, 4)


@program(tolerance=2e-4)
def linear_algebra():
    def fun(params, x):
        spd = params @ params.T + 2 * jnp.eye(4)
        return {
            "cholesky": jnp.linalg.cholesky(spd),
            "solve": jnp.linalg.solve(params + 4 * jnp.eye(4), x.T),
            "triangular": lax.linalg.triangular_solve(
                params + 3 * jnp.eye(4), x, lower=True
            ),
            "inv": jnp.linalg.inv(spd),
            "det": jnp.linalg.slogdet(spd)[1],
            "fft": jnp.abs(jnp.fft.rfft(params)),
            "norm": jnp.linalg.norm(params),
        }

    return fun, normal(4, 4), normal(2, 4)


@program()
def sorting():
    def fun(params, x):
        values, indices = lax.top_k(params, 2)
        keys, moved = lax.sort((params[0], jnp.arange(4)), num_keys=1)
        return {
            "sort": jnp.sort(params, 0),
            "pairs": (keys, moved),
            "argsort": jnp.argsort(params),
            "argmax": jnp.argmax(params, 1),
            "max": jnp.max(params, 0),
            "top": (values, indices),
            "median": jnp.median(params, 1),
            "searched": jnp.searchsorted(jnp.sort(params[1]), x),
        }

    return fun, normal(5, 4), normal(3)


# --- Dtypes and sizes --------------------------------------------------------------


def _low_precision(dtype):
    def fun(params, x):
        h = jnp.tanh(x @ params["w"].astype(jnp.float32))
        h = h @ params["v"].T.astype(jnp.float32).reshape(6, 4)
        narrow = jnp.einsum(
            "bi,io->bo",
            x.astype(dtype),
            params["w"],
            preferred_element_type=jnp.float32,
        )
        rows = params["v"][jnp.array([0, 2])].astype(jnp.float32)
        return h, narrow, x.astype(dtype) @ params["w"], rows, params["w"], params["b"]

    params = {"w": normal(5, 6), "v": normal(4, 6), "b": normal(3)}
    return fun, jax.tree.map(lambda p: p.astype(dtype), params), normal(2, 5)


@program(tolerance=BFLOAT16)
def bfloat16_leaves():
    return _low_precision(jnp.bfloat16)


@program(tolerance=FLOAT16)
def float16_leaves():
    return _low_precision(jnp.float16)


@program(tolerance=BFLOAT16)
def bfloat16_compute():
    """Leaves of 32 bits, used in 16."""

    def fun(params, x):
        w = params["w"].astype(jnp.bfloat16)
        x = x.astype(jnp.bfloat16)
        return (
            x @ w,
            w[jnp.array([1, 1])],
            lax.scan(
                lambda x, w: ((x @ w.astype(jnp.bfloat16)), w), x, params["stack"]
            ),
        )

    params = {"w": normal(4, 6), "stack": normal(2, 4, 4)}
    return fun, params, normal(2, 4)


@program()
def rounded_on_the_way():
    """Through bfloat16 and back: the result has few bits, as fun says."""

    def fun(params, x):
        narrow = params.astype(jnp.bfloat16).astype(jnp.float32)
        return jnp.round(narrow * 2**20) % 2**8, x

    # Away from halves of a unit, where the order of operations decides.
    return fun, 1.0 + jnp.arange(12.0).reshape(3, 4) / 8, normal(2)


@program(differentiable=False)
def complex_leaves():
    def fun(params, x):
        z = params["z"]
        y = lax.complex(x, 2 * x)
        return y @ z, z[1], jnp.real(z), jnp.conj(z), jnp.abs(y @ z)

    return fun, {"z": lax.complex(normal(4, 5), normal(4, 5))}, normal(2, 4)


@program()
def sizes():
    """Nothing, one, and a scalar."""

    def fun(params, x):
        empty, matrix = params["empty"], params["matrix of none"]
        return {
            "empty": empty.T.reshape(4, 0)[:, ::-1],
            "sum": jnp.sum(empty) + jnp.sum(matrix),
            "product": x[:, :0] @ matrix,
            "look-up of none": params["one"][jnp.zeros((0,), jnp.int32)],
            "scan of none": lax.scan(lambda c, w: (c + w, w), x[0, :3], empty),
            "slices of none": lax.scan(lambda c, w: (c + 1, w.T), 0, params["hollow"]),
            "scalar": params["scalar"] * x + params["scalar"][None, None],
            "one": jnp.squeeze(params["one"]) + params["one"][0, 0, 0],
            "row": x @ params["row"].T,
            "number": params["number"] * x,
            "taken": jnp.take(params["matrix of none"], jnp.array([1]), axis=1),
        }

    params = {
        "empty": jnp.zeros((0, 3)),
        "matrix of none": jnp.zeros((0, 4)),
        "hollow": jnp.zeros((2, 0, 3)),
        "scalar": jnp.float32(0.5),
        "one": jnp.ones((1, 1, 1)),
        "row": normal(1, 4),
        "number": 1.5,
    }
    return fun, params, normal(2, 4)


# --- Structure ----------------------------------------------------------------------


@program()
def structure():
    def fun(params, x, i):
        w, t = params["w"], params["t"]
        chain = jnp.transpose(t, (2, 0, 1)).reshape(5, 12)[1:4, ::2]
        chain = jnp.squeeze(chain[None], 0)[:, None]
        chain = lax.dynamic_slice(chain, (i, 0, 1), (2, 1, 4))
        chain = lax.rev(chain, (0, 2))
        return {
            "chain": chain,
            "chain of reshapes": w.reshape(2, 2, 5).T.reshape(10, 2).T.reshape(-1)[::3],
            "strides": t[::2, ::-1, 1:4:2],
            "expanded": w[None, :, None] * w[:, None, None],
            "ravel": jnp.ravel(t)[7:],
            "swapped": jnp.swapaxes(t, 0, 2)[i],
            "moved": jnp.moveaxis(t, -1, 0)[:, :, i],
            "dynamic": lax.dynamic_slice(w, (i + 9, -i), (2, 3)),
            "negative": lax.dynamic_index_in_dim(w, -1, keepdims=False),
            "flip": jnp.flip(w) + jnp.flip(w, 1),
            "rotated": jnp.rot90(w) @ w,
            "stack": jnp.stack([w, 2 * w], 1),
            "concatenated": jnp.concatenate([w, t[0, :, :], w[:1]]),
            "pad": jnp.pad(w, ((1, 0), (0, 2))),
            "roll": jnp.roll(w, (1, -2), (0, 1)),
            "where": jnp.where(w > 0, w, x[0, 0]),
            "tril": jnp.tril(w[:, :4]),
            "repeat": jnp.repeat(w, 2, 0),
            "tile": jnp.tile(w[:2], (1, 2)),
            "broadcast": jnp.broadcast_to(w[0], (3, 5)),
            "split": jnp.split(w, [1, 3], axis=1),
            "unstacked": jnp.unstack(w, axis=1)[2],
            "diagonal": jnp.diagonal(w),
            "set": w.at[1].set(0.0).at[i, 2].set(params["w"][0, 0]),
            "added": jnp.zeros((4, 5)).at[jnp.array([0, 0, 3])].add(w[:3]),
            "multiplied": w.at[:, 1].multiply(t[:, 0, 0]),
            "updated": lax.dynamic_update_slice(x, w[:1, :2], (i, 0)),
            "bits": lax.bitcast_convert_type(w, jnp.int32) * 0,
            "stopped": x @ lax.stop_gradient(w[:4]),
            "barrier": lax.optimization_barrier((w, x))[0],
        }

    return fun, {"w": normal(4, 5), "t": normal(4, 3, 5)}, normal(2, 4), jnp.int32(1)


@program()
def look_ups():
    """Each mode, with negative indices and ones out of bounds."""

    def fun(params, ids):
        w, t = params["w"], params["t"]
        inside = ids % 6
        columns = jnp.array([[0, 4], [2, 1], [3, 3], [0, 1], [4, 4], [1, 2]])
        return {
            "default": w[ids],
            "negative": w[-inside - 1],
            "clip": w.at[ids].get(mode="clip"),
            "fill": w.at[ids].get(mode="fill"),
            "filled with 7": w.at[ids].get(mode="fill", fill_value=7.0),
            "promise": w.at[inside].get(mode="promise_in_bounds"),
            "sorted": w.at[jnp.sort(inside)].get(indices_are_sorted=True),
            "take": jnp.take(w, ids, axis=0),
            "columns": jnp.take(w, inside[:2], axis=1, mode="wrap"),
            "take with fill": jnp.take(w, ids, axis=1, fill_value=-1.0, mode="fill"),
            "take clipped": jnp.take(w, ids, axis=1, mode="clip"),
            "pairs": w[inside, inside % 5],
            "grid": w[inside[:, None], jnp.array([[0, 2]])],
            "two look-ups": w[inside][:, jnp.array([3, 0])],
            "apart": t[jnp.array([0, 1]), :, jnp.array([2, -1])],
            "middle": t[:, jnp.array([[0, 2], [1, 1]])],
            "bytes": w[jnp.array([1, 5], jnp.uint8)],
            "signed bytes": t[jnp.array([0, -1], jnp.int8), 1],
            "one": w[ids[0]],
            "along": jnp.take_along_axis(w, columns, axis=1),
            "along with clip": jnp.take_along_axis(w, 3 * columns, 1, mode="clip"),
            "after transposing": w.T[jnp.array([0, 3])],
            "after merging": t.reshape(-1, 5)[ids],
            "then a product": w[inside] @ jnp.ones((5, 2)),
            "windows": jax.vmap(lambda i: lax.dynamic_slice(w, (i, i), (2, 3)))(ids),
            "scalar": w[ids[1], 2],
            "element": w[1, -2],
            "one hot": jax.nn.one_hot(inside, 6) @ w,
        }

    params = {"w": normal(6, 5), "t": normal(2, 3, 5)}
    return fun, params, jnp.array([0, 5, -1, -6, 6, -9, 40])


@program(selected=True)
def starts_out_of_range():
    """What a program normalizes once is not to be normalized again."""

    def fun(params, starts):
        p, q = params["p"], params["q"]
        exact = functools.partial(lax.dynamic_slice, allow_negative_indices=False)
        return {
            "slices": [lax.dynamic_slice(p, (i,), (2,)) for i in starts],
            "exact": [exact(p, (i,), (2,)) for i in starts],
            "elements": [p[i] for i in starts],
            "rows": [q[i] for i in starts],
            "blocks": [lax.dynamic_slice(q.T, (i, j), (2, 3)) for i, j in pairs],
            "index": [lax.dynamic_index_in_dim(q, i, 1) for i in starts],
            "updated": [
                lax.dynamic_update_slice(q, q[:2, :1] * 2, (i, j)) for i, j in pairs
            ],
            "vmap": jax.vmap(lambda i: exact(q, (i, i), (2, 2)))(jnp.stack(starts)),
            "unsigned": exact(p, (starts[0].astype(jnp.uint8),), (2,)),
        }

    starts = [jnp.int32(i) for i in (-25, -15, -10, -5, -1, 0, 9, 10, 15)]
    pairs = list(zip(starts, reversed(starts), strict=True))[::2]
    return fun, {"p": normal(10), "q": normal(10, 5)}, starts


@program(selected=True, differentiable=False)
def look_up_modes():
    def fun(params, ids):
        p, q = params["p"], params["q"]
        fills = (None, 0.0, 1.5, jnp.inf, -jnp.inf, jnp.nan)
        cases = [("clip", None), (None, None), (None, 1.5)]
        found = {}
        for mode, fill in cases + [("fill", fill) for fill in fills]:
            found[f"{mode} {fill}"] = (
                p.at[ids].get(mode=mode, fill_value=fill),
                q.at[ids[:3], 1].get(mode=mode, fill_value=fill),
                q.at[1:3, ids].get(mode=mode, fill_value=fill),
                q.astype(jnp.bfloat16).at[ids].get(mode=mode, fill_value=fill),
            )
        found["wrapped"] = jnp.take(q, ids, axis=0, mode="wrap")
        inside = jnp.abs(ids) % 4
        found["promised"] = q.at[inside, inside].get(mode="promise_in_bounds")
        numbers = lax.GatherDimensionNumbers(
            offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(1,)
        )
        for mode in ("clip", "fill"):
            found[f"windows {mode}"] = lax.gather(
                q[:1], ids[:, None], numbers, (1, 2), mode=mode, fill_value=0.5
            )
        return found

    ids = jnp.array([3, -1, -5, 0, 4, -6, 100, -100], jnp.int32)
    return fun, {"p": normal(5), "q": normal(5, 4)}, ids


@program()
def long_table():
    """A table that the index's dtype cannot count."""

    def fun(params, ids):
        narrow = lax.gather(
            params,
            ids[:, None],
            lax.GatherDimensionNumbers((1,), (0,), (0,)),
            (1, 3),
            mode="clip",
        )
        return narrow, params[ids.astype(jnp.uint32)]

    return fun, normal(300, 3), jnp.array([1, 100, 127], jnp.int8)


# --- The rest of JAX ----------------------------------------------------------------


@program()
def random_numbers():
    """The same key gives the same numbers at the perturbed point."""

    def fun(params, x, key):
        noise = jax.random.normal(key, params.shape)
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        sample = jax.random.categorical(key, params)
        return x * mask.astype(x.dtype) @ params, params + noise, sample

    return fun, normal(4, 5), normal(2, 4), jax.random.key(7)


@program(differentiable=False)
def references():
    """A buffer that is written in place."""

    def fun(params, x):
        total = jax.new_ref(jnp.zeros((2, 5)))

        def add(i, _):
            total[...] += x @ params["w"][i]
            return None

        lax.fori_loop(0, 3, lambda i, c: (add(i, c), c)[1], 0)
        total[0] = params["b"]
        return total[...]

    return fun, {"w": normal(3, 4, 5), "b": normal(5)}, normal(2, 4)


@program(differentiable=False)
def by_platform():
    """Only one of the branches can be compiled here."""
    from jax.experimental import pallas

    def kernel(x, out):
        out[...] = 2 * x[...]

    def on_tpu(w):
        return pallas.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(w.shape, w.dtype)
        )(w)

    def fun(params, x):
        doubled = lax.platform_dependent(params, tpu=on_tpu, default=lambda w: 2 * w)
        return x @ doubled

    return fun, normal(4, 5), normal(2, 4)


@program()
def checkpoint_names():
    def fun(params, x):
        from jax.ad_checkpoint import checkpoint_name

        w = checkpoint_name(params, "weight")
        return x @ w, jax.named_call(lambda w: w.T @ w, name="gram")(w)

    return fun, normal(4, 5), normal(2, 4)


@program()
def pure_callbacks():
    def fun(params, x):
        shape = jax.ShapeDtypeStruct((2, 5), jnp.float32)
        host = jax.pure_callback(
            lambda w, x: np.asarray(x) @ np.asarray(w),
            shape,
            lax.stop_gradient(params),
            lax.stop_gradient(x),
            vmap_method="sequential",
        )
        return host + x @ params

    return fun, normal(4, 5), normal(2, 4)
