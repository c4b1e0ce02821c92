"""Custom rules, closures, calls, and how the parameters come and results go."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tests.perturb.zoo.program import normal, program


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
