"""Forward differences whose distance follows their scale."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.base import Estimate, GradientEstimator, Points, Values
from radazo_jax._src.directions.dense import sphere
from radazo_jax._src.directions.distribution import Distribution
from radazo_jax._src.estimators.differences import (
    AlongDirections,
    Differences,
    checked_differences,
)
from radazo_jax._src.trees import number, rounding, widest

# The decay rate of the averages over steps.
_DECAY = 0.9

# If the average share is above this, curvature would bias the estimate.
_SEEN = 0.2

# Noise of f(θ), which all differences of a step have in common, seldom takes it beyond
# three standard errors, here per root mean square of the shares.
_BEYOND_NOISE = 3 * ((1 - _DECAY) / (1 + _DECAY)) ** 0.5

# Values have noise if the variance of the shares exceeds 1/K by this. For slopes the
# variance is 1/K, and three standard errors of its average are another 1/K.
_NOISY = 0.1

# Factors of μ if curvature dominates, if it does not, and if noise does.
_SHORTER, _LONGER, _ABOVE_NOISE = 0.5, 1.05, 1.2

# If there is nothing but noise, no μ is long enough.
_MOST = 200


class AdaptiveDifferenceState(NamedTuple):
    """State of `adaptive_difference`.

    Scalars are float32, or float64 if the parameters are.

    Attributes:
      smoothing: μ of the next step: shape ().
      curvature: The average share of curvature in the differences: shape ().
      square: The average of the squares of the shares: shape ().
    """

    smoothing: jax.Array
    curvature: jax.Array
    square: jax.Array


class AdaptiveDifference(AlongDirections):
    """See `adaptive_difference`."""

    _constructor = "adaptive_difference"
    includes_params = True

    def init(self, params: optax.Params) -> AdaptiveDifferenceState:
        zero = number(0, widest(params))
        first = jnp.asarray(self.smoothing, zero.dtype)
        return AdaptiveDifferenceState(first, zero, zero)

    def _scales(self, state: AdaptiveDifferenceState) -> jax.Array:
        return state.smoothing[None].astype(jnp.float32)

    def reduce(
        self,
        points: Points,
        values: Values,
        params: optax.Params,
        state: AdaptiveDifferenceState,
    ) -> tuple[Estimate, AdaptiveDifferenceState]:
        found = Differences.of(values)
        distance = points.scales[0, 0].astype(values.base.dtype)
        estimate = found.estimate(distance, points)
        return estimate, _adapted(state, values.base, found.each, self.smoothing)


def adaptive_difference(
    distribution: Distribution = sphere(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
) -> GradientEstimator:
    """`forward_difference` with a μ that follows curvature and noise.

    A forward difference f(θ + μu) − f(θ) is μ ⟨∇f, u⟩ + μ²/2 uᵀHu up to third order.
    Near a minimum the second part remains, and a run with a constant μ ends when both
    parts are of equal size. Directions are symmetric, so the first part and noise of
    the values have mean 0. If the differences of about ten steps have one sign, that
    is, if the average over t of

        shareₜ = meanₖ Δₜₖ / √meanₖ Δₜₖ²,    Δₜₖ = f(θₜ + μ uₖ) − f(θₜ)

    is beyond ±0.2, and more than three standard errors from 0, curvature dominates, and
    μ is halved. Otherwise μ grows by 5 % per step, up to its initial value. Differences
    within rounding do not shorten it. If no difference is finite, μ is halved.

    Noise of f(θ) is in all differences of a step, with either sign. The variance of the
    shares is 1/K for slopes, and more than 1/2 for noise. If its average exceeds 1/K by
    0.1 and by 1/K, noise dominates, and μ grows by 20 % per step, up to 200 times its
    initial value. With fewer than four directions, noise is not detected.

    Use it for runs that must converge beyond the accuracy of a constant μ.

    Args:
      distribution: The distribution of the directions u.
      num_directions: K, the number of directions per estimate, of K + 1 evaluations.
      smoothing: The initial μ, and the largest without noise: a positive number in the
        units of the parameters.

    Returns:
      The estimator, with an `AdaptiveDifferenceState`; else as `forward_difference`.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `num_directions` or `smoothing` is not positive.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import radazo_jax as zo
      >>> def last_loss(estimator):
      ...     result = zo.minimize(
      ...         lambda x: jnp.sum((x - 1) ** 2),
      ...         jnp.zeros(8),
      ...         optax.sgd(1.0),
      ...         estimator,
      ...         zo.search.parabolic(),
      ...         num_steps=200,
      ...         key=0,
      ...         progress=False,
      ...     )
      ...     return result.values[-1]
      >>> constant = last_loss(zo.forward_difference(smoothing=1e-2))
      >>> adaptive = last_loss(zo.adaptive_difference(smoothing=1e-2))
      >>> bool(adaptive < 1e-2 * constant)
      True
    """
    return AdaptiveDifference(
        *checked_differences(distribution, num_directions, smoothing)
    )


def _adapted(
    state: AdaptiveDifferenceState,
    base: jax.Array,
    each: jax.Array,
    first: float,
) -> AdaptiveDifferenceState:
    """The state after some differences, with another μ.

    Differences to their own mean, if the base failed, say nothing about curvature.
    """
    finite = jnp.isfinite(each)
    found = jnp.where(finite, each, 0)
    count = jnp.sum(finite).astype(found.dtype)
    rms = jnp.sqrt(jnp.sum(found**2) / count)
    clear = jnp.isfinite(base) & (rms > rounding(base) * abs(base))
    share = jnp.where(clear, jnp.sum(found) / count / rms, 0)
    share = share.astype(state.curvature.dtype)
    curvature = _DECAY * state.curvature + (1 - _DECAY) * share
    square = _DECAY * state.square + (1 - _DECAY) * share**2
    limit = jnp.maximum(_SEEN, _BEYOND_NOISE * jnp.sqrt(square))
    seen = clear & (abs(curvature) > limit)
    of_slopes = 1 / count.astype(square.dtype)
    variance = square - curvature**2
    noisy = clear & (variance > of_slopes + jnp.maximum(_NOISY, of_slopes))
    before = state.smoothing
    longest = jnp.where(noisy, _MOST * first, jnp.maximum(before, first))
    longer = jnp.minimum(before * jnp.where(noisy, _ABOVE_NOISE, _LONGER), longest)
    # The share of curvature is proportional to μ.
    after = state._replace(
        smoothing=jnp.where(seen, _SHORTER * before, longer).astype(before.dtype),
        curvature=jnp.where(seen, _SHORTER, 1) * curvature,
        square=jnp.where(seen, _SHORTER**2, 1) * square,
    )
    without = state._replace(smoothing=_SHORTER * before)
    return optax.tree.where(count > 0, after, without)
