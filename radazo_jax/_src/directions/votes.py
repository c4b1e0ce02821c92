"""Signs of directions, counted element by element."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from radazo_jax._src.directions.law import Direction, elements
from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.meshes import on_any_mesh, specs_of


def votes(
    weights: jax.Array, directions: Direction, layout: Layout, params: Any
) -> Any:
    """Σₖ weightsₖ sign(uₖ), element by element, a tree like `params`.

    One direction is alive at a time.

    Args:
      weights: Real, [K].
      directions: Directions, stacked.
      layout: The layout of `params`.
      params: The parameters.
    """
    program = functools.partial(_votes, layout=layout)
    run = on_any_mesh(program, specs_of(params))
    return run(weights, directions, params)


def _votes(
    weights: jax.Array, directions: Direction, params: Any, *, layout: Layout
) -> Any:
    weights = weights.astype(jnp.float32)

    def add(k: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        us = elements(jax.tree.map(lambda x: x[k], directions), layout)
        return [t + weights[k] * jnp.sign(u) for t, u in zip(totals, us, strict=True)]

    zeros = [jnp.zeros(leaf.shape, jnp.float32) for leaf in layout.leaves]
    totals = lax.fori_loop(0, len(weights), add, zeros)
    tree = jax.tree.unflatten(layout.treedef, totals)
    return jax.tree.map(lambda v, p: v.astype(jnp.result_type(p)), tree, params)
