"""Signs of directions, counted element by element."""

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

    def program(weights: jax.Array, directions: Direction, params: Any) -> Any:
        weights = weights.astype(jnp.float32)

        def add(k: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
            us = elements(jax.tree.map(lambda x: x[k], directions), layout)
            return jax.tree.map(lambda t, u: t + weights[k] * jnp.sign(u), totals, us)

        zeros = [jnp.zeros(leaf.shape, jnp.float32) for leaf in layout.leaves]
        totals = lax.fori_loop(0, len(weights), add, zeros)
        tree = jax.tree.unflatten(layout.treedef, totals)
        return jax.tree.map(lambda v, p: v.astype(jnp.result_type(p)), tree, params)

    return on_any_mesh(program, specs_of(params))(weights, directions, params)
