"""Variance reduction by an anchor: ZO-SVRG."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import checks
from radazo_jax._src.directions.gram import inner
from radazo_jax._src.directions.law import Law
from radazo_jax._src.directions.laws import sphere
from radazo_jax._src.estimate import numbering
from radazo_jax._src.estimate.differences import checked_evaluator
from radazo_jax._src.estimate.estimator import GradientEstimator
from radazo_jax._src.estimate.points import (
    Estimate,
    Points,
    shifted_points,
    weighted_sum,
)
from radazo_jax._src.estimate.spread import AxisName
from radazo_jax._src.trees import wide, wide_zeros


class VarianceReducedState(NamedTuple):
    """State of `variance_reduced`: twice the parameters.

    Attributes:
      numbering: The numbers of the directions, `()` unless the law is `numbered`.
      anchor: θ̃, a tree like the parameters.
      gradient: The mean estimate at θ̃, a tree like the parameters: at least float32.
      count: The number of steps since θ̃ was set: int32, shape (). At 0, the next
        step sets it.
    """

    numbering: Any
    anchor: Any
    gradient: Any
    # `count` is the name that Optax's states have; it hides a method of tuple.
    count: jax.Array  # type: ignore[assignment]


def variance_reduced(
    law: Law = sphere(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
    period: int = 50,
    anchor_steps: int = 5,
    batch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> GradientEstimator:
    """ZO-SVRG: differences to the estimate at an anchor, of 2K + 2 evaluations.

    Every `period` steps the anchor θ̃ is set to θ. Its gradient g̃ is the mean of the
    estimates of the first `anchor_steps` steps, each of its own minibatch and of K
    central differences at θ̃, and is what these steps return. The other steps return

        ∇̂f(θ; ξ) − ∇̂f(θ̃; ξ) + g̃

    with forward differences along the same directions and of the same minibatch ξ. The
    noise of both cancels while θ is near θ̃; that of g̃ stays, the same for a whole
    period. Liu et al. find an error of the order of d/K that is left in any case, so
    that it needs many directions; where the function has no minibatches, it gains
    nothing over `forward_difference`.

    Args:
      law: The law of the directions u.
      num_directions: K, the number of directions per estimate.
      smoothing: μ, how far from θ and θ̃ along u the function is evaluated.
      period: How many steps an anchor serves, at least 2.
      anchor_steps: How many of them make its gradient: fewer than `period`.
      batch_size: How many points are evaluated together, as in `jax.lax.map`.
      axis_name: The mesh axis (or axes) over which the evaluations are spread.

    Returns:
      The estimator, with a `VarianceReducedState`. Its value is f(θ; ξ). What is not
      finite is left out, as in `forward_difference`; a step without a value is no step
      of the period.

    Raises:
      TypeError, ValueError: If an argument is not as described.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> data = jnp.arange(8.0)
      >>> def loss(x, i):
      ...     return jnp.sum((x - data[i]) ** 2)
      >>> result = zo.minimize(
      ...     loss,
      ...     jnp.zeros(2),
      ...     optax.sgd(3e-2),
      ...     zo.variance_reduced(num_directions=4, period=40, anchor_steps=20),
      ...     400,
      ...     sample=lambda key: jax.random.randint(key, (), 0, 8),
      ...     key=0,
      ...     progress=False,
      ... )
      >>> bool(jnp.allclose(result.params, 3.5, atol=1.0))
      True

    References:
      Liu et al., Zeroth-Order Stochastic Variance Reduction for Nonconvex Optimization,
      NeurIPS 2018, algorithm 2, <https://arxiv.org/abs/1805.10367>.
    """
    evaluator = checked_evaluator(law, num_directions, smoothing, batch_size, axis_name)
    checks.check_int_at_least("period", period, 2)
    checks.check_int_at_least("anchor_steps", anchor_steps, 1)
    if anchor_steps >= period:
        raise ValueError(
            f"anchor_steps must be fewer than period, {period}; got {anchor_steps}."
        )
    size = num_directions

    def init(params: Any) -> VarianceReducedState:
        return VarianceReducedState(
            numbering.init(law),
            jax.tree.map(jnp.zeros_like, params),
            wide_zeros(params),
            jnp.zeros((), jnp.int32),
        )

    def anchor_of(params: Any, state: VarianceReducedState) -> Any:
        return optax.tree.where(state.count == 0, params, state.anchor)

    def points(key: jax.Array, params: Any, state: VarianceReducedState) -> Points:
        key, numbers = numbering.following(state.numbering, key, size)
        away = jax.tree.map(
            lambda a, p: wide(a) - wide(p), anchor_of(params, state), params
        )
        at_anchor = state.count < anchor_steps
        # Along u from θ, or from θ̃; along u, or -u, from θ̃; and θ̃ itself.
        which = [*range(size), *range(size), 0]
        there = jnp.where(at_anchor, 1.0, 0.0)
        back = jnp.where(at_anchor, -smoothing, smoothing)
        scales = jnp.array([*([smoothing] * size), *([back] * size), 0.0], jnp.float32)
        shifts = jnp.array([*([there] * size), *([1.0] * (size + 1))], jnp.float32)
        return shifted_points(law, key, numbers, which, scales, away, shifts, params)

    def reduce(
        points: Points, values: jax.Array, params: Any, state: VarianceReducedState
    ) -> tuple[Estimate, VarianceReducedState]:
        base, moved = points.split(values)
        first, second = moved[:size, 0], moved[size:-1, 0]
        at_anchor = state.count < anchor_steps
        slopes = jnp.where(
            at_anchor, (first - second) / (2 * smoothing), (first - base) / smoothing
        )
        behind = jnp.where(at_anchor, 0, (second - moved[-1, 0]) / smoothing)
        finite = jnp.isfinite(slopes - behind)
        used = jnp.sum(finite, dtype=jnp.int32)
        slopes, behind = (jnp.where(finite, x, 0) for x in (slopes, behind))
        factor = jnp.asarray(law.factor(params), slopes.dtype)
        weight = factor / used.astype(slopes.dtype)
        along = points.along(slice(size))
        new = weighted_sum(weight * (slopes - behind), along, state.gradient)

        # The mean with the estimates before, or the sum with the anchor's.
        before = state.count.astype(slopes.dtype)
        part_new = jnp.where(at_anchor, 1 / (before + 1), 1)
        part_old = jnp.where(at_anchor, before / (before + 1), 1)
        total = jax.tree.map(
            lambda n, o: part_new.astype(o.dtype) * n + part_old.astype(o.dtype) * o,
            new,
            state.gradient,
        )
        dots = inner(along.directions, points.layout, state.gradient)
        seen = part_new * (slopes - behind) + part_old * dots.astype(slopes.dtype)
        estimate = Estimate(
            base,
            jax.tree.map(lambda g, p: g.astype(p.dtype), total, params),
            slope=weight * jnp.sum(slopes * seen),
            num_values=jnp.where(used > 0, 2 * used + jnp.where(at_anchor, 0, 2), 0),
        )

        following = (
            anchor_of(params, state),
            optax.tree.where(at_anchor, total, state.gradient),
            (state.count + 1) % period,
        )
        kept = optax.tree.where(used > 0, following, state[1:])
        numbers = numbering.advanced(state.numbering, points, size)
        return estimate, VarianceReducedState(numbers, *kept)

    return GradientEstimator(init, points, reduce, evaluator)
