"""Decay toward a point: against forgetting."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.base import checks, shown, trees
from radazo_jax._src.base.trees import Tree, wide
from radazo_jax._src.estimates.contracts import GradientTransformationExtraArgs


class AnchoredDecayState(NamedTuple):
    """State of `anchored_decay`.

    Attributes:
      anchor: The anchor, a tree like the parameters.
    """

    anchor: optax.Params


@checks.checks_names
def anchored_decay(
    anchor: optax.Params | None, rate: jax.typing.ArrayLike
) -> GradientTransformationExtraArgs:
    """Adds `rate` times the distance from an anchor to the updates.

        g ← g + rate · (θ − θ₀)

    The updates of a population have a random part in all d coordinates, which never
    averages out. A pretrained model forgets by it what the reward does not measure; the
    decay bounds the distance. Put it before the learning rate, as weight decay in
    `optax.adamw`: with `rate` λ, a step then also moves θ by ηλ of the way to the
    anchor. With the anchor zero it is `optax.add_decayed_weights`.

    Args:
      anchor: θ₀, a tree like the parameters; `None` for the parameters that `init`
        gets. The state has a copy of it.
      rate: λ, a number ≥ 0. To give it a schedule, use `optax.inject_hyperparams`.

    Returns:
      The transformation, with an `AnchoredDecayState`.

    Raises:
      TypeError: If `rate` is not a number.
      ValueError: If `rate` is negative; from `init`, if `anchor` is not like the
        parameters; from `update`, if `params` are missing.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> optimizer = optax.chain(
      ...     zo.scale_by_radazo(),
      ...     zo.anchored_decay(None, rate=0.1),
      ...     optax.scale_by_learning_rate(1e-3),
      ... )
      >>> start = jnp.ones(2)
      >>> decay = zo.anchored_decay(start, rate=0.5)
      >>> updates, _ = decay.update(jnp.zeros(2), decay.init(start), jnp.full(2, 3.0))
      >>> updates.tolist()
      [1.0, 1.0]
    """
    checks.check_non_negative("rate", rate)

    def init_fn(params: optax.Params) -> AnchoredDecayState:
        # Optax reads the structure of the state from a tree without leaves.
        if anchor is None or not jax.tree.leaves(params):
            return AnchoredDecayState(trees.copies(params))
        shapes: list[Any] = [jax.tree.map(jnp.shape, x) for x in (params, anchor)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"anchor must be a tree like params, {shapes[0]}; got {shapes[1]}."
            )
        return AnchoredDecayState(trees.copies(anchor))

    def update_fn(
        updates: optax.Updates,
        state: AnchoredDecayState,
        params: optax.Params | None = None,
        **extra_args: Tree,
    ) -> tuple[optax.Updates, AnchoredDecayState]:
        del extra_args
        checks.require_arguments(params=params)

        def pulled(g: jax.Array, p: jax.Array, a: jax.Array) -> jax.Array:
            distance = wide(p) - wide(a).astype(wide(p).dtype)
            pull = jnp.asarray(rate, distance.dtype) * distance
            return (wide(g).astype(distance.dtype) + pull).astype(g.dtype)

        return jax.tree.map(pulled, updates, params, state.anchor), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@checks.checks_names
def keep_params_in(
    projection: Callable[[optax.Params], optax.Params],
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
    `bounds` of `train` and `ask_tell` moves them into a box.

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
            f"{shown.given(projection)}."
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
        checks.require_arguments(params=params)
        projected = projection(optax.apply_updates(params, updates))
        return optax.tree.sub(projected, params), state

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))
