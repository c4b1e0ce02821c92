"""A step size from values: the minimum of the parabola through the steps taken."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import checks
from radazo_jax._src.base import GradientTransformationExtraArgs
from radazo_jax._src.search.revert import Revert
from radazo_jax._src.trees import (
    init_scalar,
    norm,
    product,
    rounding,
    scaled,
    wide,
)

# A step that raises the loss is reverted if its curvature is so many times the known
# one.
_SURPRISE = 4.0

# Factors by which the step size changes at once, by measurements or blindly: while
# its scale is being searched for, and thereafter.
_SEARCH, _SEARCH_BLIND, _AVERAGED, _BLIND = 100.0, 10.0, 2.0, 1.25

# The first step lowers the loss by this share of it, according to the slope. The best
# step on a parabola down to 0 would lower it by twice the loss, according to the slope,
# so that one measurement is enough to find it.
_FIRST = 2 / _SEARCH


class ScaleByParabolicStepState(NamedTuple):
    """State of `scale_by_parabolic_step`.

    Scalars have the dtype of the parameters, float32 if that is narrower.

    Attributes:
      step_size: η of the latest step, 0 before the first: shape ().
      slope: The average of the slope along a step, per squared length: shape ().
      curvature: The average of the curvature along a step, per squared length:
        shape ().
      averaged: Number of measurements in these averages: int32, shape ().
      alignment: The average cosine of a step with the one before: shape ().
      searching: Whether the scale of the step is still being searched for: bool,
        shape ().
      pending: Whether the latest update is a step to be measured: bool, shape ().
      value: The loss at its start, infinite before the first and if it was not finite:
        shape ().
      params_value: The loss at the parameters before it, which differs if the step
        started at a lookahead point: shape ().
      first: The loss before the first step, likewise: shape ().
      noise: The difference of two values at the same parameters: shape ().
      fall: The decrease of the loss in the step according to the slope alone; with
        `extra_evaluations=1`, the loss at the opposite point: shape ().
      step: The latest step from its start, before bounds and projections: a tree like
        the parameters.
      revert: The parameters before the latest step, and whether it was reverted.
    """

    step_size: jax.Array
    slope: jax.Array
    curvature: jax.Array
    averaged: jax.Array
    alignment: jax.Array
    searching: jax.Array
    pending: jax.Array
    value: jax.Array
    params_value: jax.Array
    first: jax.Array
    noise: jax.Array
    fall: jax.Array
    step: optax.Updates
    revert: Revert


class _Parabola(NamedTuple):
    """The loss along the latest step u, f(θ + t u) ≈ f₀ − t·fall + t²·rise / 2.

    Attributes:
      fall: See above.
      rise: See above.
      square: |u|².
    """

    fall: jax.Array
    rise: jax.Array
    square: jax.Array


def scale_by_parabolic_step(
    decay: jax.typing.ArrayLike = 0.8,
    extra_evaluations: int = 0,
    initial_step_size: jax.typing.ArrayLike | None = None,
) -> GradientTransformationExtraArgs:
    """Scales descent directions by a step size that is found from values.

    The loss along a step is approximated by a parabola, and the next step size is the
    minimum of the latest parabolas. For the negative of a gradient estimate ĝ, both
    coefficients are known: the slope s follows from the differences of the estimate,
    and the curvature h from the loss f before the step and f′ after it, which the next
    step evaluates anyway:

        h = 2 (f′ − f + η s) / η²,    η = average(s / |ĝ|²) / average(h / |ĝ|²)

    Until the right scale is found, the step size changes by a factor of up to 100 at a
    time, and later of up to 2. The next update reverts a step that raises the loss with
    four times the known curvature, or above the loss at the start of the run. It also
    reverts a step to parameters without a finite loss. If value or slope are not
    finite, the update is 0. Differences of the loss within rounding are ignored. A step
    from parameters without a finite loss, but with a slope (see `forward_difference`),
    is neither measured nor reverted.

    The loss must be the same function in each step; use `scale_by_minibatch_step` for
    minibatches. In float32 no step is taken if |ĝ|² is not within 10⁻³⁸ and 10³⁸: scale
    a loss that is so small or large. Like Optax's line searches, it must be the last
    member of a chain and takes directions of descent: put `optax.scale(-1.0)` before
    it.

    Args:
      decay: The decay rate of both averages, in [0, 1).
      extra_evaluations: Number of further evaluations per step, by `value_fn`. 0 is
        for the direction −ĝ alone. 1 is for any direction, such as the update of
        `scale_by_radazo`: the loss at the opposite point is evaluated, too.
      initial_step_size: η of the first step, a positive number; it may be wrong by any
        factor. The default lowers the loss by a fiftieth, according to the slope; along
        other directions than −ĝ, the step has the same length.

    Returns:
      A transformation whose `update(updates, state, params, value=..., slope=...,
      value_fn=...)` needs the loss at `params` as value, and the derivative along ĝ as
      slope, or `value_fn` with `extra_evaluations`; there `slope`, and ĝ as `grad`,
      give the first step its length. If value only replaces a loss that is not finite,
      `measured` must be false. `minimize` passes them, and with `accelerated`
      also `lookahead` and `lookahead_value`: the step then starts at
      `params + lookahead`. Its state is a `ScaleByParabolicStepState`, which holds the
      latest step and a copy of the parameters.

    Raises:
      TypeError, ValueError: If `decay` is not in [0, 1), `extra_evaluations` is neither
        0 nor 1, or `initial_step_size` is not a positive number; from the update, if
        one of its arguments is missing.

    Examples:
      R-AdaZO without a learning rate:

      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> optimizer = optax.chain(
      ...     zo.scale_by_radazo(),
      ...     optax.scale(-1.0),
      ...     zo.scale_by_parabolic_step(extra_evaluations=1),
      ... )
      >>> result = zo.minimize(
      ...     lambda x: jnp.sum((x - 1.0) ** 2),
      ...     jnp.zeros(20),
      ...     optimizer,
      ...     zo.forward_difference(),
      ...     200,
      ...     key=0,
      ...     progress=False,
      ... )
      >>> bool(result.values[-1] < 0.01)
      True

    References:
      Mutschler & Zell, Parabolic Approximation Line Search for DNNs, NeurIPS 2020,
      <https://arxiv.org/abs/1903.11991>, with another slope and other averages.
    """
    checks.check_unit_interval("decay", decay)
    if checks.check_int_at_least("extra_evaluations", extra_evaluations, 0) > 1:
        raise ValueError(
            f"extra_evaluations must be 0 or 1; got {extra_evaluations!r}."
        )
    if initial_step_size is not None:
        checks.check_positive("initial_step_size", initial_step_size)

    def init_fn(params: optax.Params) -> ScaleByParabolicStepState:
        zero = init_scalar(params)
        first = zero if initial_step_size is None else initial_step_size
        return ScaleByParabolicStepState(
            step_size=jnp.asarray(first).astype(zero.dtype),
            slope=zero,
            curvature=zero,
            averaged=jnp.zeros((), jnp.int32),
            alignment=zero,
            searching=jnp.ones((), jnp.bool_),
            pending=jnp.zeros((), jnp.bool_),
            value=zero + jnp.inf,
            params_value=zero + jnp.inf,
            first=zero + jnp.inf,
            noise=zero,
            fall=zero,
            step=jax.tree.map(jnp.zeros_like, params),
            revert=Revert.init(params),
        )

    def measure(
        state: ScaleByParabolicStepState, moved: _Moved, value: jax.Array
    ) -> _Parabola:
        """The parabola along the latest step."""
        share = moved.share
        if extra_evaluations == 0:
            fall = share * state.fall
            return _Parabola(fall, 2 * (value - state.value + fall), moved.square)
        opposite, change = state.fall - state.value, value - state.value
        half = (share * opposite + change) / (1 + share)
        # Of a whole step, rounded as the differences of three values.
        whole = (state.fall - value) / 2, state.fall + value - 2 * state.value
        fall = jnp.where(share == 1, whole[0], share * opposite - half)
        rise = jnp.where(share == 1, whole[1], 2 * half)
        return _Parabola(fall, rise, moved.square)

    def update_fn(
        updates: optax.Updates,
        state: ScaleByParabolicStepState,
        params: optax.Params | None = None,
        *,
        value: jax.typing.ArrayLike | None = None,
        slope: jax.typing.ArrayLike | None = None,
        grad: optax.Updates | None = None,
        value_fn: Any = None,
        lookahead: optax.Updates | None = None,
        lookahead_value: jax.typing.ArrayLike | None = None,
        latest_step: optax.Updates | None = None,
        measured: jax.typing.ArrayLike = True,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByParabolicStepState]:
        del extra_args
        needed: dict[str, Any] = {"params": params, "value": value}
        if extra_evaluations == 0:
            needed |= {"slope": slope}
        else:
            needed |= {"value_fn": value_fn}
        checks.check_passed(**needed)
        dtype = state.step_size.dtype
        resolution = rounding(value)
        value, rate = (jnp.asarray(x).astype(dtype) for x in (value, decay))
        known = jnp.isfinite(value) & jnp.asarray(measured)
        loss = jnp.where(known, value, jnp.nan)

        moved = _moved(state, params, latest_step)
        state = state._replace(pending=state.pending & (moved.square > 0))
        # The latest value belongs to the parameters, unless a step was taken.
        apart = abs(loss - state.value)
        again = ~state.pending & jnp.isfinite(apart)
        noise = jnp.maximum(apart, rate * state.noise)
        state = state._replace(noise=jnp.where(again, noise, state.noise))
        new, back = _adapted(state, measure(state, moved, loss), loss, resolution, rate)
        if extra_evaluations == 0:
            along = steepest = jnp.asarray(slope).astype(dtype)
        else:
            along = steepest = product(updates, updates, dtype)
            if slope is not None and grad is not None:
                # That of a step as long, along -ĝ.
                lengths = norm(updates, dtype) / norm(grad, dtype)
                steepest = jnp.asarray(slope).astype(dtype) * lengths
            between = _cosine(updates, state.step, dtype)
            aligned = rate * state.alignment + (1 - rate) * between
            new = new._replace(alignment=jnp.where(new.searching, 0, aligned))
        # By its slope, the first step does not lower the loss by more than itself.
        most = jnp.where(value == 0, 1, abs(value)) / steepest
        first = _FIRST * most if initial_step_size is None else new.step_size
        size = jnp.where(
            jnp.isinf(state.first), jnp.minimum(first, most), new.step_size
        )
        if lookahead is None:
            start_value = value
        else:
            start_value = jnp.asarray(lookahead_value, dtype)
        # No step starts at a lookahead point whose loss exceeds the first loss.
        highest = jnp.maximum(value, state.first + _SURPRISE * state.noise)
        usable = (
            jnp.isfinite(value + start_value)
            & (start_value <= highest)
            & (along > 0)
            & jnp.isfinite(size * along)
        )
        goes = usable & ~back
        stays = ~goes & ~back & jnp.isfinite(loss + state.value)
        step = jax.tree.map(lambda new: jnp.where(goes, new, 0), scaled(size, updates))
        fall = size * along
        if extra_evaluations == 1:
            start = params
            if lookahead is not None:
                start = optax.apply_updates(params, lookahead)
            opposite = optax.apply_updates(start, scaled(-jnp.ones((), dtype), step))
            fall = jnp.asarray(value_fn(opposite), dtype)
        latest = jnp.where(back, state.params_value, state.value)
        new = new._replace(
            step_size=jnp.where(goes, size, new.step_size),
            # Without a finite loss at its start, a step cannot be measured.
            pending=goes & known,
            value=jnp.where(
                goes,
                jnp.where(known, start_value, jnp.inf),
                jnp.where(stays, value, latest),
            ),
            params_value=jnp.where(goes, loss, state.params_value),
            first=jnp.where(goes & known & jnp.isinf(state.first), value, state.first),
            fall=jnp.where(goes, fall, state.fall),
            step=step,
            revert=Revert(optax.tree.where(goes, params, state.revert.params), back),
        )
        # `solver` restores the parameters exactly; in other loops, this does so up to
        # rounding.
        returned = jax.tree.map(
            lambda s, old, p: jnp.where(back, old - p, s),
            _from(lookahead, step, goes),
            state.revert.params,
            params,
        )
        return returned, new

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Moved(NamedTuple):
    """The latest step after bounds and projections.

    Attributes:
      share: The share of the step that was taken: ⟨p, u⟩ / |u|² of the step u and of
        the displacement p: shape ().
      square: |p|², shape ().
    """

    share: jax.Array
    square: jax.Array


def _moved(
    state: ScaleByParabolicStepState, params: optax.Params, latest_step: optax.Params
) -> _Moved:
    """Compares the latest step with the displacement of the parameters."""
    dtype = state.step_size.dtype
    if latest_step is None:
        latest_step = jax.tree.map(
            lambda p, old: wide(p) - wide(old), params, state.revert.params
        )
    square = product(state.step, state.step, dtype)
    missing = jax.tree.map(lambda p, u: p - wide(u), latest_step, state.step)
    # A difference of parameters is rounded by this much in any case.
    eps = max(float(jnp.finfo(p.dtype).eps) for p in jax.tree.leaves(params))
    rounded = (4 * eps) ** 2 * product(params, params, dtype)
    whole = product(missing, missing, dtype) <= rounded
    share = product(latest_step, state.step, dtype) / square
    taken = product(latest_step, latest_step, dtype)
    return _Moved(jnp.where(whole, 1, share), jnp.where(whole, square, taken))


def _from(
    lookahead: optax.Updates | None, step: optax.Updates, goes: jax.Array
) -> optax.Updates:
    """The update for a step that starts at a lookahead point."""
    if lookahead is None:
        return step
    return jax.tree.map(
        lambda s, w: jnp.where(goes, s + w.astype(s.dtype), s), step, lookahead
    )


def _adapted(
    state: ScaleByParabolicStepState,
    parabola: _Parabola,
    value: jax.Array,
    resolution: float,
    decay: jax.Array,
) -> tuple[ScaleByParabolicStepState, jax.Array]:
    """The step size after a measurement, and whether to revert the step."""
    fall, rise, square = parabola
    finite = jnp.isfinite(value) & jnp.isfinite(fall) & jnp.isfinite(rise / square)
    least = resolution * jnp.maximum(abs(value), abs(state.value))
    seen = finite & (jnp.maximum(abs(fall), abs(rise)) > least)
    # A step that parameters of low precision rounded away changes nothing.
    seen &= value != state.value
    # If rounding hid the steps, their size has grown beyond what is known.
    expected = jnp.minimum(state.curvature, abs(state.slope) / state.step_size)
    known = jnp.where(state.searching, abs(fall), expected * square)
    surprising = rise > _SURPRISE * (known + state.noise)
    above = value > state.first + _SURPRISE * state.noise
    upward = seen & (rise > 2 * fall) & (surprising | above)
    back = state.pending & (upward | ~finite)

    # If the scale was wrong, the averages mean nothing.
    count = jnp.where(state.searching | back, 0, state.averaged).astype(decay.dtype)
    weight = jnp.minimum(decay, count / (count + 1))

    def averaged(old: jax.Array, measured: jax.Array) -> jax.Array:
        new = weight * old + (1 - weight) * measured
        return jnp.where(state.pending & seen, new, old)

    slope = averaged(state.slope, state.step_size * fall / square)
    curvature = averaged(state.curvature, rise / square)
    wanted, there = _memory_of(state.alignment, slope, state.step_size * curvature)
    ratio = jnp.where(there > 0, wanted / there, jnp.inf)
    clear = seen & (abs(rise) > jnp.maximum(least, _SURPRISE * state.noise))
    factor = jnp.where(
        state.searching,
        jnp.where(clear, jnp.clip(ratio, 1 / _SEARCH, _SEARCH), _SEARCH_BLIND),
        jnp.where(seen, jnp.clip(ratio, 1 / _AVERAGED, _AVERAGED), _BLIND),
    )
    shorter = jnp.where(finite & (ratio > 0), ratio, 1 / _SEARCH_BLIND)
    factor = jnp.where(back, jnp.minimum(shorter, 1 / _AVERAGED), factor)
    lost = back & (~finite | (factor < 1 / _SEARCH_BLIND))
    found = clear & (ratio > 1 / 3) & (ratio < 3)
    searching = lost | (state.searching & (back | ~found))
    state = state._replace(
        step_size=jnp.where(state.pending, state.step_size * factor, state.step_size),
        slope=slope,
        curvature=curvature,
        averaged=jnp.where(searching, 0, optax.safe_increment(state.averaged)),
        searching=jnp.where(state.pending, searching, state.searching),
    )
    return state, back


def _memory_of(
    alignment: jax.Array, fall: jax.Array, rise: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The two sides of the equation that the best step solves.

    Along directions with a memory, a part of a step is taken again in the next ones.

    Args:
      alignment: The cosine of a direction with the one before.
      fall: The slope along a step.
      rise: The curvature along it.
    """
    memory = jnp.clip(alignment, 0, 0.99)
    return fall * (1 - memory) + rise * memory, rise * (1 + memory)


def _cosine(
    a: optax.Updates, b: optax.Updates, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """The cosine of the angle between two trees; 0 if one of them is 0."""
    quotient = product(a, b, dtype) / (norm(a, dtype) * norm(b, dtype))
    return jnp.where(jnp.isfinite(quotient), quotient, 0)
