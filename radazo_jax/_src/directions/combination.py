"""Linear combinations of directions, built when they are needed; inner products."""

import dataclasses
from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from radazo_jax._src.directions import sums
from radazo_jax._src.directions.distribution import Direction, rows
from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.names import checks_names
from radazo_jax._src.trees import STATIC, widest
from radazo_jax._src.xla import on_any_mesh, specs_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearCombination:
    """Σₖ cₖ uₖ + Σⱼ wⱼ Tⱼ: a few numbers and keys that stand for a gradient.

    The tree of the size of the parameters exists only after `materialize`. An optimizer
    that can work with coefficients and keys receives the combination as the extra
    argument `combination`, and never causes the tree to be built.

    Attributes:
      coefficients: cₖ, real, [K]; `None` without directions.
      directions: uₖ, stacked: [K]; `None` without directions.
      layout: The layout of the parameters; static.
      trees: Pairs of a weight wⱼ, shape (), and a tree Tⱼ like the parameters.
    """

    coefficients: jax.Array | None
    directions: Direction | None
    layout: Layout = dataclasses.field(metadata=STATIC)
    trees: tuple[tuple[jax.Array, Any], ...] = ()

    @classmethod
    def of_tree(cls, tree: Any, layout: Layout) -> "LinearCombination":
        """The combination that is a single tree like the parameters."""
        return cls(None, None, layout).plus(jnp.ones((), jnp.float32), tree)

    @classmethod
    def of_flat(
        cls, flat: jax.Array, layout: Layout, params: optax.Params
    ) -> "LinearCombination":
        """The combination that is a vector of all coordinates, [d].

        Args:
          flat: The vector.
          layout: The layout of the parameters.
          params: θ, whose dtypes and shardings the tree has.
        """

        def program(flat: jax.Array, params: optax.Params) -> Any:
            leaves = [
                flat[leaf.offset : leaf.offset + leaf.size].reshape(leaf.shape)
                for leaf in layout.leaves
            ]
            tree = jax.tree.unflatten(layout.treedef, leaves)
            return jax.tree.map(lambda x, p: x.astype(jnp.result_type(p)), tree, params)

        return cls.of_tree(on_any_mesh(program, specs_of(params))(flat, params), layout)

    def plus(self, weight: jax.Array, tree: Any) -> "LinearCombination":
        """The combination with one more weighted tree."""
        more: LinearCombination = dataclasses.replace(
            self, trees=(*self.trees, (weight, tree))
        )
        return more

    def scaled(self, factor: jax.Array) -> "LinearCombination":
        """The combination times a number, shape ().

        Zero times a coefficient or a weight is zero, also if it is not finite.
        """

        def times(x: jax.Array) -> jax.Array:
            return jnp.where(factor == 0, 0, factor.astype(x.dtype) * x)

        coefficients = self.coefficients
        scaled: LinearCombination = dataclasses.replace(
            self,
            coefficients=None if coefficients is None else times(coefficients),
            trees=tuple((times(weight), tree) for weight, tree in self.trees),
        )
        return scaled

    def materialize(self, params: optax.Params) -> optax.Params:
        """Builds the tree.

        Args:
          params: θ, whose shapes, dtypes and shardings the result has.

        Returns:
          A tree like `params`. Sums are taken in float32, or in float64 if the
          parameters or a tree are.
        """
        terms = [
            jax.tree.map(partial(_times, weight), tree, params)
            for weight, tree in self.trees
        ]
        if self.coefficients is not None and self.directions is not None:
            like = terms[0] if terms else params
            summed = sums.combine(self.coefficients, self.directions, self.layout, like)
            terms.append(summed)
        return jax.tree.map(
            lambda p, *leaves: reduce(add, leaves).astype(jnp.result_type(p)),
            params,
            *terms,
        )


def _times(weight: jax.Array, x: jax.Array, like: jax.Array) -> jax.Array:
    dtype = widest((x, like))
    return weight.astype(dtype) * x.astype(dtype)


@checks_names
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
            products.append(jnp.matmul(every, every.T, precision=lax.Precision.HIGHEST))
        return reduce(jnp.add, products)

    return on_any_mesh(program, jax.P())(directions, trees)
