"""Inner products of directions, over all coordinates."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from radazo_jax._src.directions.distribution import Direction, whole
from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.xla import on_any_mesh

_EXACT = lax.Precision.HIGHEST


def inner(directions: Direction, layout: Layout, tree: Any) -> jax.Array:
    """⟨uₖ, w⟩ of each direction with a tree w like the parameters: float32, [K]."""

    def program(directions: Direction, tree: Any) -> jax.Array:
        total = jnp.zeros(len(directions.scale), jnp.float32)
        for i, w in enumerate(jax.tree.leaves(tree)):
            flat = w.astype(jnp.float32).reshape(-1)
            us = _rows(directions, layout, i)
            total += jnp.matmul(us, flat, precision=_EXACT)
        return total

    return on_any_mesh(program, jax.P())(directions, tree)


def gram(
    directions: Sequence[Direction], layout: Layout, trees: Sequence[Any] = ()
) -> jax.Array:
    """The inner products of all pairs of directions and trees: float32, [n, n].

    The elements of one leaf of all of them are alive at a time.

    Args:
      directions: Directions, each stacked; n counts them all, and the trees.
      layout: The layout of the parameters, as of `Points`.
      trees: Trees like the parameters, each stacked; they follow the directions.

    Returns:
      The products.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> draw, params = zo.estimators.Draw.once(jax.random.key(0)), jnp.zeros(3)
      >>> points, _ = zo.forward_difference(num_directions=2).points(draw, params, ())
      >>> products = zo.estimators.gram([points.directions], points.layout)
      >>> bool(jnp.allclose(jnp.diagonal(products), 1))
      True
    """

    def program(directions: Sequence[Direction], trees: Sequence[Any]) -> jax.Array:
        leaves = [jax.tree.leaves(tree) for tree in trees]
        products = []
        for i in range(len(layout.leaves)):
            us = [_rows(u, layout, i) for u in directions]
            ws = [tree[i].astype(jnp.float32) for tree in leaves]
            rows = jnp.concatenate([*us, *(w.reshape(len(w), -1) for w in ws)])
            products.append(jnp.matmul(rows, rows.T, precision=_EXACT))
        return functools.reduce(jnp.add, products)

    return on_any_mesh(program, jax.P())(directions, trees)


def _rows(directions: Direction, layout: Layout, i: int) -> jax.Array:
    """The elements of leaf i of all directions: float32, [K, size]."""
    leaf = layout.leaves[i]
    if directions.cached is not None:
        us = jax.vmap(lambda held: held.values())(directions.cached[i])
    else:
        us = jax.vmap(lambda u: whole(u, leaf, layout.dimension))(directions)
    return directions.scale[:, None] * us.reshape(len(directions.scale), -1)
