"""The signs of the gradients along single directions, by majority."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from radazo_jax._src.base import Estimate, GradientEstimator, Points, Values
from radazo_jax._src.contrib._products import inner
from radazo_jax._src.directions.combination import LinearCombination
from radazo_jax._src.directions.dense import gaussian
from radazo_jax._src.directions.distribution import Direction, Distribution, elements
from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.estimators.differences import (
    AlongDirections,
    checked_differences,
    differences,
)
from radazo_jax._src.xla import on_any_mesh, specs_of


class MajorityVote(AlongDirections):
    """See `majority_vote`."""

    _constructor = "majority_vote"
    _includes_params = True

    def reduce(
        self, points: Points, values: Values, params: optax.Params, state: Any
    ) -> tuple[Estimate, Any]:
        found = differences(values)
        slopes = found.to_others / self.smoothing
        finite = jnp.isfinite(slopes)
        slopes = jnp.where(finite, slopes, 0)
        count = jnp.sum(finite, dtype=jnp.int32)
        # Without a vote, NaN.
        weight = 1 / count.astype(slopes.dtype)
        weight = jnp.where(count > 0, weight, jnp.nan)
        gradient = _votes(
            weight * jnp.sign(slopes), points.directions, points.layout, params
        )
        dots = inner(points.directions, points.layout, gradient).astype(slopes.dtype)
        factor = jnp.asarray(points.factor, slopes.dtype)
        estimate = Estimate(
            found.value,
            slope=factor * weight * jnp.sum(slopes * dots),
            num_values=jnp.where(count > 0, count + found.num_base, 0),
            gradient=LinearCombination.of_tree(gradient, points.layout),
        )
        return estimate, state


def majority_vote(
    distribution: Distribution = gaussian(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
) -> GradientEstimator:
    """The mean sign of K gradients along single directions, of K + 1 evaluations.

        ∇̂f(θ)ᵢ = 1/K Σₖ sign((f(θ + μ uₖ) − f(θ)) u_kᵢ)

    Its sign is the vote of the majority. With `zo_signsgd` it is ZO-M-signSGD with one
    difference per worker. An outlier has one vote, as any other value. If the
    derivatives along the coordinates differ in size, the vote is not the sign of the
    gradient, even in expectation.

    Args:
      distribution: The distribution of the directions u.
      num_directions: K, the number of directions per estimate.
      smoothing: μ, how far from θ along u the function is evaluated.

    Returns:
      The estimator; it has no state, unless the distribution is `sequential`. Its
      elements lie in [-1, 1]. Its value is f(θ), and its slope an estimate. Differences
      that are not finite have no vote. If f(θ) is not finite, the mean of the other
      values replaces it, as in `forward_difference`.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `num_directions` or `smoothing` is not positive.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator = zo.contrib.majority_vote(num_directions=200)
      >>> _, gradient = zo.value_and_grad(lambda x: jnp.sum(x**2), estimator)(
      ...     jax.random.key(0), jnp.array([1.0, -2.0])
      ... )
      >>> jnp.sign(gradient).tolist()
      [1.0, -1.0]

    References:
      Liu et al., signSGD via Zeroth-Order Oracle, ICLR 2019, ZO-M-signSGD,
      <https://openreview.net/forum?id=BJe-DsC5Fm>.
    """
    return MajorityVote(*checked_differences(distribution, num_directions, smoothing))


def _votes(
    weights: jax.Array, directions: Direction, layout: Layout, params: optax.Params
) -> Any:
    """Σₖ weightsₖ sign(uₖ), element by element, a tree like `params`.

    One direction is alive at a time.

    Args:
      weights: Real, [K].
      directions: Directions, stacked.
      layout: The layout of `params`.
      params: The parameters.
    """

    def program(weights: jax.Array, directions: Direction, params: optax.Params) -> Any:
        weights = weights.astype(jnp.float32)

        def add(k: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
            us = elements(jax.tree.map(lambda x: x[k], directions), layout)
            return jax.tree.map(lambda t, u: t + weights[k] * jnp.sign(u), totals, us)

        zeros = [jnp.zeros(leaf.shape, jnp.float32) for leaf in layout.leaves]
        totals = lax.fori_loop(0, len(weights), add, zeros)
        tree = jax.tree.unflatten(layout.treedef, totals)
        return jax.tree.map(lambda v, p: v.astype(jnp.result_type(p)), tree, params)

    return on_any_mesh(program, specs_of(params))(weights, directions, params)
