"""Decay toward a point: against forgetting."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import checks, trees
from radazo_jax._src.trees import wide
from radazo_jax._src.types import GradientTransformationExtraArgs


class AnchoredDecayState(NamedTuple):
    """State of `anchored_decay`.

    Attributes:
      anchor: The anchor, a tree like the parameters.
    """

    anchor: optax.Params


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
            return AnchoredDecayState(trees.copy(params))
        shapes: list[Any] = [jax.tree.map(jnp.shape, x) for x in (params, anchor)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"anchor must be a tree like params, {shapes[0]}; got {shapes[1]}."
            )
        return AnchoredDecayState(trees.copy(anchor))

    def update_fn(
        updates: optax.Updates,
        state: AnchoredDecayState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AnchoredDecayState]:
        del extra_args
        if params is None:
            raise ValueError(
                "params must be passed to update, as update(updates, state, params); "
                "got None."
            )

        def pulled(g: jax.Array, p: jax.Array, a: jax.Array) -> jax.Array:
            distance = wide(p) - wide(a).astype(wide(p).dtype)
            pull = jnp.asarray(rate, distance.dtype) * distance
            return (wide(g).astype(distance.dtype) + pull).astype(g.dtype)

        return jax.tree.map(pulled, updates, params, state.anchor), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
