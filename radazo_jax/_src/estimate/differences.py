"""Finite differences along random directions."""

from typing import Any

import jax
import jax.numpy as jnp

from radazo_jax._src import checks
from radazo_jax._src.directions.law import Law
from radazo_jax._src.directions.laws import sphere
from radazo_jax._src.estimate import numbering
from radazo_jax._src.estimate.compiled import Evaluator, compiled
from radazo_jax._src.estimate.estimator import GradientEstimator
from radazo_jax._src.estimate.points import (
    Estimate,
    Points,
    points_along,
    weighted_sum,
)
from radazo_jax._src.estimate.spread import AxisName, spread


def forward_difference(
    law: Law = sphere(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
    batch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> GradientEstimator:
    """The forward-difference estimator of the paper, of K + 1 evaluations.

        ∇̂f(θ; ξ) = c/K Σₖ (f(θ + μ uₖ; ξ) − f(θ; ξ)) / μ · uₖ

    with c the factor of the law, d for the sphere. It is an unbiased estimate of the
    gradient of the smoothed function, up to rounding. The value is f(θ; ξ).

    Directions along which the difference is not finite are left out, and K is the
    number of the others. Where values fail depends on the point, this is a bias: the
    estimate is that of the function where it can be evaluated. Without any, the
    gradient is NaN; `minimize` then skips the step.

    Args:
      law: The law of the directions u.
      num_directions: K, the number of directions per estimate.
      smoothing: μ, how far from θ along u the function is evaluated; a positive
        number in the units of the parameters.
      batch_size: How many directions are evaluated together, as in `jax.lax.map`.
        `None` evaluates all of them under one `vmap`; 1 evaluates one at a time, in the
        memory of a single evaluation. The estimate is the same up to rounding.
      axis_name: The mesh axis (or axes) over which the evaluations are spread, under
        `jax.set_mesh`. Each device evaluates its share of them, up to `batch_size`
        together. Only the losses are sent, and every device computes the same gradient
        from them. Parameters and minibatch may be sharded over other axes.

    Returns:
      The estimator. It has no state, unless the law is `numbered`; then that is a key
      and the number of the next direction.

    Raises:
      TypeError, ValueError: If an argument is not as described.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator = zo.forward_difference(num_directions=1000, smoothing=1e-3)
      >>> params = jnp.array([1.0, -2.0])
      >>> (value, gradient), _ = estimator.estimate(
      ...     lambda p: jnp.sum(p**2), jax.random.key(0), params, estimator.init(params)
      ... )
      >>> float(value)
      5.0
      >>> bool(jnp.allclose(gradient, 2 * params, rtol=0.1))
      True

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (2).
    """
    evaluator = checked_evaluator(law, num_directions, smoothing, batch_size, axis_name)

    def points(key: jax.Array, params: Any, state: Any) -> Points:
        key, numbers = numbering.following(state, key, num_directions)
        return points_along(law, key, numbers, [smoothing], params, with_params=True)

    def reduce(
        points: Points, values: jax.Array, params: Any, state: Any
    ) -> tuple[Estimate, Any]:
        base, moved = points.split(values)
        estimate = from_differences(base, moved[:, 0] - base, smoothing, points, params)
        return estimate, numbering.advanced(state, points)

    return GradientEstimator(lambda _: numbering.init(law), points, reduce, evaluator)


def central_difference(
    law: Law = sphere(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
    batch_size: int | None = None,
    axis_name: AxisName | None = None,
) -> GradientEstimator:
    """The central-difference estimator, of 2K evaluations.

        ∇̂f(θ; ξ) = c/K Σₖ (f(θ + μ uₖ; ξ) − f(θ − μ uₖ; ξ)) / 2μ · uₖ

    with c the factor of the law, d for the sphere. Its expectation is that of the
    forward difference, and the curvature of f adds nothing to its variance. The value
    is the mean of the 2K evaluations, which differs from f(θ; ξ) by O(μ²); the
    auxiliary output, where there is one, is that at θ + μu₁. What is not finite is
    left out, as in `forward_difference`.

    Args:
      law: The law of the directions u.
      num_directions: K, the number of directions per estimate.
      smoothing: μ, how far from θ along u and -u the function is evaluated; a positive
        number in the units of the parameters.
      batch_size: How many directions (two evaluations each) are evaluated together, as
        in `jax.lax.map`. `None` evaluates all of them under one `vmap`; 1 evaluates one
        at a time. The estimate is the same up to rounding.
      axis_name: The mesh axis (or axes) over which the 2K evaluations are spread, as
        in `forward_difference`.

    Returns:
      The estimator. It has no state, unless the law is `numbered`; then that is a key
      and the number of the next direction.

    Raises:
      TypeError, ValueError: If an argument is not as described.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator = zo.central_difference(zo.coordinate(), num_directions=100)
      >>> params = jnp.array([1.0, -2.0])
      >>> (value, gradient), _ = estimator.estimate(
      ...     lambda p: jnp.sum(p**2), jax.random.key(0), params, estimator.init(params)
      ... )
      >>> bool(jnp.allclose(gradient, 2 * params, rtol=0.3))
      True

    References:
      Malladi et al., Fine-Tuning Language Models with Just Forward Passes, 2023,
      definition 1, with the law Gaussian, <https://arxiv.org/abs/2305.17333>.
    """
    evaluator = checked_evaluator(law, num_directions, smoothing, batch_size, axis_name)

    def points(key: jax.Array, params: Any, state: Any) -> Points:
        key, numbers = numbering.following(state, key, num_directions)
        return points_along(law, key, numbers, [smoothing, -smoothing], params)

    def reduce(
        points: Points, values: jax.Array, params: Any, state: Any
    ) -> tuple[Estimate, Any]:
        _, moved = points.split(values)
        above, below = moved.T
        value = mean_of_finite(moved)
        estimate = from_differences(value, above - below, 2 * smoothing, points, params)
        return estimate, numbering.advanced(state, points)

    return GradientEstimator(lambda _: numbering.init(law), points, reduce, evaluator)


def checked_evaluator(
    law: Any, num_directions: Any, smoothing: Any, batch_size: Any, axis_name: Any
) -> Evaluator:
    """The evaluator; raises if an argument is not as described."""
    if not isinstance(law, Law):
        raise TypeError(f"law must be a Law such as sphere(); got {law!r}.")
    checks.check_int_at_least("num_directions", num_directions, 1)
    checks.check_positive("smoothing", smoothing)
    if axis_name is None:
        return compiled(batch_size)
    return spread(axis_name, batch_size)


def mean_of_finite(values: jax.Array) -> jax.Array:
    """The mean of the values that are finite; NaN without any."""
    return jnp.nanmean(jnp.where(jnp.isfinite(values), values, jnp.nan))


def from_differences(
    value: jax.Array,
    differences: jax.Array,
    distance: jax.typing.ArrayLike,
    points: Points,
    params: Any,
) -> Estimate:
    """c/K Σₖ (differenceₖ / distance) uₖ over the K differences that are finite.

    Along it the slope is c/K Σₖ (…)². Without any, gradient and slope are NaN.
    """
    finite = jnp.isfinite(differences)
    count = jnp.sum(finite, dtype=jnp.int32)
    slopes = jnp.where(finite, differences, 0) / distance
    factor = jnp.asarray(points.directions.law.factor(params), slopes.dtype)
    weight = factor / count.astype(slopes.dtype)
    gradient = weighted_sum(slopes * weight, points, params)
    used = count * points.scales.shape[1] + int(points.with_params)
    return Estimate(
        value,
        gradient,
        slope=weight * jnp.sum(slopes**2),
        num_values=jnp.where(count > 0, used, 0),
    )
