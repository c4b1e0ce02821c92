"""Steps that end in a set."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.types import GradientTransformationExtraArgs


def keep_params_in(
    projection: Callable[[Any], Any],
) -> GradientTransformationExtraArgs:
    """Projects steps, so that parameters stay in a set: the last of a chain.

        θ ← Π(θ + u)

    After `zo_sgd` this is ZO-PSGD. After `zo_adamm` with `amsgrad=True`, and with a
    box, it is the ZO-AdaMM of Chen et al., who project in the metric √v̂:
    argmin Σᵢ √v̂ᵢ (yᵢ − xᵢ)² over lᵢ ≤ yᵢ ≤ uᵢ. On a box, this is the Euclidean
    projection, because terms and constraints separate by coordinate, and the minimum
    of each term does not depend on its positive weight. On other sets, such as a ball,
    the two projections differ, and this function uses the Euclidean one.

    The function is evaluated at points around θ that may lie outside of the set;
    `bounds` of `minimize_black_box` and `ask_tell` moves them into a box.

    Args:
      projection: `projection(params)` returns the closest point of the set, as the
        functions of `optax.projections` do.

    Returns:
      The transformation; its updates add up with the parameters to a point of the set,
      up to rounding.

    Raises:
      TypeError: If `projection` is no function; if parameters are not passed to the
        update.
      ValueError: If the parameters at the start do not lie in the set.

    Examples:
      >>> import functools
      >>> import jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> box = functools.partial(optax.projections.projection_box, lower=0, upper=1)
      >>> optimizer = optax.chain(zo.zo_sgd(1.0), zo.keep_params_in(box))
      >>> params = jnp.array([0.5, 0.5])
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(jnp.array([0.2, 0.9]), state, params)
      >>> [round(float(p), 2) for p in optax.apply_updates(params, updates)]
      [0.3, 0.0]

    References:
      Ghadimi, Lan and Zhang, Mini-Batch Stochastic Approximation Methods for Nonconvex
      Stochastic Composite Optimization, Math. Program. 2016.

      Chen et al., ZO-AdaMM: Zeroth-Order Adaptive Momentum Method for Black-Box
      Optimization, NeurIPS 2019, algorithm 1.
    """
    if not callable(projection):
        raise TypeError(
            "projection must be a function such as those of optax.projections; got "
            f"{projection!r}."
        )

    def init(params: optax.Params) -> optax.EmptyState:
        leaves = jax.tree.leaves(params)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            # Abstract parameters have no values to compare.
            return optax.EmptyState()
        pairs = zip(
            jax.tree_util.tree_leaves_with_path(params),
            jax.tree.leaves(projection(params)),
            strict=True,
        )
        for (path, p), projected in pairs:
            if isinstance(p, jax.core.Tracer) or isinstance(projected, jax.core.Tracer):
                continue
            # A point of a sphere is one up to rounding.
            tolerance = 16 * float(jnp.finfo(jnp.asarray(p).dtype).eps)
            if not bool(jnp.allclose(p, projected, rtol=tolerance, atol=tolerance)):
                raise ValueError(
                    "params must lie in the set of projection at the start; got values "
                    f"outside of it at params{jax.tree_util.keystr(path)}."
                )
        return optax.EmptyState()

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        if params is None:
            raise TypeError(
                "params must be passed to update, as update(updates, state, params); "
                "got None."
            )
        projected = projection(optax.apply_updates(params, updates))
        return optax.tree.sub(projected, params), state

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))
