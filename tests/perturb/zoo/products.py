"""Products, linear algebra and sorting."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.perturb.zoo.program import normal, program


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
