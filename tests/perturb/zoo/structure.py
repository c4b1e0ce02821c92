"""Programs that move, cut and join the elements of a leaf."""

import jax.numpy as jnp
from jax import lax

from tests.perturb.zoo.program import normal, program


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
