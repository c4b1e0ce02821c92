"""Branches, loops, scans and rematerialization."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.perturb.zoo.program import normal, program


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


@program(differentiable=False)
def while_loops_of_a_batch():
    """Whose condition holds for some of the batch longer than for others."""

    def fun(params, x):
        w = params["w"]

        def one(row):
            return lax.while_loop(
                lambda s: s[0] < 3 + jnp.sign(row[0] + w[0, 0]),
                lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)),
                (jnp.float32(0), row),
            )

        return jax.vmap(one)(x), jax.vmap(one, 1)(w)

    return fun, {"w": normal(4, 4)}, normal(3, 4)


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
