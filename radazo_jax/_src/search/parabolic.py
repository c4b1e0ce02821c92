"""A step size from values: the minimum of the parabola through the steps taken."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import checks, trees, xla
from radazo_jax._src.base import Descent, Search
from radazo_jax._src.trees import norm, product, scaled, wide

# A step that raises the loss is rejected if its curvature is so many times the known
# one.
_SURPRISE = 4.0

# Factors by which the step size changes at once, by measurements or blindly: while
# its scale is being searched for, and thereafter.
_SEARCH, _SEARCH_BLIND, _AVERAGED, _BLIND = 100.0, 10.0, 2.0, 1.25

# The first step lowers the loss by this share of it, according to the slope. The best
# step on a parabola down to 0 would lower it by twice the loss, according to the slope,
# so that one measurement is enough to find it.
_FIRST = 2 / _SEARCH


class ParabolicState(NamedTuple):
    """State of `parabolic`.

    Scalars have the dtype of the parameters, float32 if that is narrower.

    Attributes:
      before: The parameters before the latest step.
      step_size: η of the latest step, 0 before the first: shape ().
      slope: The average of the slope along a step, per squared length: shape ().
      curvature: The average of the curvature along a step, per squared length:
        shape ().
      averaged: Number of measurements in these averages: int32, shape ().
      alignment: The average cosine of a step with the one before: shape ().
      searching: Whether the scale of the step is still being searched for: bool,
        shape ().
      pending: Whether the latest step will be measured: bool, shape ().
      value: The loss at its start, infinite before the first and if it was not finite:
        shape ().
      params_value: The loss at the parameters before it, which differs if the step
        started at a lookahead point: shape ().
      first: The loss before the first step, likewise: shape ().
      noise: The difference of two values at the same parameters: shape ().
      fall: The decrease of the loss in the step according to the slope alone; with
        `extra_evaluations=1`, the loss at the opposite point: shape ().
      share: The share of the step that bounds left of it: ⟨p, u⟩ / |u|² of the step u
        and of the displacement p: shape ().
      square: |p|²: shape ().
      step: The latest step, a tree like the parameters; `()` without
        `extra_evaluations`, which compares it with the next one.
    """

    before: optax.Params
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
    share: jax.Array
    square: jax.Array
    step: Any


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


@dataclasses.dataclass(frozen=True, repr=False)
class Parabolic(Search):
    """See `parabolic`."""

    _constructor = "parabolic"

    decay: float = 0.8
    extra_evaluations: int = 0
    initial_step_size: float | None = None

    def init(self, params: optax.Params) -> ParabolicState:
        zero = trees.init_scalar(params)
        infinite = trees.number(jnp.inf, zero.dtype)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return ParabolicState(
            before=trees.copy(params),
            step_size=trees.number(self.initial_step_size or 0.0, zero.dtype),
            slope=zero,
            curvature=zero,
            averaged=trees.number(0, jnp.int32),
            alignment=zero,
            searching=trees.number(True, jnp.bool_),
            pending=trees.number(False, jnp.bool_),
            value=infinite,
            params_value=infinite,
            first=infinite,
            noise=zero,
            fall=zero,
            share=zero,
            square=zero,
            step=zeros if self.extra_evaluations else (),
        )

    def judge(
        self, state: ParabolicState, params: optax.Params, value: jax.Array
    ) -> tuple[jax.Array, ParabolicState]:
        del params
        numbers = state._replace(before=(), step=())
        accepted, after = xla.in_one_kernel(self._judged, numbers, value)
        return accepted, after._replace(before=state.before, step=state.step)

    def _judged(
        self, state: ParabolicState, value: jax.Array
    ) -> tuple[jax.Array, ParabolicState]:
        """The judgment by the numbers of a state."""
        dtype, resolution = state.step_size.dtype, trees.rounding(value)
        value, rate = value.astype(dtype), jnp.asarray(self.decay, dtype)
        # The latest value belongs to the parameters, unless a step was taken.
        pending = state.pending & (state.square > 0)
        apart = abs(value - state.value)
        again = ~pending & jnp.isfinite(apart)
        noise = jnp.where(again, jnp.maximum(apart, rate * state.noise), state.noise)
        state = state._replace(pending=pending, noise=noise)
        parabola = _measured(state, value, self.extra_evaluations)
        state, back = _adapted(state, parabola, value, resolution, rate)
        stays = ~back & jnp.isfinite(value + state.value)
        latest = jnp.where(back, state.params_value, state.value)
        return ~back, state._replace(
            pending=jnp.zeros_like(pending),
            value=jnp.where(stays, value, latest),
        )

    def move(
        self, state: ParabolicState, params: optax.Params, descent: Descent
    ) -> tuple[optax.Params, ParabolicState]:
        state, size, along = self._proposed(state, descent)
        dtype = state.step_size.dtype
        value = descent.estimate.value.astype(dtype)
        known = jnp.isfinite(descent.value)
        lookahead = descent.estimate.lookahead
        start, start_value = params, value
        if lookahead is not None:
            start = optax.apply_updates(params, lookahead.displacement)
            start_value = jnp.asarray(lookahead.value).astype(dtype)
        # No step starts at a lookahead point whose loss exceeds the first loss.
        highest = jnp.maximum(value, state.first + _SURPRISE * state.noise)
        goes = jnp.isfinite(value + start_value) & (start_value <= highest)
        goes &= (along > 0) & jnp.isfinite(size * along)
        step = scaled(size, descent.direction)
        step = jax.tree.map(lambda s: jnp.where(goes, s, 0), step)
        fall = size * along
        if self.extra_evaluations:
            opposite = optax.apply_updates(start, scaled(-jnp.ones((), dtype), step))
            fall = jnp.asarray(_loss(descent)(opposite)).astype(dtype)
        taken = step if lookahead is None else _sum(step, lookahead.displacement)
        after = descent.project(optax.apply_updates(params, taken))
        after = optax.tree.where(goes, after, params)
        share, square = _moved(params, after, step, descent)
        new = state._replace(
            before=optax.tree.where(goes, params, state.before),
            step_size=jnp.where(goes, size, state.step_size),
            # Without a finite loss at its start, a step cannot be measured.
            pending=goes & known,
            value=jnp.where(goes, jnp.where(known, start_value, jnp.inf), state.value),
            params_value=jnp.where(goes, descent.value, state.params_value).astype(
                dtype
            ),
            first=jnp.where(goes & known & jnp.isinf(state.first), value, state.first),
            fall=jnp.where(goes, fall, state.fall),
            share=jnp.where(goes, share, state.share),
            square=jnp.where(goes, square, state.square),
            step=step if self.extra_evaluations else (),
        )
        return after, new

    def _proposed(
        self, state: ParabolicState, descent: Descent
    ) -> tuple[ParabolicState, jax.Array, jax.Array]:
        """The state, the step size, and the negative slope along the direction."""
        dtype = state.step_size.dtype
        updates, value = descent.direction, descent.estimate.value.astype(dtype)
        slope = descent.estimate.slope.astype(dtype)
        along = steepest = slope
        if self.extra_evaluations:
            along = product(updates, updates, dtype)
            # That of a step as long, along -ĝ.
            lengths = norm(updates, dtype) / norm(descent.gradient, dtype)
            steepest = slope * lengths
            rate = jnp.asarray(self.decay, dtype)
            between = _cosine(updates, state.step, dtype)
            aligned = rate * state.alignment + (1 - rate) * between
            state = state._replace(alignment=jnp.where(state.searching, 0, aligned))
        # By its slope, the first step does not lower the loss by more than itself.
        most = jnp.where(value == 0, 1, abs(value)) / steepest
        first = _FIRST * most if self.initial_step_size is None else state.step_size
        is_first = jnp.isinf(state.first)
        size = jnp.where(is_first, jnp.minimum(first, most), state.step_size)
        return state, size, along


def parabolic(
    decay: jax.typing.ArrayLike = 0.8,
    extra_evaluations: int = 0,
    initial_step_size: jax.typing.ArrayLike | None = None,
) -> Search:
    """Finds the step size from values: the minimum of the latest parabolas.

    The loss along a step is approximated by a parabola. For the negative of a gradient
    estimate ĝ, both of its coefficients are known: the slope s follows from the
    differences of the estimate, and the curvature h from the loss f before the step and
    f′ after it, which the next step evaluates anyway:

        h = 2 (f′ − f + η s) / η²,    η = average(s / |ĝ|²) / average(h / |ĝ|²)

    Until the right scale is found, the step size changes by a factor of up to 100 at a
    time, and later of up to 2. A step is rejected that raises the loss with four times
    the known curvature, or above the loss at the start of the run, or that ends at
    parameters without a finite loss. If value or slope are not finite, no step is
    taken. Differences of the loss within rounding are ignored. A step from parameters
    without a finite loss, but with a slope (see `forward_difference`), is neither
    measured nor rejected.

    With `optax.sgd(1.0)` it is stochastic gradient descent without a learning rate.
    With the distribution `orthonormal`, that needs the fewest evaluations of all
    methods here on deterministic losses that are not badly conditioned.

    The loss must be the same function in each step; on minibatches, use `radazo` at the
    rate of `find_learning_rate`. In float32 no step is taken if |ĝ|² is not within
    10⁻³⁸ and 10³⁸: scale a loss that is so small or large.

    Args:
      decay: The decay rate of both averages, in [0, 1).
      extra_evaluations: Number of further evaluations per step. 0 is for the direction
        −ĝ alone, as of `optax.sgd(1.0)`. 1 is for any direction, as of
        `radazo(1.0)`: the loss at the opposite point is evaluated, too.
      initial_step_size: η of the first step, a positive number; it may be wrong by any
        factor. The default lowers the loss by a fiftieth, according to the slope; along
        other directions than −ĝ, the step has the same length.

    Returns:
      The search. Its state is a `ParabolicState`. With `accelerated`, its steps start
      at the lookahead point.

    Raises:
      TypeError, ValueError: If `decay` is not in [0, 1), `extra_evaluations` is neither
        0 nor 1, or `initial_step_size` is not a positive number; from the first step,
        if `extra_evaluations` is 1 and JAX does not evaluate the loss, as in
        `ask_tell` and with a journal.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> def rosenbrock(x):
      ...     return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)
      >>> result = zo.minimize(
      ...     rosenbrock,
      ...     jax.random.uniform(jax.random.key(0), (64,), minval=-1.0),
      ...     optax.sgd(1.0),
      ...     zo.forward_difference(zo.orthonormal()),
      ...     zo.search.parabolic(),
      ...     num_steps=200,
      ...     key=0,
      ...     progress=False,
      ... )
      >>> bool(result.values[-1] < 0.03 * result.values[0])
      True

      R-AdaZO without a learning rate:

      >>> result = zo.minimize(
      ...     lambda x: jnp.sum((x - 1.0) ** 2),
      ...     jnp.zeros(20),
      ...     zo.radazo(1.0),
      ...     zo.forward_difference(),
      ...     zo.search.parabolic(extra_evaluations=1),
      ...     num_steps=300,
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
    first = None
    if initial_step_size is not None:
        checks.check_positive("initial_step_size", initial_step_size)
        first = checks.as_number(initial_step_size)
    return Parabolic(checks.as_number(decay), int(extra_evaluations), first)


def _loss(descent: Descent) -> Any:
    """The loss that a search evaluates; raises without one."""
    if descent.loss is None:
        raise ValueError(
            "extra_evaluations must be 0 if JAX does not evaluate the loss, as in "
            "ask_tell and with a journal; got 1."
        )
    return descent.loss


def _sum(step: optax.Updates, lookahead: optax.Updates) -> optax.Updates:
    """The update of a step that starts at a lookahead point."""
    return jax.tree.map(lambda s, w: s + w.astype(s.dtype), step, lookahead)


def _moved(
    params: optax.Params, after: optax.Params, step: optax.Updates, descent: Descent
) -> tuple[jax.Array, jax.Array]:
    """The share of a step that was taken after bounds, and its squared length.

    Args:
      params: θ.
      after: The parameters after the step.
      step: The step from its start, before bounds.
      descent: The direction; its estimate knows the start.
    """
    dtype = trees.init_scalar(params).dtype
    taken = jax.tree.map(lambda p, old: wide(p) - wide(old), after, params)
    if descent.estimate.lookahead is not None:
        taken = optax.tree.sub(taken, descent.estimate.lookahead.displacement)
    missing = jax.tree.map(lambda p, u: p - wide(u), taken, step)
    # A difference of parameters is rounded by this much in any case.
    eps = max(float(jnp.finfo(p.dtype).eps) for p in jax.tree.leaves(params))
    rounded = (4 * eps) ** 2 * product(after, after, dtype)
    square = product(step, step, dtype)
    is_whole = product(missing, missing, dtype) <= rounded
    share = product(taken, step, dtype) / square
    length = product(taken, taken, dtype)
    return jnp.where(is_whole, 1, share), jnp.where(is_whole, square, length)


def _measured(
    state: ParabolicState, value: jax.Array, extra_evaluations: int
) -> _Parabola:
    """The parabola along the latest step, by the value at its end."""
    share, square = state.share, state.square
    if extra_evaluations == 0:
        fall = share * state.fall
        return _Parabola(fall, 2 * (value - state.value + fall), square)
    opposite, change = state.fall - state.value, value - state.value
    half = (share * opposite + change) / (1 + share)
    # Of a whole step, rounded as the differences of three values.
    whole = (state.fall - value) / 2, state.fall + value - 2 * state.value
    fall = jnp.where(share == 1, whole[0], share * opposite - half)
    rise = jnp.where(share == 1, whole[1], 2 * half)
    return _Parabola(fall, rise, square)


def _adapted(
    state: ParabolicState,
    parabola: _Parabola,
    value: jax.Array,
    resolution: float,
    decay: jax.Array,
) -> tuple[ParabolicState, jax.Array]:
    """The step size after a measurement, and whether the step is rejected."""
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
