"""Estimators that are guided by a prior."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax import checks, distributions, estimators
from radazo_jax._src.contrib import _memory
from radazo_jax._src.contrib.linear_interpolation import shortest_interpolant


class PriorGuidedState(NamedTuple):
    """State of `prior_guided`.

    Attributes:
      prior: The average of the past gradients, zero before the first: a tree like the
        parameters, at least float32; `()` if the prior is a function.
    """

    prior: Any


@dataclasses.dataclass(frozen=True, repr=False)
class PriorGuided(estimators.AlongDirections):
    """See `prior_guided`."""

    _constructor = "prior_guided"

    prior: Callable[[optax.Params], optax.Updates] | None
    decay: float

    def init(self, params: optax.Params) -> PriorGuidedState:
        zeros = _memory.wide_zeros(params)
        return PriorGuidedState(zeros if self.prior is None else ())

    def points(
        self, draw: estimators.Draw, params: optax.Params, state: PriorGuidedState
    ) -> tuple[estimators.Points, PriorGuidedState]:
        given = state.prior
        if self.prior is not None:
            given = _checked_prior(self.prior(params), params)
        unit = jax.tree.map(_memory.as_wide, given)
        # By its largest element first, whose square could overflow, or be 0.
        unit = _divided(unit, optax.tree.norm(unit, ord=jnp.inf))
        unit = jax.tree.map(lambda w: w.astype(jnp.float32), unit)
        unit = _divided(unit, optax.tree.norm(unit))
        size = self.num_directions
        last = jnp.arange(size + 1) == size
        scales = jnp.where(last, 0.0, self.smoothing).astype(jnp.float32)
        shifts = jnp.where(last, self.smoothing, 0.0).astype(jnp.float32)
        points = estimators.sample_points(
            self.distribution, draw, size, [1.0], params, includes_params=True
        )
        points = points.select(np.array([*range(size), 0]))
        return points.with_shift(unit, shifts[:, None], scales[:, None]), state

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: PriorGuidedState,
    ) -> tuple[estimators.Estimate, PriorGuidedState]:
        size = self.num_directions
        base, moved = values
        found = estimators.Differences.of(estimators.Values(base, moved[:size]))
        changes = jnp.append(found.to_others, moved[size, 0] - found.value)
        slopes = changes / self.smoothing
        along, unit = points.select(slice(size)), points.shift
        stacked = jax.tree.map(lambda w: w[None], unit)
        among = estimators.gram([along.directions], points.layout, [stacked]).astype(
            slopes.dtype
        )
        finite = jnp.isfinite(slopes)
        used = finite & (jnp.diagonal(among) > 0)
        slopes = jnp.where(used, slopes, 0)
        coefficients = shortest_interpolant(among, slopes, used)
        count = jnp.sum(finite, dtype=jnp.int32)
        coefficients = jnp.where(count > 0, coefficients, jnp.nan)
        gradient = along.combine(coefficients[:size]).plus(coefficients[size], unit)
        estimate = estimators.Estimate(
            found.value,
            slope=jnp.sum(coefficients * slopes),
            num_values=jnp.where(count > 0, count + found.num_base, 0),
            gradient=gradient,
        )
        if self.prior is not None:
            return estimate, state
        # The average needs the gradient as a tree, so that it is built here.
        tree = gradient.materialize(state.prior)
        averaged = PriorGuidedState(
            jax.tree.map(
                lambda old, new: self.decay * old + (1 - self.decay) * new,
                state.prior,
                tree,
            )
        )
        estimate = estimate._replace(gradient=points.of_tree(tree))
        return estimate, _memory.updated_if_usable(estimate, state, averaged)


@checks.checks_names
def prior_guided(
    distribution: distributions.Distribution = distributions.sphere(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
    prior: Callable[[optax.Params], optax.Updates] | None = None,
    decay: float = 0.0,
) -> estimators.GradientEstimator:
    """Prior-guided random gradient-free estimation (PRGF), of K + 2 evaluations.

    A direction p that is expected to be near the gradient is evaluated together with K
    random ones. The estimate is the projection of the gradient on their span,

        ∇̂f(θ) = Σₖ cₖ uₖ + c_p p,  G c = s

    with s the differences (f(θ + μ u) − f(θ)) / μ along u₁ … u_K and p, and G the inner
    products of these directions. If α is the cosine of p and ∇f,
    E cos²(∇̂f, ∇f) = α² + K/(d−1) · (1 − α²) for the distributions `sphere` and
    `gaussian`.

    The length of the projection is about √(α² + K/d) of the gradient's. It is not an
    unbiased estimate, and SGD takes longer steps along it than along a
    `forward_difference`.

    Args:
      distribution: The distribution of the directions u.
      num_directions: K, the number of random directions per estimate.
      smoothing: μ, how far from θ along uₖ and p (which has norm 1) the function is
        evaluated.
      prior: `prior(params)` returns a tree like `params`, such as the gradient of a
        surrogate model. By default it is the average of the past estimates: the history
        variant.
      decay: Decay rate of this average, in [0, 1); 0 takes the last estimate alone.

    Returns:
      The estimator, with a `PriorGuidedState`. Its value is f(θ). Differences that are
      not finite are left out. If f(θ) is not finite, the mean of the values along the
      random directions replaces it, as in `forward_difference`.

    Raises:
      TypeError, ValueError: If an argument has the wrong type or is out of range; when
        the estimator is called, if `prior` returns another tree than `params`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> def loss(x):
      ...     return jnp.sum(x**2)
      >>> estimator = zo.contrib.prior_guided(num_directions=1, prior=lambda x: 3 * x)
      >>> x = jnp.arange(4.0)
      >>> (_, gradient), _ = zo.estimators.estimate(
      ...     estimator, loss, 0, x, estimator.init(x)
      ... )
      >>> bool(jnp.allclose(gradient, 2 * x, atol=0.05))
      True

    References:
      Cheng, Wu and Zhu, On the Convergence of Prior-Guided Zeroth-Order Optimization
      Algorithms, NeurIPS 2021, PRGF and History-PRGF,
      <https://arxiv.org/abs/2107.10110>.
    """
    decay = checks.check_unit_interval("decay", decay)
    if prior is not None:
        checks.check_fun(prior, "prior")
    return PriorGuided(distribution, num_directions, smoothing, prior, decay)


def _divided(tree: optax.Params, norm: jax.Array) -> optax.Params:
    """Divides the tree by its norm; zeros stay."""
    inverse = jnp.where(norm > 0, 1 / norm, 0)
    return jax.tree.map(lambda w: inverse * w, tree)


def _checked_prior(given: optax.Params, params: optax.Params) -> optax.Params:
    """Returns the prior; raises unless it is a tree like `params`."""

    def shapes(tree: optax.Params) -> optax.Params:
        return jax.tree.map(jnp.shape, tree)

    if shapes(given) != shapes(params):
        raise ValueError(
            f"prior must return a tree like params, {shapes(params)}; got "
            f"{shapes(given)}."
        )
    return given
