"""Differences along coordinates, those that matter more often."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax import checks, distributions, estimators
from radazo_jax._src.contrib import _memory
from radazo_jax.random import Positions


class CoordinateWiseState(NamedTuple):
    """State of `coordinate_wise`.

    Attributes:
      scores: The average absolute derivative along each coordinate, the largest
        number if it has not been seen: float32, [d].
    """

    scores: jax.Array


class _Basis(distributions.Distribution):
    """The distribution whose direction i is coordinate i."""

    sequential = True

    def factor(self, dimension: int) -> float:
        return float(dimension)

    def draw(self, key: jax.Array, number: jax.Array, at: Positions) -> jax.Array:
        del key
        return ((at.hi == 0) & (at.lo == number)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, repr=False)
class CoordinateWise(estimators.GradientEstimator):
    """See `coordinate_wise`."""

    _constructor = "coordinate_wise"

    num_directions: int
    smoothing: float
    decay: float
    uniform_fraction: float

    def init(self, params: optax.Params) -> CoordinateWiseState:
        dimension = optax.tree.size(params)
        return CoordinateWiseState(_memory.none((dimension,), jnp.float32(0)))

    def points(
        self, draw: estimators.Draw, params: optax.Params, state: CoordinateWiseState
    ) -> tuple[estimators.Points, CoordinateWiseState]:
        dimension = optax.tree.size(params)
        # By the inverse of the cumulative distribution.
        shares = jnp.cumsum(_probabilities(state.scores, self.uniform_fraction))
        shape = (self.num_directions,)
        drawn = jax.random.uniform(draw.key, shape, shares.dtype) * shares[-1]
        chosen = jnp.searchsorted(shares, drawn, side="right")
        chosen = jnp.minimum(chosen, dimension - 1)
        scales, numbers = [self.smoothing, -self.smoothing], chosen.astype(jnp.uint32)
        points = estimators.sample_points(
            _Basis(), draw, len(chosen), scales, params, numbers=numbers
        )
        return points, state

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: CoordinateWiseState,
    ) -> tuple[estimators.Estimate, CoordinateWiseState]:
        moved = values.along
        slopes = (moved[:, 0] - moved[:, 1]) / (2 * self.smoothing)
        finite = jnp.isfinite(slopes)
        used = jnp.sum(finite, dtype=jnp.int32)
        slopes = jnp.where(finite, slopes, 0)
        chosen = points.directions.number
        probabilities = _probabilities(state.scores, self.uniform_fraction)[chosen]
        weights = 1 / (probabilities.astype(slopes.dtype) * used.astype(slopes.dtype))
        # Without any value nothing is known, and nothing is not zero.
        coefficients = jnp.where(used > 0, weights * slopes, jnp.nan)
        # A sum, for a coordinate may be chosen twice.
        zeros = jnp.zeros(points.layout.dimension, coefficients.dtype)
        flat = zeros.at[chosen].add(coefficients)
        estimate = estimators.Estimate(
            _memory.finite_mean(moved),
            slope=jnp.sum(coefficients * slopes),
            num_values=2 * used,
            gradient=points.of_flat(flat, params),
        )
        kept, seen = state.scores[chosen], jnp.abs(slopes).astype(jnp.float32)
        before = _memory.known(kept)
        average = self.decay * before + (1 - self.decay) * seen
        new = jnp.where(jnp.isnan(before), seen, average)
        scores = state.scores.at[chosen].set(jnp.where(finite, new, kept))
        return estimate, CoordinateWiseState(scores)


@checks.checks_names
def coordinate_wise(
    num_directions: int = 10,
    smoothing: float = 5e-3,
    decay: float = 0.9,
    uniform_fraction: float = 0.5,
) -> estimators.GradientEstimator:
    """Central differences along coordinates, chosen by importance.

        Dᵢ = (f(θ + μ eᵢ) − f(θ − μ eᵢ)) / 2μ
        ∇̂f(θ) = 1/K Σₖ D_iₖ / p_iₖ · e_iₖ,  pᵢ = (1 − ε) sᵢ / Σⱼ sⱼ + ε / d

    K coordinates are drawn with replacement, coordinate i with probability pᵢ. The
    variance is least if pᵢ is proportional to |Dᵢ|. The score sᵢ is the average of past
    |Dᵢ|; coordinates without a past have the average score. With ε = 1 the choice is
    uniform, as with the distribution `coordinate`. For all coordinates in every
    step, use `central_difference` with `coordinate(replace=False)` and K = d.

    Args:
      num_directions: K, the number of coordinates per estimate.
      smoothing: μ, how far from θ along each coordinate the function is evaluated.
      decay: Decay rate of the scores, in [0, 1).
      uniform_fraction: ε, the share of the choice that is uniform, in (0, 1].

    Returns:
      The estimator, with a `CoordinateWiseState` of d floats. Its value is the mean of
      the evaluations. Differences that are not finite are left out.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `num_directions` or `smoothing` is not positive, or `decay` or
        `uniform_fraction` is out of its range.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator, x = zo.contrib.coordinate_wise(100), jnp.array([1.0, -2.0])
      >>> (_, gradient), state = zo.estimators.estimate(
      ...     estimator, lambda x: jnp.sum(x**2), 0, x, estimator.init(x)
      ... )
      >>> bool(jnp.allclose(state.scores, jnp.array([2.0, 4.0]), rtol=1e-3))
      True

    References:
      Lian et al., A Comprehensive Linear Speedup Analysis for Asynchronous Stochastic
      Parallel Optimization from Zeroth-Order to First-Order, NeurIPS 2016.

      Nesterov, Efficiency of Coordinate Descent Methods on Huge-Scale Optimization
      Problems, SIAM J. Optim. 2012, for probabilities by importance.
    """
    num_directions = checks.check_int_at_least("num_directions", num_directions, 1)
    smoothing = checks.check_positive("smoothing", smoothing)
    decay = checks.check_unit_interval("decay", decay)
    uniform_fraction = checks.check_positive("uniform_fraction", uniform_fraction)
    if uniform_fraction > 1:
        raise ValueError(
            f"uniform_fraction must be a number in (0, 1]; got {uniform_fraction!r}."
        )
    return CoordinateWise(num_directions, smoothing, decay, uniform_fraction)


def _probabilities(scores: jax.Array, uniform: float) -> jax.Array:
    """Returns p, [d]."""
    scores = _memory.known(scores)
    unseen = jnp.isnan(scores)
    mean = jnp.where(jnp.all(unseen), 1, jnp.nanmean(scores))
    scores = jnp.where(unseen, mean, scores)
    total = jnp.sum(scores)
    size = len(scores)
    shares = jnp.where(total > 0, scores / total, 1 / size)
    return (1 - uniform) * shares + uniform / size
