"""BFGS for few parameters, with steps that are found from values."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import fusion
from radazo_jax._src.optimize.parabola import check_passed, init_scalar
from radazo_jax._src.optimize.revert import Revert
from radazo_jax._src.trees import as_flat, like_tree, size, widest
from radazo_jax._src.types import GradientTransformationExtraArgs

# If the slope along a step does not rise, the next step is so many times as long.
_LONGER = 4.0

# Under bounds, the first step may be so many times as long as the parameters.
_FARTHER = 2.0

# A curvature below this share of |s| |y| is rounding.
_ROUNDED = 1e-10

# A step is accepted if it lowers the loss by this share of what the slope promises.
_SUFFICIENT = 0.1

# The next try of a step is this share of it, within these limits.
_SHORTEST, _LONGEST = 0.1, 0.5

# If the first try has no value, the second one is almost as long: failures may be at
# single points.
_ALMOST = 0.9

# So many tries of a direction, before the gradient is estimated anew; and under noise.
_TRIES, _TRIES_IN_NOISE = 9, 4


class ScaleByBfgsState(NamedTuple):
    """State of `scale_by_bfgs`.

    Arrays have the widest dtype of the parameters, at least float32.

    Attributes:
      inverse: H, the inverse of the approximate Hessian: [d, d].
      known: Whether H has a scale: bool, shape ().
      params: The latest parameters, infinite before the first update: [d].
      gradient: The gradient there: [d].
    """

    inverse: jax.Array
    known: jax.Array
    params: jax.Array
    gradient: jax.Array


def scale_by_bfgs() -> GradientTransformationExtraArgs:
    """Multiplies gradients by the inverse Hessian of BFGS.

    With the displacement s = θₜ − θₜ₋₁, the change y = gₜ − gₜ₋₁ and ρ = 1/⟨s, y⟩,

        H ← (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ,    uₜ = H gₜ

    H has d² elements: use it with at most a few hundred parameters and a gradient
    without noise, as `full_difference` estimates it. For more parameters use
    `optax.scale_by_lbfgs`.

    The first update is |f| g/|g|², along which the loss falls by |f| according to its
    slope, but not longer than θ, or 1. Under bounds, the least loss is seldom near 0:
    the first update is g, but not longer than 2θ, or 2. If s is not 0, H is then scaled
    to ⟨s, y⟩/|y|² I. If ⟨s, y⟩ is not positive, H is multiplied by 4 instead, because
    the steps are too short. If s is 0, the latest step led nowhere, and H is forgotten.

    Under bounds, coordinates at a bound that the gradient pushes outward are fixed. The
    remaining ones take the update H_FF − H_FA H_AA⁻¹ H_AF of fixed coordinates A
    and free ones F. The gradient replaces an update that is not one of ascent.

    Returns:
      A transformation whose `update(updates, state, params, value=...)` needs the loss
      as value. Optional are `bounds`, a pair of trees like the parameters; `known`,
      bool, [d]: elements of the gradient that are not known are replaced by the latest
      gradient and H⁻¹ s; and `complete`: without it, the update is 0 and the state
      stays, because the next step completes the gradient. `solver` passes them. Its
      state is a `ScaleByBfgsState`.

    Raises:
      ValueError: From the update, if `params` or `value` is missing.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> optimizer = optax.chain(
      ...     zo.scale_by_bfgs(), optax.scale(-1.0), zo.scale_by_trial_step()
      ... )
      >>> result = zo.minimize(
      ...     lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2,
      ...     jnp.array([-1.2, 1.0]),
      ...     optimizer,
      ...     zo.full_difference(),
      ...     60,
      ...     progress=False,
      ... )
      >>> bool(result.values.min() < 1e-2)
      True

    References:
      Nocedal & Wright, Numerical Optimization, 2006, eqs. (6.17) and (6.20).
    """

    def init_fn(params: optax.Params) -> ScaleByBfgsState:
        d, dtype = size(params), widest(params)
        return ScaleByBfgsState(
            inverse=jnp.eye(d, dtype=dtype),
            known=jnp.zeros((), jnp.bool_),
            params=jnp.full(d, jnp.inf, dtype),
            gradient=jnp.zeros(d, dtype),
        )

    def update_fn(
        updates: optax.Updates,
        state: ScaleByBfgsState,
        params: optax.Params | None = None,
        *,
        value: jax.typing.ArrayLike | None = None,
        bounds: tuple[Any, Any] | None = None,
        known: jax.Array | None = None,
        complete: jax.typing.ArrayLike = True,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByBfgsState]:
        del extra_args
        check_passed(params=params, value=value)
        at, gradient = as_flat(params), as_flat(updates)

        def revised(
            state: ScaleByBfgsState, at: jax.Array, gradient: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            if known is not None:
                gradient = _completed(state, at, gradient, known)
            return (gradient, *_updated(state, at, gradient))

        # By itself, because a loop that encloses the sums would round them otherwise.
        gradient, inverse, scaled = fusion.compute_once(revised, state, at, gradient)
        fixed = _fixed(at, gradient, bounds)
        free = jnp.where(fixed, 0, gradient)
        loss = jnp.asarray(value).astype(at.dtype)
        square = jnp.sum(free**2)
        length = jnp.where(loss == 0, 1, abs(loss)) / square
        most = jnp.maximum(1, jnp.linalg.norm(at)) / jnp.sqrt(square)
        if bounds is not None:
            first = ~jnp.all(jnp.isfinite(state.params))
            length = jnp.where(first, 1, length)
            most = jnp.where(first, _FARTHER, 1) * most
        length = jnp.where(square > 0, jnp.minimum(length, most), 0)
        new = _times(inverse, gradient, fixed)
        # By rounding, or by bounds that were not there before.
        ascends = jnp.sum(new * gradient) > 0
        new = jnp.where(
            scaled & ascends & jnp.all(jnp.isfinite(new)), new, length * free
        )
        after = ScaleByBfgsState(inverse, scaled, at, gradient)
        complete = jnp.asarray(complete)
        new = jnp.where(complete, new, 0)
        return like_updates(new, updates), optax.tree.where(complete, after, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _completed(
    state: ScaleByBfgsState, at: jax.Array, gradient: jax.Array, known: jax.Array
) -> jax.Array:
    """The gradient, with elements that are not known as H predicts them.

    The prediction is the latest gradient and H⁻¹ s, so that they do not change H.
    """
    first = ~jnp.all(jnp.isfinite(state.params))
    s = jnp.where(first, 0, at - state.params)

    def predicted() -> jax.Array:
        change = jnp.linalg.solve(state.inverse, s)
        change = jnp.where(state.known & jnp.isfinite(change), change, 0)
        return jnp.where(known, gradient, state.gradient + change)

    return jax.lax.cond(jnp.all(known), lambda: gradient, predicted)


def _updated(
    state: ScaleByBfgsState, at: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """H after the latest step, and whether it has a scale."""
    first = ~jnp.all(jnp.isfinite(state.params))
    s = jnp.where(first, 0, at - state.params)
    y = gradient - state.gradient
    curved = jnp.sum(s * y)
    square = jnp.sum(y**2)
    norms = jnp.linalg.norm(s) * jnp.linalg.norm(y)
    upward = (curved > _ROUNDED * norms) & jnp.isfinite(curved / square)
    moved = jnp.any(s != 0)
    # Without a scale, H is chosen so that the step is as long as the latest one.
    fall = -jnp.sum(s * state.gradient)
    guess = jnp.where(upward, curved / square, jnp.sum(s**2) / fall)
    eye = jnp.eye(s.size, dtype=s.dtype)
    inverse = jnp.where(state.known, state.inverse, guess * eye)
    rho = jnp.where(upward, 1 / curved, 0)
    left = eye - rho * jnp.outer(s, y)
    following = left @ inverse @ left.T + rho * jnp.outer(s, s)
    following = jnp.where(upward, following, _LONGER * inverse)
    usable = moved & jnp.all(jnp.isfinite(following))
    return jnp.where(usable, following, eye), usable


def _fixed(
    at: jax.Array, gradient: jax.Array, bounds: tuple[Any, Any] | None
) -> jax.Array:
    """The coordinates that the gradient pushes out of the box: bool, [d]."""
    if bounds is None:
        return jnp.zeros(at.shape, jnp.bool_)
    low, high = (as_flat(bound) for bound in bounds)
    return ((at <= low) & (gradient > 0)) | ((at >= high) & (gradient < 0))


def _times(inverse: jax.Array, gradient: jax.Array, fixed: jax.Array) -> jax.Array:
    """The product with the inverse of the Hessian of the free coordinates."""
    whole = inverse @ jnp.where(fixed, 0, gradient)

    def projected() -> jax.Array:
        both = fixed[:, None] & fixed[None, :]
        block = jnp.where(both, inverse, jnp.eye(fixed.size, dtype=inverse.dtype))
        force = jnp.linalg.solve(block, jnp.where(fixed, whole, 0))
        return jnp.where(fixed, 0, whole - inverse @ jnp.where(fixed, force, 0))

    return jax.lax.cond(jnp.any(fixed), projected, lambda: whole)


def like_updates(flat: jax.Array, updates: Any) -> Any:
    """A vector, [d], as a tree with the shapes and dtypes of another."""
    tree = like_tree(flat, updates)
    return jax.tree.map(lambda x, u: x.astype(u.dtype), tree, updates)


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
        check_passed(params=params, value=value, grad=grad)
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
