"""Rows and elements taken by index, in every mode."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.perturb.zoo.program import normal, program


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
    """An index that a program has normalized must not be normalized again."""

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
            "unsigned": exact(p, (starts[-1].astype(jnp.uint8),), (2,)),
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
