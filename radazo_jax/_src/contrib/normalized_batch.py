"""Steps whose length follows the spread of the values: FZOO."""

from typing import Any

import jax.numpy as jnp
import optax

from radazo_jax import distributions, estimators
from radazo_jax._src.base import checks


class NormalizedBatch(estimators.AlongDirections):
    """See `normalized_batch`."""

    _constructor = "normalized_batch"
    includes_params = True

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: Any,
    ) -> tuple[estimators.Estimate, Any]:
        moved = values.along[:, 0]
        estimate = estimators.Differences.of(values).estimate(self.smoothing, points)
        spread = jnp.std(moved, ddof=1, where=jnp.isfinite(moved)) / self.smoothing
        # One value has no spread, and equal values have no direction.
        inverse = jnp.where(spread > 0, 1 / spread, 0)
        gradient = estimate.gradient.scaled(inverse)
        return estimate._replace(
            slope=inverse * estimate.slope, gradient=gradient
        ), state


@checks.checks_names
def normalized_batch(
    distribution: distributions.Distribution = distributions.rademacher(),
    num_directions: int = 8,
    smoothing: float = 1e-3,
) -> estimators.GradientEstimator:
    """FZOO: forward differences over the spread of the values, of K + 1 evaluations.

        ∇̂f(θ) = 1/σ · c/K Σₖ (f(θ + μ uₖ) − f(θ)) / μ · uₖ

    with σ the standard deviation of the K values f(θ + μ uₖ), over μ. σ estimates the
    length of the gradient, so that SGD takes steps of a length that the learning rate
    alone decides. Use it with `zo_sgd`; adaptive optimizers rescale the gradient
    themselves.

    The paper has σ in units of the values. Its learning rate is μ times the one here.

    Args:
      distribution: The distribution of the directions u.
      num_directions: K, the number of directions per estimate, at least 2 for a spread.
      smoothing: μ, how far from θ along u the function is evaluated.

    Returns:
      The estimator; it has no state. Its value is f(θ). Values that are not finite are
      left out, as in `forward_difference`. If all values are equal, or only one is
      finite, the gradient is zero.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `num_directions` is less than 2, or `smoothing` not positive.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator = zo.contrib.normalized_batch(num_directions=100)
      >>> scaled = [
      ...     zo.value_and_grad(lambda x: size * jnp.sum(x), estimator)(0, jnp.ones(3))[
      ...         1
      ...     ]
      ...     for size in (1.0, 1024.0)
      ... ]
      >>> bool(jnp.allclose(*scaled, rtol=1e-2))
      True

    References:
      Dang et al., FZOO: Fast Zeroth-Order Optimizer for Fine-Tuning Large Language
      Models towards Adam-Scale Speed, 2025, algorithm 1,
      <https://arxiv.org/abs/2506.09034>.
    """
    estimator = NormalizedBatch(distribution, num_directions, smoothing)
    if num_directions < 2:
        raise ValueError(f"num_directions must be an int ≥ 2; got {num_directions}.")
    return estimator
