"""Steps as the optimizer proposes them."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import xla
from radazo_jax._src.base import Descent, Search


class WholeState(NamedTuple):
    """State of `whole`.

    Attributes:
      before: `()`, because no step is rejected.
    """

    before: tuple[()] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class Whole(Search):
    """See `whole`."""

    _constructor = "whole"
    judges = False

    def init(self, params: optax.Params) -> WholeState:
        del params
        return WholeState()

    def judge(
        self, state: WholeState, params: optax.Params, value: jax.Array
    ) -> tuple[jax.Array, WholeState]:
        del params, value
        return jnp.ones((), jnp.bool_), state

    def move(
        self, state: WholeState, params: optax.Params, descent: Descent
    ) -> tuple[optax.Params, WholeState]:
        # Only some processors round a product and a sum together.
        direction = jax.tree.map(xla.rounded, descent.direction)
        after = optax.apply_updates(params, direction)
        return descent.project(after), state


def whole() -> Search:
    """Takes each step as the optimizer proposes it, and keeps it.

    Use it with optimizers that have a learning rate. It is what `minimize` and `solver`
    take for an optimizer that is named, and it searches nothing.

    Returns:
      The search.

    Examples:
      >>> import radazo_jax as zo
      >>> zo.search.whole() == zo.search.whole()
      True
    """
    return Whole()
