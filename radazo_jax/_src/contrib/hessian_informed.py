"""Perturbations scaled by the diagonal of the Hessian: HiZOO."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax import checks, distributions, estimators
from radazo_jax._src.contrib import _memory

# On a flat function h would vanish, and perturbations grow without end.
_LEAST = 1e-8


class HessianInformedState(NamedTuple):
    """State of `hessian_informed`.

    Attributes:
      hessian: h, the estimate of the diagonal of the Hessian: a tree like the
        parameters, at least float32; 1 before the first step.
    """

    hessian: Any


@dataclasses.dataclass(frozen=True, repr=False)
class HessianInformed(estimators.AlongDirections):
    """See `hessian_informed`."""

    _constructor = "hessian_informed"

    num_directions: int = dataclasses.field(default=1, init=False)
    decay: float

    def init(self, params: optax.Params) -> HessianInformedState:
        ones = jax.tree.map(lambda x: 1 + x, _memory.wide_zeros(params))
        return HessianInformedState(ones)

    def points(
        self, draw: estimators.Draw, params: optax.Params, state: HessianInformedState
    ) -> tuple[estimators.Points, HessianInformedState]:
        drawn = estimators.sample_points(self.distribution, draw, 1, [1.0], params)
        length = math.sqrt(drawn.factor)
        w = jax.tree.map(
            lambda u, h: length * u.astype(h.dtype) / jnp.sqrt(h),
            *(drawn.direction(0), state.hessian),
        )
        scales = [self.smoothing, -self.smoothing]
        return estimators.points_along(w, scales, params, includes_params=True), state

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: HessianInformedState,
    ) -> tuple[estimators.Estimate, HessianInformedState]:
        above, below = values.along[0]
        curvature = jnp.abs(above + below - 2 * values.base) / (2 * self.smoothing**2)

        def averaged(h: jax.Array, w: jax.Array) -> jax.Array:
            # u = √h w, and h u² is the term of the authors.
            seen = curvature.astype(h.dtype) * (h * w) ** 2
            return jnp.maximum(self.decay * h + (1 - self.decay) * seen, _LEAST)

        hessian = jax.tree.map(averaged, state.hessian, points.shift)
        tree = jax.tree.map(
            lambda w, old, new: w * jnp.sqrt(old / new),
            *(points.shift, state.hessian, hessian),
        )
        estimate = _memory.along_tree(points, values, self.smoothing, tree)
        used = (estimate.num_values > 0) & jnp.isfinite(values.base)
        num_values = jnp.where(used, 3, 0).astype(jnp.int32)
        estimate = estimate._replace(value=values.base, num_values=num_values)
        after = HessianInformedState(hessian)
        return estimate, _memory.updated_if_usable(estimate, state, after)


@checks.checks_names
def hessian_informed(
    distribution: distributions.Distribution = distributions.gaussian(),
    smoothing: float = 1e-3,
    decay: float = 1 - 1e-6,
) -> estimators.GradientEstimator:
    """HiZOO: a perturbation scaled by the curvature, of 3 evaluations.

        w = u / √h,  s = (f(θ + μ w) − f(θ − μ w)) / 2μ
        h ← (1 − α) h + α |f(θ + μ w) + f(θ − μ w) − 2 f(θ)| / 2μ² · h u²
        ∇̂f(θ) = s u / √h

    with α = 1 − `decay`, and h ≥ 10⁻⁸. If the function is curved along a coordinate,
    the perturbation and the step are shorter along it. Use it with `zo_sgd`. It suits
    functions whose coordinates differ much in curvature. A single estimate of h is
    noisy, so α must be small.

    Args:
      distribution: The distribution of u, whose elements are scaled to variance one.
      smoothing: μ, how far from θ along w the function is evaluated.
      decay: 1 − α, the decay rate of h, in [0, 1).

    Returns:
      The estimator, with a `HessianInformedState`. Its value is f(θ). If one of the
      values is not finite, the step is skipped.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `smoothing` is not positive, or `decay` is out of its range.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator, x = zo.contrib.hessian_informed(decay=0.9), jnp.ones(2)
      >>> (value, _), state = zo.estimators.estimate(
      ...     estimator, lambda x: jnp.sum(x**2), 0, x, estimator.init(x)
      ... )
      >>> float(value)
      2.0

    References:
      Zhao et al., Second-Order Fine-Tuning without Pain for LLMs: A Hessian Informed
      Zeroth-Order Optimizer, ICLR 2025, algorithm 1,
      <https://arxiv.org/abs/2402.15173>.
    """
    decay = checks.check_unit_interval("decay", decay)
    return HessianInformed(distribution, smoothing, decay)
