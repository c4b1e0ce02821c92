"""Perturbations with a momentum: ZO-AdaMU."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax import checks, distributions, estimators
from radazo_jax._src.contrib import _memory


class MomentumPerturbationState(NamedTuple):
    """State of `momentum_perturbation`.

    Attributes:
      history: h, the latest perturbation, in the direction in which the loss rose: a
        tree like the parameters, at least float32; zero before the first.
    """

    history: Any


@dataclasses.dataclass(frozen=True, repr=False)
class MomentumPerturbation(estimators.AlongDirections):
    """See `momentum_perturbation`."""

    _constructor = "momentum_perturbation"

    num_directions: int = dataclasses.field(default=1, init=False)
    b1: float
    uncertainty: float

    @property
    def _variance(self) -> float:
        """The variance of both draws together."""
        around_zero = self.b1**2 * self.uncertainty
        return around_zero + (1 - self.b1) ** 2 * (1 - self.uncertainty)

    def _deviation(self, dimension: int) -> float:
        """Returns the standard deviation of the factor of the elements of u."""
        return math.sqrt(self._variance * self.distribution.factor(dimension))

    def init(self, params: optax.Params) -> MomentumPerturbationState:
        return MomentumPerturbationState(_memory.wide_zeros(params))

    def points(
        self,
        draw: estimators.Draw,
        params: optax.Params,
        state: MomentumPerturbationState,
    ) -> tuple[estimators.Points, MomentumPerturbationState]:
        far = self.smoothing * self._deviation(optax.tree.size(params))
        points = estimators.sample_points(
            self.distribution, draw, 1, [far, -far], params
        )
        shift = (1 - self.b1) * self.smoothing
        shifts = jnp.array([[shift, -shift]], jnp.float32)
        return points.with_shift(state.history, shifts), state

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: MomentumPerturbationState,
    ) -> tuple[estimators.Estimate, MomentumPerturbationState]:
        coefficient = jnp.full(1, self._deviation(points.layout.dimension), jnp.float32)
        new = points.combine(coefficient).materialize(state.history)
        m = jax.tree.map(lambda u, h: u + (1 - self.b1) * h, new, state.history)
        estimate = _memory.along_tree(points, values, self.smoothing, m)
        above, below = values.along[0]
        history = jax.tree.map(lambda m: jnp.where(above < below, -m, m), m)
        after = MomentumPerturbationState(history)
        return estimate, _memory.updated_if_usable(estimate, state, after)


@checks.checks_names
def momentum_perturbation(
    distribution: distributions.Distribution = distributions.gaussian(),
    smoothing: float = 1e-3,
    b1: float = 0.5,
    uncertainty: float = 0.5,
) -> estimators.GradientEstimator:
    """The perturbation of ZO-AdaMU: with a momentum, of 2 evaluations.

        ż ~ N(0, α),  z̈ ~ N(h, 1 − α),  m = β₁ ż + (1 − β₁) z̈
        ∇̂f(θ) = (f(θ + μ m) − f(θ − μ m)) / 2μ · m
        h ← m if f(θ + μ m) ≥ f(θ − μ m), else −m

    with variances α and 1 − α. The sum of both draws is drawn as one, of the variance
    β₁² α + (1 − β₁)² (1 − α), which has the same distribution. The estimate is large
    along past perturbations. It has the scale of m mᵀ, so that SGD needs another
    learning rate than with `spsa`.

    Two parts of the paper are left to Optax: the division by a second moment, here of
    the gradients by `radazo` or `zo_adamm` (there of ż² and z̈²), and the annealing of
    α and β.

    Args:
      distribution: The distribution of the draws, whose elements are scaled to variance
        one.
      smoothing: μ, how far from θ along m the function is evaluated.
      b1: β₁, the weight of the new draw, in (0, 1].
      uncertainty: α, the share of the variance that is around zero, in [0, 1).

    Returns:
      The estimator, with a `MomentumPerturbationState`. Its value is the mean of both
      evaluations.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `smoothing` is not positive, or `b1` or `uncertainty` is out of its
        range.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> result = zo.train(
      ...     lambda x: jnp.sum((x - 1) ** 2),
      ...     jnp.zeros(3),
      ...     zo.radazo(1e-2),
      ...     zo.contrib.momentum_perturbation(),
      ...     num_steps=1000,
      ...     key=0,
      ...     progress=False,
      ... )
      >>> bool(jnp.allclose(result.params, 1, atol=0.2))
      True

    References:
      Jiang et al., ZO-AdaMU Optimizer: Adapting Perturbation by the Momentum and
      Uncertainty in Zeroth-Order Optimization, AAAI 2024, algorithm 1,
      <https://arxiv.org/abs/2312.15184>.
    """
    b1 = checks.check_positive("b1", b1)
    if b1 > 1:
        raise ValueError(f"b1 must be a number in (0, 1]; got {b1!r}.")
    uncertainty = checks.check_unit_interval("uncertainty", uncertainty)
    estimator = MomentumPerturbation(distribution, smoothing, b1, uncertainty)
    if not estimator._variance:
        raise ValueError(
            f"uncertainty must be positive where b1 is 1; got {uncertainty!r}, which "
            "perturbs nothing."
        )
    return estimator
