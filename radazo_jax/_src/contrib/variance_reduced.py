"""Variance reduction by an anchor: ZO-SVRG."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax import checks, distributions, estimators
from radazo_jax._src.contrib import _memory


class VarianceReducedState(NamedTuple):
    """State of `variance_reduced`: twice the parameters.

    Attributes:
      anchor: θ̃, a tree like the parameters.
      gradient: The mean estimate at θ̃, a tree like the parameters: at least float32.
      count: The number of steps since θ̃ was set: int32, shape (). At 0, the next
        step sets it.
    """

    anchor: optax.Params
    gradient: optax.Updates
    # `count` is the name that Optax's states have; it hides a method of tuple.
    count: jax.Array  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, repr=False)
class VarianceReduced(estimators.AlongDirections):
    """See `variance_reduced`."""

    _constructor = "variance_reduced"

    period: int
    anchor_steps: int

    def init(self, params: optax.Params) -> VarianceReducedState:
        return VarianceReducedState(
            jax.tree.map(jnp.zeros_like, params),
            _memory.wide_zeros(params),
            jnp.zeros((), jnp.int32),
        )

    def points(
        self, draw: estimators.Draw, params: optax.Params, state: VarianceReducedState
    ) -> tuple[estimators.Points, VarianceReducedState]:
        away = jax.tree.map(
            lambda a, p: _memory.as_wide(a) - _memory.as_wide(p),
            _anchor_of(params, state),
            params,
        )
        at_anchor = state.count < self.anchor_steps
        size = self.num_directions
        # Along u from θ, or from θ̃; along u, or -u, from θ̃; and θ̃ itself.
        which = np.array([*range(size), *range(size), 0])
        there = jnp.where(at_anchor, 1.0, 0.0)
        back = jnp.where(at_anchor, -self.smoothing, self.smoothing)
        scales = jnp.array(
            [*([self.smoothing] * size), *([back] * size), 0.0], jnp.float32
        )
        shifts = jnp.array([*([there] * size), *([1.0] * (size + 1))], jnp.float32)
        points = estimators.sample_points(
            self.distribution, draw, size, [1.0], params, includes_params=True
        ).select(which)
        return points.with_shift(away, shifts[:, None], scales[:, None]), state

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: VarianceReducedState,
    ) -> tuple[estimators.Estimate, VarianceReducedState]:
        size = self.num_directions
        base, moved = values
        first, second = moved[:size, 0], moved[size:-1, 0]
        at_anchor = state.count < self.anchor_steps
        here = estimators.Differences.of(estimators.Values(base, first[:, None]))
        there = estimators.Differences.of(
            estimators.Values(moved[-1, 0], second[:, None])
        )
        slopes = jnp.where(
            at_anchor,
            (first - second) / (2 * self.smoothing),
            here.to_others / self.smoothing,
        )
        behind = jnp.where(at_anchor, 0, there.to_others / self.smoothing)
        finite = jnp.isfinite(slopes - behind)
        used = jnp.sum(finite, dtype=jnp.int32)
        slopes, behind = (jnp.where(finite, x, 0) for x in (slopes, behind))
        num_bases = jnp.where(at_anchor, 0, here.num_base + there.num_base)
        factor = jnp.asarray(points.factor, slopes.dtype)
        weight = factor / used.astype(slopes.dtype)
        along = points.select(slice(size))
        new = along.combine(weight * (slopes - behind)).materialize(state.gradient)

        # The mean with the estimates before, or the sum with the anchor's.
        before = state.count.astype(slopes.dtype)
        part_new = jnp.where(at_anchor, 1 / (before + 1), 1)
        part_old = jnp.where(at_anchor, before / (before + 1), 1)
        total = jax.tree.map(
            lambda n, o: part_new.astype(o.dtype) * n + part_old.astype(o.dtype) * o,
            new,
            state.gradient,
        )
        dots = along.inner_products(state.gradient)
        seen = part_new * (slopes - behind) + part_old * dots.astype(slopes.dtype)
        estimate = estimators.Estimate(
            here.value,
            slope=weight * jnp.sum(slopes * seen),
            num_values=jnp.where(used > 0, 2 * used + num_bases, 0),
            gradient=points.of_tree(total),
        )
        following = VarianceReducedState(
            _anchor_of(params, state),
            optax.tree.where(at_anchor, total, state.gradient),
            (state.count + 1) % self.period,
        )
        return estimate, _memory.updated_if_usable(estimate, state, following)


@checks.checks_names
def variance_reduced(
    distribution: distributions.Distribution = distributions.sphere(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
    period: int = 50,
    anchor_steps: int = 5,
) -> estimators.GradientEstimator:
    """ZO-SVRG: differences to the estimate at an anchor, of 2K + 2 evaluations.

    Every `period` steps the anchor θ̃ is set to θ. Its gradient g̃ is the mean of the
    estimates of the first `anchor_steps` steps, each of its own minibatch and of K
    central differences at θ̃, and is what these steps return. The other steps return

        ∇̂f(θ; ξ) − ∇̂f(θ̃; ξ) + g̃

    with forward differences along the same directions and of the same minibatch ξ. The
    noise of both cancels while θ is near θ̃. The noise of g̃ stays, the same for a whole
    period. Liu et al. find a remaining error of the order of d/K, so that it needs many
    directions. Without minibatches, it gains nothing over `forward_difference`.

    Args:
      distribution: The distribution of the directions u.
      num_directions: K, the number of directions per estimate.
      smoothing: μ, how far from θ and θ̃ along u the function is evaluated.
      period: Number of steps per anchor, at least 2.
      anchor_steps: Number of steps that make its gradient: fewer than `period`.

    Returns:
      The estimator, with a `VarianceReducedState`. Its value is f(θ; ξ). What is not
      finite is left out, as in `forward_difference`; a step without a value is no step
      of the period.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `num_directions` or `smoothing` is not positive, or `period` or
        `anchor_steps` is out of its range.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> data = jnp.arange(8.0)
      >>> def loss(x, i):
      ...     return jnp.sum((x - data[i]) ** 2)
      >>> result = zo.train(
      ...     loss,
      ...     jnp.zeros(2),
      ...     optax.sgd(3e-2),
      ...     zo.contrib.variance_reduced(num_directions=4, period=40, anchor_steps=20),
      ...     num_steps=400,
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
    period = checks.check_int_at_least("period", period, 2)
    anchor_steps = checks.check_int_at_least("anchor_steps", anchor_steps, 1)
    if anchor_steps >= period:
        raise ValueError(
            f"anchor_steps must be fewer than period, {period}; got {anchor_steps}."
        )
    return VarianceReduced(
        distribution, num_directions, smoothing, period, anchor_steps
    )


def _anchor_of(params: optax.Params, state: VarianceReducedState) -> optax.Params:
    return optax.tree.where(state.count == 0, params, state.anchor)
