"""Averages over past queries, around a baseline: ZoAR."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax import checks, distributions, estimators
from radazo_jax._src.contrib import _memory
from radazo_jax._src.contrib._memory import QueryBuffer


class QueryReuseState(NamedTuple):
    """State of `query_reuse`: 20 bytes per query.

    Attributes:
      buffer: The directions of the latest H steps, H K of them, the oldest first: their
        keys, numbers and scales, from which they are drawn again.
      values: The values at θ + μ u: float32, or float64 for float64 parameters,
        [H K]. The largest number if there was no query yet.
    """

    buffer: QueryBuffer
    values: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class QueryReuse(estimators.AlongDirections):
    """See `query_reuse`."""

    _constructor = "query_reuse"

    memory_size: int

    def init(self, params: optax.Params) -> QueryReuseState:
        size = self.num_directions * self.memory_size
        values = _memory.none((size,), params)
        return QueryReuseState(_memory.empty(size), values)

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: QueryReuseState,
    ) -> tuple[estimators.Estimate, QueryReuseState]:
        moved = values.along[:, 0]
        queries = state.buffer.followed_by(points)
        stored = _memory.followed_by(state.values, moved.astype(state.values.dtype))
        ys = _memory.known(stored).astype(moved.dtype)
        used = jnp.isfinite(ys)
        count = jnp.sum(used).astype(ys.dtype)
        slopes = jnp.where(used, ys - _memory.finite_mean(ys), 0) / self.smoothing
        weight = jnp.asarray(points.factor, ys.dtype) / jnp.maximum(count - 1, 1)
        new = jnp.sum(jnp.isfinite(moved), dtype=jnp.int32)
        weight = jnp.where(new > 0, weight, jnp.nan)
        directions = queries.directions(self.distribution)
        estimate = estimators.Estimate(
            _memory.finite_mean(moved),
            slope=weight * jnp.sum(slopes**2),
            num_values=new,
            gradient=estimators.LinearCombination(
                weight * slopes, directions, points.layout
            ),
        )
        after = QueryReuseState(queries, stored)
        return estimate, _memory.updated_if_usable(estimate, state, after)


@checks.checks_names
def query_reuse(
    distribution: distributions.Distribution = distributions.sphere(),
    num_directions: int = 10,
    smoothing: float = 5e-2,
    memory_size: int = 6,
) -> estimators.GradientEstimator:
    """ZoAR: averages over the queries of the latest steps, of K evaluations.

        ∇̂f(θ_t) = c/(n−1) Σᵢ (yᵢ − ȳ) / μ · uᵢ,  yᵢ = f(θ_τ + μ uᵢ),  ȳ = 1/n Σᵢ yᵢ

    over the n = H K queries of the latest H steps, with c the factor of the
    distribution. The baseline ȳ replaces f(θ), which is not evaluated; with the queries
    of one step alone, the estimate is unbiased. Queries of earlier steps lower the
    variance, but belong to the gradients of earlier θ, as in a first moment. While f
    falls, the level of the values falls too, which is noise: (yᵢ − ȳ) / μ needs short
    steps or a large μ.

    The buffer holds no direction: n directions are drawn again in every step.

    Args:
      distribution: The distribution of the directions u.
      num_directions: K, the number of directions, and of evaluations, per estimate.
      smoothing: μ, how far from θ along u the function is evaluated.
      memory_size: H, the number of steps whose queries are used, with the current one:
        at least 2.

    Returns:
      The estimator, with a `QueryReuseState`. Its value is the mean of the K values.
      Values that are not finite are left out.

    Raises:
      TypeError: If an argument is of another type.
      ValueError: If `num_directions` or `smoothing` is not positive, or `memory_size`
        is below 2.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> result = zo.train(
      ...     lambda x: jnp.sum((x - 1) ** 2),
      ...     jnp.zeros(3),
      ...     zo.radazo(1e-2),
      ...     zo.contrib.query_reuse(num_directions=4),
      ...     num_steps=500,
      ...     key=0,
      ...     progress=False,
      ... )
      >>> bool(jnp.allclose(result.params, 1, atol=0.2))
      True

    References:
      Qiu et al., Zeroth-Order Optimization is Secretly Single-Step Policy Optimization,
      2025, <https://arxiv.org/abs/2506.14460>. By n − 1, and not by n, because the
      baseline is of the same values.
    """
    memory_size = checks.check_int_at_least("memory_size", memory_size, 2)
    return QueryReuse(distribution, num_directions, smoothing, memory_size)
