"""A step size for losses that are another in each step, as of minibatches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from radazo_jax._src import checks, trees
from radazo_jax._src.base import GradientTransformationExtraArgs
from radazo_jax._src.trees import init_scalar, norm, product, rounding, scaled

# The first step would lower the loss by this share of itself along the gradient.
_FIRST = 1e-3

# The first so many steps are measured each, and thereafter so many together.
_FIRST_STEPS, _EVERY = 40, 8

# How much a measurement changes log η, until one says that η is too large, and later.
_FIRST_GAIN, _GAIN = 1.0, 0.2

# Steps are undone if they raise the loss of the next minibatch by more than this
# share, in the first steps and later.
_FIRST_RAISED, _RAISED = 0.1, 0.5

_DECAY = 0.9


class ScaleByMinibatchStepState(NamedTuple):
    """State of `scale_by_minibatch_step`.

    Scalars have the dtype of the parameters, float32 if that is narrower.

    Attributes:
      count: The number of updates so far: int32, shape ().
      step_size: η of the latest step, 0 before the first: shape ().
      power: The average square of what is measured: shape ().
      searching: Whether no measurement has said yet that η is too large: bool,
        shape ().
      pending: Whether there are steps to be measured: bool, shape ().
      before: The parameters before these steps: a tree like the parameters.
    """

    # `count` is the name that Optax's states have; it hides a method of tuple.
    count: jax.Array  # type: ignore[assignment]
    step_size: jax.Array
    power: jax.Array
    searching: jax.Array
    pending: jax.Array
    before: optax.Params


def scale_by_minibatch_step(
    initial_step_size: jax.typing.ArrayLike | None = None,
) -> GradientTransformationExtraArgs:
    """Scales descent directions by a step size that is measured on other minibatches.

    On its own minibatch, a step looks better than it is, so a step size from the values
    of one step diverges. This transformation evaluates the next minibatch's loss at the
    start of the latest steps, and at the same distance on the opposite side. With the
    value after the steps, these values form a parabola along the sum u of the steps,
    with slope s and curvature h, both for the whole of u. At the best η both are equal
    on average, and

        log η ← log η + γ (s − h) / √average(s² + h²)

    converges to it. Each of the first 40 steps is measured, and then eight steps
    together, with two more evaluations each time. γ is 1 until h exceeds |s|, and then
    0.2. If rounding hides both, η grows. Steps that raise the loss of the next
    minibatch by a tenth (by half after the first 40), or make it infinite, are
    undone by the next update, up to rounding. If no value of a step is finite, there
    is no next update.

    This η is best for eight steps. For one step it would be shorter, because noise in
    directions of large curvature does not add up over steps. For long runs, a larger η
    may be better still.

    Like Optax's line searches, it must be the last member of a chain and takes
    directions of descent: put `optax.scale(-1.0)` before it.

    Args:
      initial_step_size: η of the first step, a positive number. The default gives the
        first step the length of the step along −ĝ that would lower the loss by a
        thousandth, if ĝ were its gradient.

    Returns:
      A transformation whose `update(updates, state, params, value=..., value_fn=...)`
      needs the loss at `params`, and the loss as a function; `minimize` passes both,
      and ĝ as `grad`; without `grad`, the updates are assumed to be −ĝ. If value only
      replaces a loss that is not finite, `measured` must be false, as `minimize` says.
      Its state is a `ScaleByMinibatchStepState`, which holds a copy of the parameters.

    Raises:
      TypeError, ValueError: If `initial_step_size` is not a positive number; from the
        update, if `params`, `value` or `value_fn` is missing.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> optimizer = optax.chain(optax.scale(-1.0), zo.scale_by_minibatch_step())
      >>> result = zo.minimize(
      ...     lambda x, noise: jnp.sum((x - 1.0 - noise) ** 2),
      ...     jnp.zeros(20),
      ...     optimizer,
      ...     zo.forward_difference(),
      ...     num_steps=200,
      ...     key=0,
      ...     sample=lambda key: jax.random.normal(key, (20,)) / 4,
      ...     progress=False,
      ... )
      >>> bool(jnp.sum((result.params - 1) ** 2) < 1.0)
      True
    """
    if initial_step_size is not None:
        checks.check_positive("initial_step_size", initial_step_size)

    def init_fn(params: optax.Params) -> ScaleByMinibatchStepState:
        zero = init_scalar(params)
        return ScaleByMinibatchStepState(
            count=jnp.zeros((), jnp.int32),
            step_size=zero,
            power=zero,
            searching=jnp.ones((), jnp.bool_),
            pending=jnp.zeros((), jnp.bool_),
            before=trees.copy(params),
        )

    def update_fn(
        updates: optax.Updates,
        state: ScaleByMinibatchStepState,
        params: optax.Params | None = None,
        *,
        value: jax.typing.ArrayLike | None = None,
        grad: optax.Updates | None = None,
        value_fn: Any = None,
        measured: jax.typing.ArrayLike = True,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByMinibatchStepState]:
        del extra_args
        checks.check_passed(params=params, value=value, value_fn=value_fn)
        dtype = state.step_size.dtype
        resolution = rounding(value)
        value = jnp.asarray(value).astype(dtype)
        known = jnp.isfinite(value) & jnp.asarray(measured)
        early = state.count < _FIRST_STEPS
        due = state.pending & (early | (state.count % _EVERY == 0))

        moved = jax.tree.map(lambda p, old: p - old, params, state.before)

        def at(distance: float) -> jax.Array:
            shift = scaled(jnp.asarray(distance, dtype), moved)
            return jnp.asarray(value_fn(optax.apply_updates(params, shift)), dtype)

        before, behind = lax.cond(
            due, lambda: (at(-1.0), at(-2.0)), lambda: (value, value)
        )
        fall, rise = (behind - value) / 2, behind + value - 2 * before
        now = fall**2 + rise**2
        average = _DECAY * state.power + (1 - _DECAY) * now
        power = jnp.where(due & jnp.isfinite(now), average, state.power)
        error = (fall - rise) / jnp.sqrt(jnp.maximum(power, now))
        error = jnp.where(jnp.isfinite(error), error, -1)
        seen = ~(jnp.maximum(abs(fall), abs(rise)) <= resolution * abs(before))
        error = jnp.where(seen, error, 1)
        factor = jnp.exp(jnp.where(state.searching, _FIRST_GAIN, _GAIN) * error)
        share = jnp.where(early, _FIRST_RAISED, _RAISED)
        raised = due & (value - before > share * abs(before))
        back = state.pending & (raised | ~known)
        factor = jnp.where(back, 0.25, jnp.where(due, factor, 1))

        square = product(updates, updates, dtype)
        if initial_step_size is None:
            # The first step is as long as the one along -ĝ.
            lengths = 1 if grad is None else norm(grad, dtype) / norm(updates, dtype)
            first = _FIRST * jnp.where(value == 0, 1, abs(value)) / (square * lengths)
        else:
            first = jnp.asarray(initial_step_size).astype(dtype)
        size = jnp.where(state.step_size > 0, state.step_size * factor, first)
        goes = jnp.isfinite(value) & jnp.isfinite(size * square) & (square > 0) & ~back
        step = jax.tree.map(
            lambda new, m: jnp.where(back, -m, jnp.where(goes, new, 0)),
            scaled(size, updates),
            moved,
        )
        # Steps that were measured or undone are not measured again, and neither are
        # steps from parameters without a finite loss.
        kept = state.pending & ~due & ~back
        new_state = ScaleByMinibatchStepState(
            count=optax.safe_increment(state.count),
            step_size=jnp.where(goes | back, size, state.step_size),
            # If the scale was wrong, the averages mean nothing.
            power=jnp.where(back, 0, power),
            searching=state.searching & ~(due & seen & (rise > abs(fall))) & ~back,
            pending=(goes & known) | kept,
            before=optax.tree.where(kept | back, state.before, params),
        )
        return step, new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
