"""Estimates at a lookahead point, by Nesterov's momentum and pattern moves."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.base import (
    Draw,
    Estimate,
    GradientEstimator,
    Lookahead,
    Points,
    Values,
    check_estimator,
    shifted,
)
from radazo_jax._src.trees import copy, number, product, wide, wide_zeros, widest

# The point at which a step starts: the lookahead point; the parameters, while the end
# of a pattern move is tried; or that end.
_AHEAD, _TRIAL, _MOVED = 0, 1, 2


class AcceleratedState(NamedTuple):
    """State of `accelerated`.

    Attributes:
      estimator: The state of the estimator that is accelerated.
      previous: The parameters of the latest step: a tree like the parameters.
      momentum: z − θ, a tree like the parameters, at least float32.
      share: The share of the momentum in the lookahead point, 0 to reset it: shape ().
      lookahead_value: The latest value at the start of a step, infinite before the
        first: shape ().
      count: The number of steps: int32, shape ().
      base: b, the start of a pattern move: likewise, at least float32.
      since: The number of steps since `base`: int32, shape ().
      start: The start of the latest step: 0 for the lookahead point; 1 for the
        parameters, while a pattern move was tried; 2 for its end: int32, shape ().
      lower: Whether the loss at the end of the move was lower: bool, shape ().
    """

    estimator: Any
    previous: Any
    momentum: Any
    share: jax.Array
    lookahead_value: jax.Array
    # `count` is the name that Optax's states have; it hides a method of tuple.
    count: jax.Array  # type: ignore[assignment]
    base: Any
    since: jax.Array
    start: jax.Array
    lower: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class Accelerated(GradientEstimator):
    """See `accelerated`."""

    _constructor = "accelerated"

    estimator: GradientEstimator

    def init(self, params: optax.Params) -> AcceleratedState:
        return AcceleratedState(
            estimator=self.estimator.init(params),
            previous=copy(params),
            momentum=wide_zeros(params),
            share=number(0, widest(params)),
            lookahead_value=number(jnp.inf, widest(params)),
            count=number(0, jnp.int32),
            base=copy(jax.tree.map(wide, params)),
            since=number(0, jnp.int32),
            start=number(_AHEAD, jnp.int32),
            lower=number(False, jnp.bool_),
        )

    def points(
        self, draw: Draw, params: optax.Params, state: AcceleratedState
    ) -> tuple[Points, AcceleratedState]:
        at_params, inner = self.estimator.points(draw, params, state.estimator)
        _check_points(at_params)
        state = _followed(params, state, len(at_params.scales), draw.bounds)
        # The lookahead point itself is at distance 0 along any direction.
        directions = jax.tree.map(
            lambda x: jnp.concatenate([x[:1], x]), at_params.directions
        )
        scales = jnp.concatenate(
            [jnp.zeros_like(at_params.scales[:1]), at_params.scales]
        )
        # In a trial, all other points lie around θ.
        others = jnp.where(state.start == _TRIAL, 0, 1).astype(scales.dtype)
        shifts = jnp.full_like(scales, others).at[0].set(1)
        lookahead = _lookahead(params, state, draw.bounds)
        points = Points(directions, scales, True, at_params.layout, lookahead, shifts)
        return points, state._replace(estimator=inner)

    def reduce(
        self,
        points: Points,
        values: Values,
        params: optax.Params,
        state: AcceleratedState,
    ) -> tuple[Estimate, AcceleratedState]:
        tries = state.start == _TRIAL
        value, away = values.base, values.along[0, 0]
        begin = jnp.where(tries, value, away)
        # A step can begin at θ without a value there, but not at a lookahead point.
        nowhere = jnp.isfinite(value) & ~jnp.isfinite(begin)
        # If the step of the trial undid its move, there is neither, nor a step there.
        before = state.lookahead_value.astype(away.dtype)
        undone = (state.start == _MOVED) & ~(away < before)
        directions = jax.tree.map(lambda x: x[1:], points.directions)
        around = Points(directions, points.scales[1:], True, points.layout)
        lookahead = _zero_if(tries, points.shift)
        at = shifted(params, lookahead, jnp.ones((), state.share.dtype))
        known_values = jax.tree.map(
            lambda x: jnp.where(nowhere, jnp.nan, x), Values(begin, values.along[1:])
        )
        estimate, after = self.estimator.reduce(
            around, known_values, at, state.estimator
        )
        other = jnp.where(tries, away, value)
        lookahead_value = jnp.where(tries | undone, value, away)
        # If neither θ nor the start has a value, the estimate's replaces both.
        known = jnp.isfinite(value)
        replaced = ~known & ~jnp.isfinite(lookahead_value)
        gradient = estimate.gradient
        estimate = estimate._replace(
            value=jnp.where(known, value, estimate.value),
            slope=jnp.where(undone, 0, estimate.slope),
            num_values=estimate.num_values + jnp.isfinite(other).astype(jnp.int32),
            gradient=gradient.scaled(jnp.where(undone, 0.0, 1.0)),
            lookahead=Lookahead(
                _zero_if(undone, lookahead),
                jnp.where(replaced, estimate.value, lookahead_value),
            ),
        )
        state = _judged(params, state, value, away, lookahead_value, undone)
        return estimate, state._replace(estimator=after)


def accelerated(estimator: GradientEstimator) -> GradientEstimator:
    """Estimates the gradient at the lookahead point of Nesterov's method.

    Steps along estimates form a descent over random subspaces. The number of steps
    grows with the ratio of the curvatures; with momentum, about with its square root.
    Use it with `search.parabolic` if curvatures differ. With z₀ = θ₀ and share
    a₀ = min(K/d, 1), a step is

        yₜ = θₜ + aₜ (zₜ − θₜ)
        θₜ₊₁ = yₜ − η ĝ(yₜ)
        zₜ₊₁ = zₜ + a₀/aₜ (θₜ₊₁ − yₜ)
        aₜ₊₁ = (√(aₜ⁴ + 4 aₜ²) − aₜ²) / 2

    Momentum is reset, z ← θ and a ← a₀, if f(yₜ) exceeds both f(θₜ) and f(yₜ₋₁), if
    f(yₜ) is not finite, or if the step from y opposes the step from θ. The first d/K
    steps have no momentum, because all of their directions are new. The step size must
    suit the curvature; `search.parabolic` measures it by the value at θ, one additional
    evaluation.

    If f(θₜ) is finite and f(yₜ) is not, there is no estimate. If neither is finite, the
    mean of the values along the directions replaces both, as in `forward_difference`.

    After d/K steps from b, a pattern move is tried: the next step starts at θ, and the
    point 2θ − b replaces the lookahead point. If f(2θ − b) < f(θ), the following step
    starts there, unless the loss at θ has fallen below it, and the next move goes twice
    as far; otherwise b ← θ. In this way, many short steps add up to a long one.

    Args:
      estimator: An estimator that evaluates the parameters themselves and one point
        along each direction, such as `forward_difference` or `adaptive_difference`;
        best with the distribution `orthonormal`.

    Returns:
      The estimator, with one more evaluation per step, and an `AcceleratedState`, which
      has three trees like the parameters. Its value belongs to θ; gradient and slope
      belong to the lookahead point. Use it with `search.parabolic`, whose steps start
      at the lookahead point; other steps start at θ.

    Raises:
      TypeError: If `estimator` is not an estimator.
      ValueError: If the estimator has other points; raised by the first step.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> scales = jnp.logspace(0, 3, 64)
      >>> def last_loss(estimator):
      ...     result = zo.minimize(
      ...         lambda x: jnp.sum(scales * x**2),
      ...         jnp.ones(64),
      ...         optax.sgd(1.0),
      ...         estimator,
      ...         zo.search.parabolic(),
      ...         num_steps=200,
      ...         key=0,
      ...         progress=False,
      ...     )
      ...     return result.values[-1]
      >>> plain = zo.adaptive_difference(zo.orthonormal())
      >>> bool(last_loss(zo.accelerated(plain)) < 0.5 * last_loss(plain))
      True

    References:
      Fercoq & Richtárik, Accelerated, Parallel, and Proximal Coordinate Descent, SIAM
      J. Optim. 2015, algorithm 1, <https://arxiv.org/abs/1312.5799>; restarted by the
      gradient as in O'Donoghue & Candès, Adaptive Restart for Accelerated Gradient
      Schemes, 2015, <https://arxiv.org/abs/1204.3982>. Pattern moves: Hooke & Jeeves,
      "Direct Search" Solution of Numerical and Statistical Problems, J. ACM 1961,
      <https://doi.org/10.1145/321062.321069>.
    """
    check_estimator(estimator)
    return Accelerated(estimator)


def _check_points(points: Points) -> None:
    if (
        not points.includes_params
        or points.scales.shape[1] != 1
        or points.shift is not None
    ):
        raise ValueError(
            "estimator must evaluate the parameters and a point along each direction, "
            "as forward_difference does; got one with other points."
        )


def _followed(
    params: optax.Params, state: AcceleratedState, num_directions: int, bounds: Any
) -> AcceleratedState:
    """The state after the step that led to `params`, or was not taken."""
    share, dtype = state.share, state.share.dtype
    size = optax.tree.size(params)
    first = jnp.asarray(min(1.0, num_directions / size), dtype)
    whole = jax.tree.map(lambda p, old: wide(p) - wide(old), params, state.previous)
    step = optax.tree.sub(whole, _lookahead(state.previous, state, bounds))
    # Steps start at the parameters in a trial, and if one is rejected instead.
    back = product(step, step, dtype) > product(whole, whole, dtype)
    stays = (state.start == _TRIAL) | (state.start == _MOVED) & back
    step = optax.tree.where(stays, whole, step)
    along = jnp.where(
        state.start == _AHEAD, product(step, whole, dtype), product(step, step, dtype)
    )
    forth = (share > 0) & (along > 0)
    kept = jnp.where(state.start == _AHEAD, 1 - share, 1)
    gain = first / share - 1
    momentum = jax.tree.map(
        lambda v, s: jnp.where(
            forth, kept.astype(v.dtype) * v + gain.astype(v.dtype) * s, 0
        ),
        state.momentum,
        step,
    )
    # Directions that are all new gather nothing.
    new = state.count.astype(dtype) * num_directions < size
    following = (jnp.sqrt(share**4 + 4 * share**2) - share**2) / 2
    share = jnp.where(new, 0, jnp.where(forth, following, first))
    due = state.since.astype(dtype) * num_directions >= size
    start = jnp.where(state.lower, _MOVED, jnp.where(due, _TRIAL, _AHEAD))
    return state._replace(
        previous=params,
        momentum=momentum,
        share=share,
        start=start.astype(jnp.int32),
    )


def _judged(
    params: optax.Params,
    state: AcceleratedState,
    value: jax.Array,
    away: jax.Array,
    lookahead_value: jax.Array,
    undone: jax.Array,
) -> AcceleratedState:
    """The state after the values of a step.

    Args:
      params: θ.
      state: The state before.
      value: The value at θ.
      away: The value at the lookahead point, or at the end of a pattern move.
      lookahead_value: The value at the start of the step.
      undone: Whether the step of the trial undid its move.
    """
    tries = state.start == _TRIAL
    # Momentum is reset if the loss at the lookahead point exceeds the current loss
    # and is rising, or is not finite.
    latest = lookahead_value.astype(state.lookahead_value.dtype)
    resets = (lookahead_value > value) & (latest > state.lookahead_value)
    resets |= ~jnp.isfinite(lookahead_value)
    lower = tries & (away < value)
    ends = undone | (tries & ~lower)
    return state._replace(
        share=jnp.where(resets, 0, state.share),
        lookahead_value=latest,
        count=optax.safe_increment(state.count),
        base=jax.tree.map(lambda b, p: jnp.where(ends, wide(p), b), state.base, params),
        since=jnp.where(ends, 0, optax.safe_increment(state.since)),
        lower=lower,
    )


def _lookahead(
    params: optax.Params, state: AcceleratedState, bounds: Any
) -> optax.Params:
    """The displacement from the parameters to the lookahead point or end of a move.

    It ends within the bounds, as all points do.
    """
    free = jax.tree.map(
        lambda p, v, b: jnp.where(
            state.start == _AHEAD, state.share.astype(v.dtype) * v, wide(p) - b
        ),
        params,
        state.momentum,
        state.base,
    )
    if bounds is None:
        return free
    return jax.tree.map(
        lambda w, p, low, high: jnp.clip(w, wide(low) - wide(p), wide(high) - wide(p)),
        free,
        params,
        *bounds,
    )


def _zero_if(condition: jax.Array, tree: Any) -> Any:
    """Zeros if the condition holds, else the tree."""
    return jax.tree.map(lambda x: jnp.where(condition, 0, x), tree)
