"""All coordinates as one vector, for estimators in few dimensions."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.meshes import on_any_mesh, specs_of


def rows_of(trees: Any) -> jax.Array:
    """The leaves of n stacked trees, one after another: float32, [n, d]."""

    def program(trees: Any) -> jax.Array:
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(trees)]
        return jnp.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)

    return on_any_mesh(program, jax.P())(trees)


def unflattened(flat: jax.Array, layout: Layout, params: optax.Params) -> optax.Params:
    """A vector [d] as a tree like `params`, sharded as it by its types."""

    def program(flat: jax.Array, params: optax.Params) -> Any:
        leaves = [
            flat[leaf.offset : leaf.offset + leaf.size].reshape(leaf.shape)
            for leaf in layout.leaves
        ]
        tree = jax.tree.unflatten(layout.treedef, leaves)
        return jax.tree.map(lambda x, p: x.astype(jnp.result_type(p)), tree, params)

    return on_any_mesh(program, specs_of(params))(flat, params)
