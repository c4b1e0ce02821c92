"""Narrow, complex and empty leaves."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.perturb.zoo.program import BFLOAT16, normal, program


@program(tolerance=BFLOAT16)
def bfloat16_leaves():
    dtype = jnp.bfloat16

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

    # Away from halves of a unit, at which the order of operations decides.
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
