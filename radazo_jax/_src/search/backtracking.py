"""Backtracking: the whole step of an optimizer, and shorter ones."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import checks
from radazo_jax._src.base import GradientTransformationExtraArgs
from radazo_jax._src.search.revert import Revert
from radazo_jax._src.trees import as_flat, init_scalar

# A step is accepted if it lowers the loss by this share of what the slope promises.
_SUFFICIENT = 0.1

# The next try of a step is this share of it, within these limits.
_SHORTEST, _LONGEST = 0.1, 0.5

# If the first try has no value, the second one is almost as long: failures may be at
# single points.
_ALMOST = 0.9

# So many tries of a direction, before the gradient is estimated anew; and under noise.
_TRIES, _TRIES_IN_NOISE = 9, 4


class ScaleByTrialStepState(NamedTuple):
    """State of `scale_by_trial_step`.

    Scalars have the dtype of the parameters, float32 if that is narrower.

    Attributes:
      step_size: t of the latest step: shape ().
      value: The loss at its start: shape ().
      slope: The derivative of the loss along the latest step: shape ().
      tries: Number of steps along this direction that were reverted: int32, shape ().
      direction: The direction, a tree like the parameters.
      revert: The parameters before the latest step, the limit of its value, and the
        step that is tried next if it is reverted.
    """

    step_size: jax.Array
    value: jax.Array
    slope: jax.Array
    tries: jax.Array
    direction: Any
    revert: Revert


def scale_by_trial_step() -> GradientTransformationExtraArgs:
    """Takes the whole step, and shorter ones if the loss is not lower.

    A backtracking line search that needs no evaluation of its own. The step u is tried,
    θ + t u with t = 1, and the next value f′ decides. With the slope g = ⟨∇f, u⟩, the
    step is accepted if f′ < f + 0.1 t g. If not, the next step begins at θ again, with
    the minimum of the parabola through f, t g and f′, but 0.1 to 0.5 of t. If f′ is not
    finite, it is 0.9 of t after the first try, and 0.5 of t later. After nine tries the
    run stays at θ, and the next step estimates the gradient anew; under noise, which
    the estimator recognizes, after four.

    The limit f + 0.1 t g is known before f′ is. If f′ is not below it, the remaining
    values of that step are not needed, and `minimize_black_box` does not evaluate them
    if it evaluates one point at a time.

    The loss must be the same function in each step. Like Optax's line searches, it must
    be the last member of a chain and takes directions of descent: put
    `optax.scale(-1.0)` before it. Use it with directions whose natural step size is 1,
    as of `scale_by_bfgs`.

    Returns:
      A transformation whose `update(updates, state, params, value=..., grad=...)` needs
      the loss and the gradient at `params`. `bounds`, a pair of trees like the
      parameters, is optional: the steps end within. `solver` passes them. Its state is
      a `ScaleByTrialStepState`.

    Raises:
      ValueError: From the update, if an argument is missing.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> optimizer = optax.chain(optax.scale(-1.0), zo.scale_by_trial_step())
      >>> result = zo.minimize(
      ...     lambda x: jnp.sum(jnp.array([1.0, 4.0]) * x**2),
      ...     jnp.ones(2),
      ...     optimizer,
      ...     zo.full_difference(),
      ...     30,
      ...     progress=False,
      ... )
      >>> bool(result.values.min() < 1e-4)
      True

    References:
      Nocedal & Wright, Numerical Optimization, 2006, algorithm 3.1 and section 3.5.
    """

    def init_fn(params: optax.Params) -> ScaleByTrialStepState:
        zero = init_scalar(params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        revert = Revert.init(params)._replace(limit=zero + jnp.inf, retry=zeros)
        count = jnp.zeros((), jnp.int32)
        return ScaleByTrialStepState(zero, zero, zero, count, zeros, revert)

    def update_fn(
        updates: optax.Updates,
        state: ScaleByTrialStepState,
        params: optax.Params | None = None,
        *,
        value: jax.typing.ArrayLike | None = None,
        grad: optax.Updates | None = None,
        bounds: tuple[Any, Any] | None = None,
        measured: jax.typing.ArrayLike = True,
        noisy: jax.typing.ArrayLike = False,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByTrialStepState]:
        del extra_args
        checks.check_passed(params=params, value=value, grad=grad)
        before, most = state.revert, cast(jax.Array, state.revert.limit)
        loss = jnp.asarray(value).astype(state.value.dtype)
        known = jnp.isfinite(loss) & jnp.asarray(measured)
        loss = jnp.where(jnp.asarray(measured), loss, jnp.nan)
        back = jnp.isfinite(most) & ~(loss < most)
        shorter = state.step_size * _share(loss - state.value, state)
        # After the last try, the next step estimates the gradient anew.
        most_tries = jnp.where(jnp.asarray(noisy), _TRIES_IN_NOISE, _TRIES)
        ends = state.tries + 1 >= most_tries.astype(state.tries.dtype)
        size = jnp.where(back, jnp.where(ends, 0, shorter), 1)
        start = optax.tree.where(back, before.params, params)
        direction = optax.tree.where(back, state.direction, updates)
        step = _step(size.astype(loss.dtype), direction, start, bounds)
        along = jnp.sum(as_flat(grad) * as_flat(step)).astype(loss.dtype)
        # The gradient of the start is not at hand: the slope of a part of the step.
        part = size / state.step_size * state.slope
        slope = jnp.where(back, part, along)
        goes = (slope < 0) & jnp.isfinite(slope)
        step = jax.tree.map(lambda s: jnp.where(goes, s, 0), step)
        base = jnp.where(back, state.value, loss)
        # Without a loss at the start, or without a step, any value is accepted.
        limited = goes & (back | known)
        limit = jnp.where(limited, base + _SUFFICIENT * slope, jnp.inf)
        new = ScaleByTrialStepState(
            step_size=size.astype(loss.dtype),
            value=base,
            slope=slope,
            tries=jnp.where(back, optax.safe_increment(state.tries), 0),
            direction=direction,
            revert=Revert(start, back, limit, step),
        )
        # `solver` restores the parameters exactly; in other loops, this does so up to
        # rounding.
        taken = jax.tree.map(lambda a, s, p: (a - p) + s, start, step, params)
        return taken, new

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _share(change: jax.Array, state: ScaleByTrialStepState) -> jax.Array:
    """The share of a step that is tried next.

    The minimum of the parabola, within limits.
    """
    rise = 2 * (change - state.slope)
    share = jnp.where(rise > 0, -state.slope / rise, _LONGEST)
    share = jnp.clip(share, _SHORTEST, _LONGEST)
    without = jnp.where(state.tries == 0, _ALMOST, _LONGEST)
    return jnp.where(jnp.isfinite(change), share, without).astype(change.dtype)


def _step(
    size: jax.Array, direction: Any, start: Any, bounds: tuple[Any, Any] | None
) -> Any:
    """The step of a size along a direction, which ends within the bounds."""
    step = jax.tree.map(lambda d: size.astype(d.dtype) * d, direction)
    if bounds is None:
        return step
    ends = optax.projections.projection_box(optax.apply_updates(start, step), *bounds)
    return optax.tree.sub(ends, start)
