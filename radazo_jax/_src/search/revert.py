"""Steps that an optimizer can revert."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from radazo_jax._src import trees


class Revert(NamedTuple):
    """A field in the state of a transformation that can revert its latest step.

    A transformation learns only from the next value that its step was wrong. The next
    update then sets `reverted`, and whatever applies the updates sets the parameters to
    `params`. Subtracting the step instead would not restore them: a sum of
    floating-point numbers is rounded, and bounds or projections may have shortened the
    step.

    `solver` finds every `Revert` in the state of an optimizer. After a reverted step,
    it also restores the states of all other members of the chain, because their
    gradient belongs to a point that the run has left.

    A transformation that compares the next value with a limit sets `limit`. If the
    value is not below it, the step is reverted whatever the other values are, so they
    need not be evaluated. It can try a shorter step at once, without another evaluation
    at `params`, by setting `retry`.

    Attributes:
      params: The parameters before the latest step: a tree like the parameters.
      reverted: Whether the latest update reverted that step: bool, shape ().
      limit: A value that reverts the step unless the loss is below it; infinite if
        none is known: shape (). `None` for transformations without a limit.
      retry: The step from `params` that follows a reverted one, a tree like the
        parameters; `None` for transformations that stay at `params`.
    """

    params: optax.Params
    reverted: jax.Array
    limit: jax.Array | None = None
    retry: Any = None

    @classmethod
    def init(cls, params: optax.Params) -> "Revert":
        """The field before the first step."""
        return cls(trees.copy(params), jnp.zeros((), jnp.bool_))


def can_revert(optimizer_state: optax.OptState) -> bool:
    """Whether a member of a chain can revert steps."""
    return bool(_reverts(optimizer_state))


def reverted(optimizer_state: optax.OptState) -> jax.Array:
    """Whether the latest update reverted a step: bool, shape ()."""
    found = [revert.reverted for revert in _reverts(optimizer_state)]
    return jnp.any(jnp.stack(found)) if found else jnp.zeros((), jnp.bool_)


def limit(optimizer_state: optax.OptState) -> jax.Array | None:
    """The lowest of the limits; `None` without any."""
    limits = [revert.limit for revert in _reverts(optimizer_state)]
    known = [x for x in limits if x is not None]
    return jnp.min(jnp.stack(known)) if known else None


def retried(optimizer_state: optax.OptState, params: optax.Params) -> Any:
    """The parameters from which the run continues after an update.

    As `restored`, followed by the step of `Revert.retry` if there is one.
    """
    params = restored(optimizer_state, params)
    for revert in _reverts(optimizer_state):
        if revert.retry is not None:
            moved = optax.apply_updates(params, revert.retry)
            params = optax.tree.where(revert.reverted, moved, params)
    return params


def restored(optimizer_state: optax.OptState, params: optax.Params) -> Any:
    """The parameters before the latest step if it was reverted, else `params`.

    Leaves that `optax.partition` or `optax.masked` hides from a transformation are not
    reverted by it.
    """
    for revert in _reverts(optimizer_state):
        before = revert.params
        if _is_flat(before, params):
            before = ravel_pytree(params)[1](before)

        def restore(old: Any, p: Any, reverted: jax.Array = revert.reverted) -> Any:
            if isinstance(old, optax.MaskedNode):
                return p
            return jnp.where(reverted, old, p)

        params = jax.tree.map(
            restore,
            before,
            params,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
    return params


def _is_flat(tree: optax.Params, params: optax.Params) -> bool:
    """Whether a tree is the vector that `optax.flatten` makes of the parameters."""
    if not isinstance(tree, jax.Array):
        return False
    return [jnp.shape(x) for x in jax.tree.leaves(params)] != [tree.shape]


def keep_others(condition: jax.Array, before: Any, after: Any) -> Any:
    """The state after an update, for members that can revert steps.

    The states of all other members stay as before if the condition holds.
    """
    return jax.tree.map(
        lambda old, new: (
            new if _is_revertible(old) else optax.tree.where(condition, old, new)
        ),
        before,
        after,
        is_leaf=_is_revertible,
    )


def _reverts(optimizer_state: optax.OptState) -> list[Revert]:
    nodes = jax.tree.leaves(optimizer_state, is_leaf=lambda x: isinstance(x, Revert))
    return [node for node in nodes if isinstance(node, Revert)]


def _is_revertible(node: Any) -> bool:
    """Whether a node is the state of a transformation that can revert steps."""
    return isinstance(node, tuple) and any(isinstance(x, Revert) for x in node)
