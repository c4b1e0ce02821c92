"""R-AdaZO at a learning rate that its state holds, so that programs share it."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

from radazo_jax._src import trees
from radazo_jax._src.base import GradientTransformationExtraArgs
from radazo_jax._src.transforms.in_place import chain_in_place
from radazo_jax._src.transforms.moments import scale_by_radazo
from radazo_jax._src.transforms.replayed import scale_by_replayed_radazo

# Without a known end, the rate falls as 1/√(1 + t / _SLOW).
_SLOW = 100


class DecayedRate(NamedTuple):
    """State of a learning rate that falls over a run.

    Attributes:
      count: t, the number of updates so far: int32, shape ().
      learning_rate: η of the latest update, or of the first if there is none yet:
        float32, shape ().
      initial_learning_rate: η of the first update: float32, shape ().
      num_steps: T, the number of updates after which the rate is 0; 0 if it is not
        known: int32, shape ().
      smoothing: μ of the run that was measured with the rate, NaN without: float32,
        shape ().
    """

    # `count` is the name that Optax's states have; it hides a method of tuple.
    count: jax.Array  # type: ignore[assignment]
    learning_rate: jax.Array
    initial_learning_rate: jax.Array
    num_steps: jax.Array
    smoothing: jax.Array

    @classmethod
    def of(
        cls, learning_rate: float, num_steps: int | None, smoothing: float | None = None
    ) -> "DecayedRate":
        """The state before the first update."""
        # No two fields share a buffer, because runs donate their states.
        rate, first = (trees.number(learning_rate, np.float32) for _ in range(2))
        count, end = (trees.number(n, np.int32) for n in (0, num_steps or 0))
        far = trees.number(np.nan if smoothing is None else smoothing, np.float32)
        return cls(count, rate, first, end, far)

    def now(self) -> jax.Array:
        """The rate of the next update: float32, shape ()."""
        t = jnp.asarray(self.count).astype(jnp.float32)
        end = jnp.asarray(self.num_steps).astype(jnp.float32)
        ending = jnp.maximum(1 - t / jnp.maximum(end, 1), 0)
        endless = jax.lax.rsqrt(1 + t / _SLOW)
        return self.initial_learning_rate * jnp.where(end > 0, ending, endless)


def radazo_at(
    learning_rate: float,
    num_steps: int | None,
    replayed: bool = False,
    max_directions: int = 64,
) -> GradientTransformationExtraArgs:
    """R-AdaZO with bias correction, at a rate that falls to 0.

    Runs at other rates or of other numbers of steps share a program.

    Args:
      learning_rate: η of the first step.
      num_steps: T, the number of steps over which the rate falls linearly to 0; if it
        is `None`, the rate falls as 1/√(1 + t/100).
      replayed: Whether moments are replayed.
      max_directions: The largest number of directions per step, with replayed moments.
    """
    chain = _chain(replayed, max_directions)
    begin = Partial(_begun, chain.init, DecayedRate.of(learning_rate, num_steps))
    return optax.GradientTransformationExtraArgs(begin, chain.update)


def with_rate(
    state: Any,
    learning_rate: float,
    num_steps: int | None,
    smoothing: float | None = None,
) -> Any:
    """A state of `radazo_at` before its first update, with another rate."""
    return (*state[:-1], DecayedRate.of(learning_rate, num_steps, smoothing))


def end_of(state: Any) -> int | None:
    """The number of updates after which the rate is 0, if a state has such a rate."""
    if isinstance(state, tuple) and state and isinstance(state[-1], DecayedRate):
        return int(state[-1].num_steps) or None
    return None


def smoothing_of(state: Any) -> float | None:
    """The smoothing that was measured with the rate of a state, if there is one."""
    if isinstance(state, tuple) and state and isinstance(state[-1], DecayedRate):
        far = float(state[-1].smoothing)
        return None if math.isnan(far) else far
    return None


def _begun(init: Any, rate: DecayedRate, params: optax.Params) -> Any:
    return (*init(params)[:-1], rate)


def _scale(
    updates: optax.Updates,
    state: DecayedRate,
    params: optax.Params | None = None,
    **extra_args: Any,
) -> tuple[optax.Updates, DecayedRate]:
    del params, extra_args
    rate = state.now()
    updates = jax.tree.map(lambda u: -rate.astype(u.dtype) * u, updates)
    count = optax.safe_increment(state.count)
    return updates, state._replace(count=count, learning_rate=rate)


# The same object at each call, so that runs compile once.
@functools.cache
def _chain(replayed: bool, max_directions: int) -> GradientTransformationExtraArgs:
    def unknown(params: optax.Params) -> DecayedRate:
        del params
        return DecayedRate.of(0.0, None)

    rate = optax.GradientTransformationExtraArgs(unknown, _scale)
    if replayed:
        moments = scale_by_replayed_radazo(
            bias_correction=True, max_directions=max_directions
        )
        return chain_in_place(moments, rate)
    return optax.chain(scale_by_radazo(bias_correction=True), rate)
