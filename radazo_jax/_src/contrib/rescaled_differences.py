"""Forward differences, of which signs are counted or lengths are normalized."""

import jax
import jax.numpy as jnp
import optax

from radazo_jax import checks, distributions, estimators


class MajorityVote(estimators.AlongDirections):
    """See `majority_vote`."""

    _constructor = "majority_vote"
    includes_params = True

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: tuple[()],
    ) -> tuple[estimators.Estimate, tuple[()]]:
        found = estimators.Differences.of(values)
        slopes = found.to_others / self.smoothing
        finite = jnp.isfinite(slopes)
        slopes = jnp.where(finite, slopes, 0)
        count = jnp.sum(finite, dtype=jnp.int32)
        # Without a vote, NaN.
        weight = 1 / count.astype(slopes.dtype)
        weight = jnp.where(count > 0, weight, jnp.nan)
        votes = _votes(weight * jnp.sign(slopes), points)
        gradient = points.of_flat(votes, params)
        dots = points.inner_products(gradient.materialize(params))
        dots = dots.astype(slopes.dtype)
        factor = jnp.asarray(points.factor, slopes.dtype)
        estimate = estimators.Estimate(
            found.value,
            slope=factor * weight * jnp.sum(slopes * dots),
            num_values=jnp.where(count > 0, count + found.num_base, 0),
            gradient=gradient,
        )
        return estimate, state


@checks.checks_names
def majority_vote(
    distribution: distributions.Distribution = distributions.gaussian(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
) -> estimators.GradientEstimator:
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
      The estimator; it has no state. The elements of its gradient lie in [-1, 1]. Its
      value is f(θ), and its slope an estimate. Differences that are not finite have no
      vote. If f(θ) is not finite, the mean of the other values replaces it, as in
      `forward_difference`.

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
    return MajorityVote(distribution, num_directions, smoothing)


def _votes(weights: jax.Array, points: estimators.Points) -> jax.Array:
    """Computes Σₖ weightsₖ sign(uₖ), [d]; one direction is alive at a time."""

    def add(k: jax.Array, total: jax.Array) -> jax.Array:
        signs = [jnp.sign(u).reshape(-1) for u in jax.tree.leaves(points.direction(k))]
        return total + weights[k].astype(jnp.float32) * jnp.concatenate(signs)

    zeros = jnp.zeros(points.layout.dimension, jnp.float32)
    return jax.lax.fori_loop(0, len(weights), add, zeros)


class NormalizedBatch(estimators.AlongDirections):
    """See `normalized_batch`."""

    _constructor = "normalized_batch"
    includes_params = True

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: tuple[()],
    ) -> tuple[estimators.Estimate, tuple[()]]:
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
