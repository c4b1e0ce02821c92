"""Inner products of directions with one another."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from radazo_jax._src.directions.distribution import Direction, rows
from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.xla import on_any_mesh

_EXACT = lax.Precision.HIGHEST


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
            us = [rows(u, layout, i) for u in directions]
            ws = [tree[i].astype(jnp.float32) for tree in leaves]
            every = jnp.concatenate([*us, *(w.reshape(len(w), -1) for w in ws)])
            products.append(jnp.matmul(every, every.T, precision=_EXACT))
        return functools.reduce(jnp.add, products)

    return on_any_mesh(program, jax.P())(directions, trees)
