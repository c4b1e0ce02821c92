"""Finite differences along random directions."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.base import checks, shown
from radazo_jax._src.base.configuration import check_fields
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.base.trees import Tree
from radazo_jax._src.directions.distribution import Distribution
from radazo_jax._src.directions.distributions import rademacher, sphere
from radazo_jax._src.estimates.contracts import (
    Draw,
    Estimate,
    GradientEstimator,
    Points,
    Values,
)
from radazo_jax._src.estimates.points import sample_points

_SMOOTHING = 5e-3  # The paper's, for smooth functions.


@dataclasses.dataclass(frozen=True, repr=False)
class AlongDirections(GradientEstimator):
    """The base class of estimators whose points lie at a distance μ along directions.

    Subclasses define `reduce`, and `points` if there are more points along a direction.

    Attributes:
      distribution: The distribution of the directions.
      num_directions: K, the number of directions, a positive integer.
      smoothing: μ, a positive number.
      includes_params: Whether θ itself is a point, the first.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `num_directions` or `smoothing` is not positive.

    Examples:
      The forward difference:

      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> from radazo_jax.estimators import AlongDirections, Differences
      >>> class Forward(AlongDirections):
      ...     includes_params = True
      ...
      ...     def reduce(self, points, values, params, state):
      ...         found = Differences.of(values)
      ...         return found.estimate(self.smoothing, points), state
      >>> estimator = Forward(zo.sphere(), 10, 1e-3)
      >>> value, gradient = zo.value_and_grad(jnp.sum, estimator)(0, jnp.ones(3))
      >>> float(value)
      3.0
    """

    distribution: Distribution
    num_directions: int
    smoothing: float

    includes_params: ClassVar[bool] = False
    # The sides of θ on which the points along a direction lie.
    _sides: ClassVar[Sequence[float]] = (1.0,)

    def __post_init__(self) -> None:
        check_distribution(self.distribution)
        count = checks.check_int_at_least("num_directions", self.num_directions, 1)
        object.__setattr__(self, "num_directions", count)
        object.__setattr__(self, "smoothing", checked_smoothing(self.smoothing))

    def points(
        self, draw: Draw, params: optax.Params, state: Tree
    ) -> tuple[Points, Tree]:
        points = sample_points(
            self.distribution,
            draw,
            self.num_directions,
            [side * self.smoothing for side in self._sides],
            params,
            includes_params=self.includes_params,
        )
        return points, state


@dataclasses.dataclass(frozen=True, repr=False)
class FiniteDifferences(AlongDirections):
    """Differences at a smoothing that a run may replace by a measured one.

    Attributes:
      is_named: Whether the caller has named the smoothing.
    """

    is_named: bool = dataclasses.field(default=True, repr=False, compare=False)


class ForwardDifference(FiniteDifferences):
    """See `forward_difference`."""

    _constructor = "forward_difference"
    includes_params = True

    def reduce(
        self, points: Points, values: Values, params: optax.Params, state: Tree
    ) -> tuple[Estimate, Tree]:
        found = Differences.of(values)
        return found.estimate(self.smoothing, points), state


class CentralDifference(FiniteDifferences):
    """See `central_difference`."""

    _constructor = "central_difference"
    _sides = (1.0, -1.0)

    def reduce(
        self, points: Points, values: Values, params: optax.Params, state: Tree
    ) -> tuple[Estimate, Tree]:
        above, below = values.along.T
        found = Differences(mean_of_finite(values.along), above - below)
        return found.estimate(2 * self.smoothing, points), state


@checks_names
def forward_difference(
    distribution: Distribution = sphere(),
    num_directions: int = 10,
    smoothing: float | None = None,
) -> GradientEstimator:
    """The forward-difference estimator of the paper, of K + 1 evaluations.

        ∇̂f(θ; ξ) = c/K Σₖ (f(θ + μ uₖ; ξ) − f(θ; ξ)) / μ · uₖ

    with c the factor of the distribution, d for the sphere. It is an unbiased estimate
    of the gradient of the smoothed function, up to rounding. The value is f(θ; ξ).

    Directions along which the difference is not finite are left out, and K is the
    number of the remaining ones. If failures depend on the point, the estimate is
    biased: it describes the function at the points at which it can be evaluated. If no
    direction remains, the gradient is NaN, and `train` skips the step.

    If f(θ; ξ) itself is not finite, the mean f̄ of the K finite values replaces it, in
    the estimate and as the value. This needs K ≥ 2. The estimate

        ∇̂f(θ; ξ) = K/(K−1) · c/K Σₖ (f(θ + μ uₖ; ξ) − f̄) / μ · uₖ

    takes the difference of each value to the mean of the others. It is unbiased too,
    with a larger variance, if E[uᵢ uₖᵀ] = 0 for i ≠ k. Among the distributions here,
    only `orthonormal` violates this: the first coordinate has the same sign in all
    directions of one basis, so its element of the estimate is 0.

    Args:
      distribution: The distribution of the directions u.
      num_directions: K, the number of directions per estimate.
      smoothing: μ, how far from θ along u the function is evaluated; a positive
        number in the units of the parameters. By default 5e-3, unless `train`
        measures the learning rate: it then measures μ, too, as `find_smoothing` does.
        5e-3 is for smooth functions and directions of length 1, as of `sphere`. Those
        of `gaussian`, `rademacher` and `low_rank` move each parameter by about μ: begin
        with 1e-3 for a network.

    Returns:
      The estimator; it has no state.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `num_directions` or `smoothing` is not positive.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator = zo.forward_difference(num_directions=1000, smoothing=1e-3)
      >>> params = jnp.array([1.0, -2.0])
      >>> (value, gradient), _ = zo.estimators.estimate(
      ...     estimator, lambda p: jnp.sum(p**2), jax.random.key(0), params, ()
      ... )
      >>> float(value)
      5.0
      >>> bool(jnp.allclose(gradient, 2 * params, rtol=0.1))
      True

    References:
      Shu et al., Refining Adaptive Zeroth-Order Optimization at Ease, ICML 2025,
      eq. (2).
    """
    named = smoothing is not None
    far = _SMOOTHING if smoothing is None else smoothing
    return ForwardDifference(distribution, num_directions, far, is_named=named)


@checks_names
def central_difference(
    distribution: Distribution = sphere(),
    num_directions: int = 10,
    smoothing: float | None = None,
) -> GradientEstimator:
    """The central-difference estimator, of 2K evaluations.

        ∇̂f(θ; ξ) = c/K Σₖ (f(θ + μ uₖ; ξ) − f(θ − μ uₖ; ξ)) / 2μ · uₖ

    with c the factor of the distribution, d for the sphere. It has the expectation of
    the forward difference, and the curvature of f adds nothing to its variance. The
    value is the mean of the 2K evaluations, which differs from f(θ; ξ) by O(μ²). The
    auxiliary output, if there is one, comes from θ + μu₁. Non-finite differences are
    left out, as in `forward_difference`.

    Args:
      distribution: The distribution of the directions u.
      num_directions: K, the number of directions per estimate.
      smoothing: μ, how far from θ along u and -u the function is evaluated; a positive
        number, with the default of `forward_difference`.

    Returns:
      The estimator; it has no state.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `num_directions` or `smoothing` is not positive.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator = zo.central_difference(zo.coordinate(), num_directions=100)
      >>> params = jnp.array([1.0, -2.0])
      >>> (value, gradient), _ = zo.estimators.estimate(
      ...     estimator, lambda p: jnp.sum(p**2), jax.random.key(0), params, ()
      ... )
      >>> bool(jnp.allclose(gradient, 2 * params, rtol=0.3))
      True

    References:
      Malladi et al., Fine-Tuning Language Models with Just Forward Passes, 2023,
      definition 1, with the distribution Gaussian, <https://arxiv.org/abs/2305.17333>.
    """
    named = smoothing is not None
    far = _SMOOTHING if smoothing is None else smoothing
    return CentralDifference(distribution, num_directions, far, is_named=named)


@checks_names
def spsa(num_directions: int = 1, smoothing: float | None = None) -> GradientEstimator:
    """Simultaneous perturbation (SPSA): two evaluations along random signs.

        ∇̂f(θ)ᵢ = (f(θ + μ Δ) − f(θ − μ Δ)) / (2μ Δᵢ)

    averaged over K vectors Δ of random signs. As 1/Δᵢ = Δᵢ, this is
    `central_difference` with the distribution `rademacher`.

    Args:
      num_directions: K, the number of directions per estimate: 2K evaluations.
      smoothing: μ, by how much each parameter is moved, with the default of
        `forward_difference`.

    Returns:
      The estimator; it has no state.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `num_directions` or `smoothing` is not positive.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> value_and_grad = zo.value_and_grad(lambda x: jnp.sum(x), zo.spsa())
      >>> _, gradient = value_and_grad(jax.random.key(0), jnp.ones(3))
      >>> [abs(round(float(g))) in (1, 3) for g in gradient]
      [True, True, True]

    References:
      Spall, Multivariate Stochastic Approximation Using a Simultaneous Perturbation
      Gradient Approximation, 1992, eq. (2.2), <https://doi.org/10.1109/9.119632>.
    """
    return central_difference(rademacher(), num_directions, smoothing)


def check_distribution(distribution: object) -> None:
    """Raises unless `distribution` is one, with hashable fields."""
    if not isinstance(distribution, Distribution):
        raise TypeError(
            "distribution must be a Distribution such as sphere(); got "
            f"{shown.given(distribution)}."
        )
    check_fields(distribution)


def checked_smoothing(smoothing: object) -> float:
    """Checks the smoothing of an estimator, and returns it."""
    found = checks.check_positive("smoothing", smoothing)
    checks.warn_of_size("smoothing", found, least=1e-20)
    return found


class Finite(NamedTuple):
    """Values of which those that failed are left out.

    Attributes:
      values: The values, 0 if they are not finite.
      known: Whether they are finite: bool, of the same shape.
      count: The number of finite values: int32, shape ().
    """

    values: jax.Array
    known: jax.Array
    # The name of a method of tuple.
    count: jax.Array  # type: ignore[assignment]

    @classmethod
    def of(cls, values: jax.Array) -> "Finite":
        known = jnp.isfinite(values)
        count = jnp.sum(known, dtype=jnp.int32)
        return cls(jnp.where(known, values, 0), known, count)


def mean_of_finite(values: jax.Array) -> jax.Array:
    """Returns the mean of the values that are finite; NaN without any."""
    return jnp.mean(values, where=jnp.isfinite(values))


class Differences(NamedTuple):
    """Differences along directions, from values of which some may have failed.

    Attributes:
      value: The value at θ, or what replaces it: shape ().
      each: The differences, [K], not finite if there is none.
      gain: A factor of all differences in the gradient: shape ().
      num_base: The number of values at θ that were used: 0 or 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from radazo_jax.estimators import Differences, Values
      >>> values = Values(jnp.array(1.0), jnp.array([[3.0], [jnp.nan]]))
      >>> Differences.of(values).each.tolist()
      [2.0, nan]
    """

    value: jax.Array
    each: jax.Array
    gain: jax.typing.ArrayLike = 1.0
    num_base: jax.typing.ArrayLike = 0

    @classmethod
    def of(cls, values: Values) -> "Differences":
        """Subtracts the value at θ from values, or their mean if it failed.

        The mean needs two values; with fewer, there are no differences. A value is part
        of the mean, which makes its difference smaller. The gain n/(n−1) for n values
        makes it the difference to the mean of the other values.

        Args:
          values: f(θ), and the values along the directions, of which the first column
            is used: [K, m].
        """
        base, moved = values.base, values.along[:, 0]
        known = jnp.isfinite(base)
        count = jnp.sum(jnp.isfinite(moved), dtype=jnp.int32).astype(moved.dtype)
        value = jnp.where(known | (count < 2), base, mean_of_finite(moved))
        gain = jnp.where(known, 1, count / (count - 1))
        return cls(value, moved - value, gain, known.astype(jnp.int32))

    @property
    def to_others(self) -> jax.Array:
        """The differences to values of other points alone: [K]."""
        return self.each * jnp.asarray(self.gain, self.each.dtype)

    def estimate(self, distance: jax.typing.ArrayLike, points: Points) -> Estimate:
        """Returns c/K Σₖ (gain · differenceₖ / distance) uₖ over K finite differences.

        Along it the slope is gain · c/K Σₖ (differenceₖ / distance)². Without any,
        gradient and slope are NaN.

        Args:
          distance: The distance of the points whose values differ.
          points: The points.
        """
        found = Finite.of(self.each)
        slopes = found.values / distance
        factor = jnp.asarray(points.factor, slopes.dtype)
        weight = factor / found.count.astype(slopes.dtype)
        weight = weight * jnp.asarray(self.gain, slopes.dtype)
        used = found.count * points.scales.shape[1] + self.num_base
        return Estimate(
            self.value,
            slope=weight * jnp.sum(slopes**2),
            num_values=jnp.where(found.count > 0, used, 0),
            gradient=points.combine(slopes * weight),
        )
