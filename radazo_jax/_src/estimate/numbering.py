"""Directions that are numbered through a run, under laws that are `numbered`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from radazo_jax._src.directions.law import Law
from radazo_jax._src.estimate.points import Points


class NumberedState(NamedTuple):
    """State of an estimator whose law is `numbered`; `()` under other laws.

    Attributes:
      key: The key of all directions, that of the first step: a typed key, shape ().
      number: The number of the next direction: uint32, shape (). At 0, the step's key
        becomes that of all directions. After 2³² directions it is 0 again.
    """

    key: jax.Array
    number: jax.Array


def init(law: Law) -> Any:
    """The state before the first step: a `NumberedState`, or `()`."""
    if not law.numbered:
        return ()
    unused = jax.random.key(0, impl="threefry2x32")
    return NumberedState(unused, jnp.zeros((), jnp.uint32))


def following(state: Any, key: jax.Array, size: int) -> tuple[jax.Array, Any]:
    """The key and the numbers of the next directions, [size].

    Args:
      state: A `NumberedState`, or `()` where each step has numbers of its own.
      key: The typed key of the step.
      size: How many directions.
    """
    numbers = np.arange(size, dtype=np.uint32)
    if not state:
        return key, numbers
    kept, of_step = (jax.random.key_data(k) for k in (state.key, key))
    data = jnp.where(state.number > 0, kept, of_step)
    key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    return key, state.number + numbers


def advanced(state: Any, points: Points, size: int | None = None) -> Any:
    """The state after a step of these points, along `size` directions if not all."""
    if not state:
        return state
    keys = points.directions.key
    taken = jnp.uint32(len(points.scales) if size is None else size)
    number = state.number + taken
    # Past the last number, the first step is that of another run, with another key.
    return NumberedState(keys[0], jnp.where(number < taken, 0, number))
