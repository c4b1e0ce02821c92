"""Random numbers, buffers, platforms, names and callbacks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.perturb.zoo.program import normal, program


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
