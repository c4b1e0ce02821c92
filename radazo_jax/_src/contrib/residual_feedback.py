"""Estimators of one evaluation a direction, and of two."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax import checks, distributions, estimators
from radazo_jax._src.contrib import _memory


class ResidualFeedbackState(NamedTuple):
    """State of `residual_feedback`.

    Attributes:
      value: The mean value of the latest step, the largest number before the first:
        float32, or float64 for float64 parameters, shape ().
    """

    value: jax.Array


class ResidualFeedback(estimators.AlongDirections):
    """See `residual_feedback`."""

    _constructor = "residual_feedback"

    def init(self, params: optax.Params) -> ResidualFeedbackState:
        return ResidualFeedbackState(_memory.none((), params))

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: ResidualFeedbackState,
    ) -> tuple[estimators.Estimate, ResidualFeedbackState]:
        moved = values.along[:, 0]
        value = _memory.finite_mean(moved)
        before = _memory.known(state.value).astype(value.dtype)
        before = jnp.where(jnp.isnan(before), value, before)
        found = estimators.Differences(value, moved - before)
        estimate = found.estimate(self.smoothing, points)
        kept = jnp.where(jnp.isnan(value), state.value, value.astype(state.value.dtype))
        return estimate, ResidualFeedbackState(kept)


@checks.checks_names
def residual_feedback(
    distribution: distributions.Distribution = distributions.sphere(),
    num_directions: int = 1,
    smoothing: float = 5e-2,
) -> estimators.GradientEstimator:
    """The one-point estimator with residual feedback, of K evaluations.

        ∇̂f(θ_t) = c/K Σₖ (f(θ_t + μ u_tk) − b_{t−1}) / μ · u_tk

    with b_{t−1} the mean of the values of the previous step, and c the factor of the
    distribution; the paper has K = 1. It has the expectation of `forward_difference`,
    because b does not depend on the directions of this step. Its variance grows with
    ((b − f(θ))/μ)², so that it needs a larger smoothing, and short steps. Each
    minibatch has its own level of values, which is noise.

    The first step has no previous value, and uses the mean of its own: with K = 1 its
    gradient is zero.

    Args:
      distribution: The distribution of the directions u.
      num_directions: K, the number of directions, and of evaluations, per estimate.
      smoothing: μ, how far from θ along u the function is evaluated.

    Returns:
      The estimator, with a `ResidualFeedbackState`. Its value is the mean of the K
      values. Non-finite values are left out, as in `forward_difference`.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `num_directions` or `smoothing` is not positive.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> result = zo.train(
      ...     lambda x: jnp.sum((x - 1) ** 2),
      ...     jnp.zeros(3),
      ...     optax.sgd(1e-2),
      ...     zo.contrib.residual_feedback(),
      ...     num_steps=1000,
      ...     key=0,
      ...     progress=False,
      ... )
      >>> bool(jnp.allclose(result.params, 1, atol=0.1))
      True

    References:
      Zhang et al., A New One-Point Residual-Feedback Oracle for Black-Box Learning and
      Control, Automatica 2022, <https://arxiv.org/abs/2006.10820>.
    """
    return ResidualFeedback(distribution, num_directions, smoothing)
