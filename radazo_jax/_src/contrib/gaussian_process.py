"""The gradient of a surrogate of the function: ZoRD."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax import checks, distributions, estimators
from radazo_jax._src.contrib import _memory

# Beyond these the queries take too much memory, and the equation too much time.
MAX_DIMENSION = 10_000
MAX_MEMORY = 512

# The first noise that is tried if the matrix is not positive definite. It suffices
# unless far queries cost the distances of the near ones their digits.
_MORE_JITTER = 1e-2

_EXACT = jax.lax.Precision.HIGHEST


def _square_root(squares: jax.Array) -> jax.Array:
    """Returns √x, with derivative 0 at 0: distances vanish on the diagonal and at θ."""
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)


def _matern(
    squares: jax.Array, away: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the kernel of all pairs of queries, and its derivatives at θ."""
    r = _square_root(5 * squares) / scale
    from_theta = _square_root(5 * jnp.sum(away**2, axis=1)) / scale
    along = 5 / (3 * scale**2) * (1 + from_theta) * jnp.exp(-from_theta)
    return (1 + r + r**2 / 3) * jnp.exp(-r), along[:, None] * away


class GaussianProcessState(NamedTuple):
    """State of `gaussian_process`.

    Attributes:
      points: The latest n queries, the oldest first: float32, [n, d].
      values: Their values: float32, or float64 for float64 parameters, [n]. The
        largest number if there was no query yet.
    """

    points: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class GaussianProcess(estimators.AlongDirections):
    """See `gaussian_process`."""

    _constructor = "gaussian_process"
    includes_params = True

    memory_size: int
    lengthscale: float | None
    jitter: float

    def init(self, params: optax.Params) -> GaussianProcessState:
        dimension = optax.tree.size(params)
        if dimension > MAX_DIMENSION:
            raise ValueError(
                f"params must have at most {MAX_DIMENSION} coordinates for a "
                f"surrogate; got {dimension}."
            )
        return GaussianProcessState(
            jnp.zeros((self.memory_size, dimension), jnp.float32),
            _memory.none((self.memory_size,), params),
        )

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: GaussianProcessState,
    ) -> tuple[estimators.Estimate, GaussianProcessState]:
        asked = estimators.candidate_rows(points, params)  # θ is the first.
        xs = _memory.followed_by(state.points, asked)
        added = points.join(values)
        stored = _memory.followed_by(state.values, added.astype(state.values.dtype))
        ys = _memory.known(stored)
        used = jnp.isfinite(ys)
        away = jnp.where(used[:, None], xs - asked[:1], 0)
        centered = jnp.where(used, ys - _memory.finite_mean(ys), 0)
        # In units of a power of two, by which nothing is rounded.
        unit = jnp.ldexp(jnp.ones_like(ys[0]), jnp.frexp(jnp.max(abs(centered)))[1])
        centered = (centered / unit).astype(jnp.float32)
        squares = _squared_distances(away)
        scale = jnp.asarray(self.lengthscale or 0, jnp.float32)
        if self.lengthscale is None:
            scale = 2 * _mean_distance(squares, used)
        rows, slopes = _matern(squares, away, scale)
        weights = _solved(rows, centered, used, self.jitter)
        gradient = jnp.matmul(slopes.T, weights, precision=_EXACT)
        gradient = gradient.astype(unit.dtype) * unit
        new = jnp.sum(jnp.isfinite(added), dtype=jnp.int32)
        gradient = jnp.where(new > 0, gradient, jnp.nan)
        estimate = estimators.Estimate(
            jnp.where(
                jnp.isfinite(values.base), values.base, _memory.finite_mean(added)
            ),
            slope=jnp.sum(gradient**2).astype(added.dtype),
            num_values=new,
            gradient=points.of_flat(gradient, params),
        )
        after = GaussianProcessState(xs, stored)
        return estimate, _memory.updated_if_usable(estimate, state, after)


@checks.checks_names
def gaussian_process(
    distribution: distributions.Distribution = distributions.sphere(),
    num_directions: int = 4,
    smoothing: float = 5e-2,
    memory_size: int = 150,
    lengthscale: float | None = None,
    jitter: float = 1e-5,
) -> estimators.GradientEstimator:
    """ZoRD: the derivative of a Gaussian process, of K + 1 evaluations.

    With X the latest n queries and y their values, less their mean, the posterior mean
    of the derivative at θ is

        ∇̂f(θ) = ∂k(θ, X) (k(X, X) + σ² I)⁻¹ y

    with k the Matérn kernel of smoothness 5/2. Far from all queries, the derivative and
    the estimate vanish. The process has the scale of y, so σ² is a share of it. The
    K queries around θ add the information that the trajectory lacks.

    The lengthscale is not fitted. The paper takes several steps on the surrogate if
    its uncertainty is small; here each step has a query.

    Args:
      distribution: The distribution of the directions u of the K queries around θ.
      num_directions: K, the number of queries around θ per estimate.
      smoothing: μ, how far from θ along u they lie.
      memory_size: n, how many queries are kept: from K + 1 to 512.
      lengthscale: ℓ, in units of the parameters. By default, twice the mean distance of
        the queries that are kept.
      jitter: σ², the variance of the noise as a share of the function's: a positive
        number. The rounding of n queries, 10⁻⁷ n, is added.

    Returns:
      The estimator, with a `GaussianProcessState` of n (d + 1) floats. Its value is
      f(θ), and its slope the surrogate's. Values that are not finite are left out.

    Raises:
      TypeError, ValueError: If an argument has the wrong type or is out of range;
        from `init`, if there are more than 10,000 coordinates.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> result = zo.train(
      ...     lambda x: jnp.sum((x - 1) ** 2),
      ...     jnp.zeros(3),
      ...     zo.radazo(1e-2),
      ...     zo.contrib.gaussian_process(num_directions=1, memory_size=20),
      ...     num_steps=300,
      ...     key=0,
      ...     progress=False,
      ... )
      >>> bool(jnp.allclose(result.params, 1, atol=0.1))
      True

    References:
      Shu et al., Zeroth-Order Optimization with Trajectory-Informed Derivative
      Estimation, ICLR 2023, the derived Gaussian process,
      <https://openreview.net/forum?id=n1bLgxHW6jW>.
    """
    memory_size = checks.check_int_at_least(
        "memory_size", memory_size, num_directions + 1
    )
    if memory_size > MAX_MEMORY:
        raise ValueError(
            f"memory_size must be an int ≤ {MAX_MEMORY}; got {memory_size}."
        )
    if lengthscale is not None:
        lengthscale = checks.check_positive("lengthscale", lengthscale)
    jitter = checks.check_positive("jitter", jitter)
    return GaussianProcess(
        distribution, num_directions, smoothing, memory_size, lengthscale, jitter
    )


def _squared_distances(away: jax.Array) -> jax.Array:
    products = jnp.matmul(away, away.T, precision=_EXACT)
    squares = jnp.diagonal(products)
    return jnp.maximum(squares[:, None] + squares[None] - 2 * products, 0)


def _mean_distance(squares: jax.Array, used: jax.Array) -> jax.Array:
    """Returns the mean distance of the used pairs; 1 without any."""
    pairs = used[:, None] & used[None] & ~jnp.eye(len(used), dtype=bool)
    total = jnp.sum(jnp.where(pairs, _square_root(squares), 0))
    mean = total / jnp.maximum(jnp.sum(pairs), 1).astype(total.dtype)
    return jnp.where(mean > 0, mean, 1)


def _solved(
    rows: jax.Array, centered: jax.Array, used: jax.Array, jitter: float
) -> jax.Array:
    """Computes (k(X, X) + σ² I)⁻¹ y of queries that are used; zero for the others."""
    both = used[:, None] & used[None]
    identity = jnp.eye(len(used), dtype=rows.dtype)
    matrix = jnp.where(both, rows, identity)

    def solution(noise: jax.typing.ArrayLike) -> jax.Array:
        factor = jax.scipy.linalg.cho_factor(matrix + noise * identity)
        return jax.scipy.linalg.cho_solve(factor, centered)

    weights = solution(jitter + len(used) * float(jnp.finfo(rows.dtype).eps))
    # Queries can lie so close that rounding makes an eigenvalue negative. More noise
    # makes the matrix positive definite: an eigenvalue is at least minus their number.
    for noise in (_MORE_JITTER, len(used)):
        weights = jax.lax.cond(
            jnp.all(jnp.isfinite(weights)),
            lambda weights: weights,
            lambda weights, noise=noise: solution(noise),
            weights,
        )
    return jnp.where(used, weights, 0)
