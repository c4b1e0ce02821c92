"""Backtracking: the whole step of an optimizer, and shorter ones."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import trees
from radazo_jax._src.base import Descent, Projection, Search

# A step is accepted if it lowers the loss by this share of what the slope promises.
_SUFFICIENT = 0.1

# The next try of a step is this share of it, within these limits.
_SHORTEST, _LONGEST = 0.1, 0.5

# If the first try has no value, the second one is almost as long: failures may be at
# single points.
_ALMOST = 0.9

# So many tries of a direction, before the gradient is estimated anew; and under noise.
_TRIES, _TRIES_IN_NOISE = 9, 4

# The loss jumps if a step that is at most this share of the one before raises it by at
# least this share, and by so many roundings.
_MUCH_SHORTER, _AS_HIGH, _ROUNDINGS = 0.2, 0.5, 1e3

# So many directions in a row that ended before a jump will end there again.
_AT_JUMPS = 5


class BacktrackingState(NamedTuple):
    """State of `backtracking`.

    Scalars have the dtype of the parameters, float32 if that is narrower.

    Attributes:
      before: The parameters before the latest step.
      direction: Its direction, a tree like the parameters.
      step_size: t of the latest step: shape ().
      value: The loss at its start: shape ().
      slope: The derivative of the loss along it: shape ().
      limit: The step is rejected unless the next value is below this one; infinite if
        any value is accepted: shape ().
      tries: Number of steps along this direction that were rejected: int32, shape ().
      most_tries: The number of them after which the gradient is estimated anew: int32,
        shape ().
      rise: The loss of the latest rejected step above its start, and its step size:
        [2].
      jumps: Whether the loss jumps along this direction: bool, shape ().
      at_jumps: The number of directions in a row along which it jumped: int32, shape
        ().
    """

    before: optax.Params
    direction: optax.Updates
    step_size: jax.Array
    value: jax.Array
    slope: jax.Array
    limit: jax.Array
    tries: jax.Array
    most_tries: jax.Array
    rise: jax.Array
    jumps: jax.Array
    at_jumps: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class Backtracking(Search):
    """See `backtracking`."""

    _constructor = "backtracking"
    stops_early = True

    def init(self, params: optax.Params) -> BacktrackingState:
        zero, count = trees.init_scalar(params), trees.number(0, jnp.int32)
        return BacktrackingState(
            before=trees.copy(params),
            direction=jax.tree.map(jnp.zeros_like, params),
            step_size=zero,
            value=zero,
            slope=zero,
            limit=trees.number(jnp.inf, zero.dtype),
            tries=count,
            most_tries=count,
            rise=jnp.full(2, jnp.nan, zero.dtype),
            jumps=trees.number(False, jnp.bool_),
            at_jumps=count,
        )

    def judge(
        self, state: BacktrackingState, params: optax.Params, value: jax.Array
    ) -> tuple[jax.Array, BacktrackingState]:
        del params
        value = value.astype(state.value.dtype)
        accepted = ~jnp.isfinite(state.limit) | (value < state.limit)
        # After the last try, the next step estimates the gradient anew.
        ends = state.tries + 1 >= state.most_tries
        shorter = state.step_size * _share(value - state.value, state)
        size = jnp.where(ends, 0, shorter).astype(value.dtype)
        # The gradient of the start is not at hand: the slope of a part of the step.
        slope = size / state.step_size * state.slope
        limit = jnp.where(slope < 0, state.value + _SUFFICIENT * slope, jnp.inf)
        shortened = state._replace(
            step_size=size,
            slope=slope,
            limit=limit,
            tries=optax.safe_increment(state.tries),
            rise=jnp.stack([value - state.value, state.step_size]),
            jumps=state.jumps | _is_jump(value - state.value, state),
        )
        measured = state._replace(limit=jnp.full_like(limit, jnp.inf))
        return accepted, optax.tree.where(accepted, measured, shortened)

    def move(
        self, state: BacktrackingState, params: optax.Params, descent: Descent
    ) -> tuple[optax.Params, BacktrackingState]:
        dtype = state.value.dtype
        value = descent.estimate.value.astype(dtype)
        free = optax.apply_updates(params, descent.direction)
        after = descent.project(free)
        # Exactly the direction, unless it leads out of the bounds.
        cut = optax.tree.sub(after, free)
        step = jax.tree.map(lambda d, c: d + c.astype(d.dtype), descent.direction, cut)
        slope = jnp.sum(trees.as_flat(descent.gradient) * trees.as_flat(step))
        slope = slope.astype(dtype)
        goes = (slope < 0) & jnp.isfinite(slope)
        # Without a loss at the start, or without a step, any value is accepted.
        limited = goes & jnp.isfinite(descent.value)
        limit = jnp.where(limited, value + _SUFFICIENT * slope, jnp.inf)
        tries = jnp.where(descent.estimate.noisy, _TRIES_IN_NOISE, _TRIES)
        return optax.tree.where(goes, after, params), BacktrackingState(
            before=params,
            direction=descent.direction,
            step_size=jnp.ones_like(state.step_size),
            value=value,
            slope=slope,
            limit=limit.astype(dtype),
            tries=jnp.zeros_like(state.tries),
            most_tries=tries.astype(state.tries.dtype),
            rise=jnp.full_like(state.rise, jnp.nan),
            jumps=jnp.zeros_like(state.jumps),
            at_jumps=jnp.where(state.jumps, optax.safe_increment(state.at_jumps), 0),
        )

    def back(
        self, state: BacktrackingState, params: optax.Params, project: Projection
    ) -> tuple[optax.Params, BacktrackingState]:
        del params
        step = trees.scaled(state.step_size, state.direction)
        after = project(optax.apply_updates(state.before, step))
        return optax.tree.where(state.slope < 0, after, state.before), state

    def exhausted(self, state: BacktrackingState) -> jax.Array:
        return state.at_jumps >= _AT_JUMPS


def backtracking() -> Search:
    """Takes the whole step, and shorter ones if the loss is not lower.

    A backtracking line search that needs no evaluation of its own. The step u is tried,
    θ + t u with t = 1, and the next value f′ decides. With the slope g = ⟨∇f, u⟩, the
    step is accepted if f′ < f + 0.1 t g. If not, the next step begins at θ again, with
    the minimum of the parabola through f, t g and f′, but 0.1 to 0.5 of t. If f′ is not
    finite, it is 0.9 of t after the first try, and 0.5 of t later. After nine tries the
    run stays at θ, and the next step estimates the gradient anew; under noise, which
    the estimator recognizes, after four.

    The loss jumps along a direction if a try of a fifth of the length or less raises it
    by at least half as much as the try before. `exhausted(state)` tells that five
    directions in a row led to a jump.

    The limit f + 0.1 t g is known before f′ is: it is `limit` in the state. If f′ is
    not below it, the other values of that step are not needed, and a run that evaluates
    one point at a time does not evaluate them.

    The loss must be the same function in each step. Use it with directions whose
    natural step size is 1, as of `bfgs`, and with estimates of the whole gradient, as
    of `full_difference`.

    Returns:
      The search. Its state is a `BacktrackingState`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> result = zo.minimize(
      ...     lambda x: jnp.sum(jnp.array([1.0, 4.0]) * x**2),
      ...     jnp.ones(2),
      ...     optax.sgd(1.0),
      ...     zo.full_difference(),
      ...     zo.search.backtracking(),
      ...     num_steps=30,
      ...     progress=False,
      ... )
      >>> bool(result.values.min() < 1e-4)
      True

    References:
      Nocedal & Wright, Numerical Optimization, 2006, algorithm 3.1 and section 3.5.
    """
    return Backtracking()


def _is_jump(rise: jax.Array, state: BacktrackingState) -> jax.Array:
    """Whether a much shorter step raises the loss nearly as much as the one before."""
    before, size = state.rise
    shorter = state.step_size <= _MUCH_SHORTER * size
    rounding = _ROUNDINGS * jnp.finfo(rise.dtype).eps * abs(state.value)
    return shorter & (rise > rounding) & (rise >= _AS_HIGH * before)


def _share(change: jax.Array, state: BacktrackingState) -> Any:
    """The share of a step that is tried next.

    The minimum of the parabola, within limits.
    """
    rise = 2 * (change - state.slope)
    share = jnp.where(rise > 0, -state.slope / rise, _LONGEST)
    share = jnp.clip(share, _SHORTEST, _LONGEST)
    without = jnp.where(state.tries == 0, _ALMOST, _LONGEST)
    return jnp.where(jnp.isfinite(change), share, without).astype(change.dtype)
