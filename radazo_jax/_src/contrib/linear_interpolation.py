"""Gradients that interpolate differences linearly."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax import checks, distributions, estimators
from radazo_jax._src.contrib import _memory
from radazo_jax._src.contrib._memory import QueryBuffer

# Added to the inner products of directions of length one: those that are nearly
# combinations of others would amplify rounding.
_RIDGE = 1e-4

# How far from θ past points must lie, in units of the distance of the new ones: of
# those much closer, differences of points and of values are mostly rounding.
_NEAREST = 0.1


def shortest_interpolant(
    among: jax.Array, slopes: jax.Array, used: jax.Array
) -> jax.Array:
    """Returns the c of the shortest g = Σₖ cₖ aₖ with ⟨g, aₖ⟩ = slopesₖ.

    If the slopes belong to a linear function, g is the projection of its gradient
    on the span of the aₖ, up to a ridge of 10⁻⁴.

    Args:
      among: The inner products ⟨aᵢ, aⱼ⟩, [K, K].
      slopes: The differences along aₖ, [K].
      used: Whether a slope is known: bool, [K]. The other c are zero.
    """
    squares = jnp.diagonal(among)
    used = used & (squares > 0)
    inverse = jnp.where(used, jax.lax.rsqrt(jnp.where(used, squares, 1)), 0)
    identity = jnp.eye(len(used), dtype=among.dtype)
    unused = jnp.where(used, 0, 1)[:, None].astype(among.dtype) * identity
    scaled = inverse[:, None] * inverse[None] * among + unused
    factor = jax.scipy.linalg.cho_factor(scaled + _RIDGE * identity)
    return inverse * jax.scipy.linalg.cho_solve(factor, inverse * slopes)


class LinearInterpolationState(NamedTuple):
    """State of `linear_interpolation`.

    Attributes:
      buffer: The directions of the past H − 1 steps, K each, the oldest first.
      past: The parameters of these steps, stacked: a tree like them, [H − 1, …].
      values: The values at θ and at θ + μ uₖ of these steps: float32, or float64 for
        float64 parameters, [H − 1, K + 1]. The largest number if there was no step yet.
    """

    buffer: QueryBuffer
    past: Any
    values: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class LinearInterpolation(estimators.AlongDirections):
    """See `linear_interpolation`."""

    _constructor = "linear_interpolation"
    includes_params = True

    memory_size: int
    radius: float

    @property
    def _sizes(self) -> tuple[int, int]:
        """The numbers of new directions, and of past steps."""
        return self.num_directions, self.memory_size - 1

    def init(self, params: optax.Params) -> LinearInterpolationState:
        size, before = self._sizes
        return LinearInterpolationState(
            _memory.empty(before * size),
            jax.tree.map(lambda p: jnp.stack([jnp.zeros_like(p)] * before), params),
            _memory.none((before, size + 1), params),
        )

    def reduce(
        self,
        points: estimators.Points,
        values: estimators.Values,
        params: optax.Params,
        state: LinearInterpolationState,
    ) -> tuple[estimators.Estimate, LinearInterpolationState]:
        size, before = self._sizes
        rows = _rows_of_points(size, before, self.smoothing)
        base, moved = values
        past = state.buffer.directions(self.distribution)
        away = jax.tree.map(
            lambda old, p: _memory.as_wide(old) - _memory.as_wide(p)[None],
            state.past,
            params,
        )
        among = estimators.gram([points.directions, past], points.layout, [away])
        matrix = jnp.asarray(rows, base.dtype)
        exact = jax.lax.Precision.HIGHEST
        among = jnp.linalg.multi_dot(
            [matrix, among.astype(base.dtype), matrix.T], precision=exact
        )
        olds = _memory.known(state.values).astype(base.dtype)
        found = estimators.Differences.of(values)
        earlier = jnp.concatenate([olds[:, 1:].reshape(-1), olds[:, 0]])
        changes = jnp.concatenate([found.to_others, earlier - found.value])
        squares = jnp.diagonal(among)
        closest = _NEAREST**2 * jnp.max(squares[:size])
        near = (squares >= closest) & (squares <= self.radius**2)
        used = jnp.isfinite(changes) & (near | (jnp.arange(len(rows)) < size))
        changes = jnp.where(used, changes, 0)
        coefficients = shortest_interpolant(among, changes, used)
        new = jnp.sum(used[:size], dtype=jnp.int32)
        coefficients = jnp.where(new > 0, coefficients, jnp.nan)
        each = jnp.matmul(matrix.T, coefficients, precision=exact)
        fresh, again, of_past = jnp.split(each, [size, size + before * size])
        like = jax.tree.map(lambda w: w[0], away)
        gradient = jax.tree.map(
            lambda a, b, w: a + b + jnp.tensordot(of_past.astype(w.dtype), w, 1),
            points.combine(fresh).materialize(like),
            estimators.LinearCombination(again, past, points.layout).materialize(like),
            away,
        )
        estimate = estimators.Estimate(
            found.value,
            slope=jnp.sum(coefficients * changes),
            num_values=jnp.where(new > 0, new + found.num_base, 0),
            gradient=points.of_tree(gradient),
        )
        added = jnp.append(base, moved[:, 0]).astype(state.values.dtype)
        queries = LinearInterpolationState(
            state.buffer.followed_by(points),
            jax.tree.map(
                lambda old, p: _memory.followed_by(old, p[None]), state.past, params
            ),
            _memory.followed_by(state.values, added[None]),
        )
        return estimate, _memory.updated_if_usable(estimate, state, queries)


@checks.checks_names
def linear_interpolation(
    distribution: distributions.Distribution = distributions.sphere(),
    num_directions: int = 10,
    smoothing: float = 5e-3,
    memory_size: int = 3,
    radius: float = 1e-2,
) -> estimators.GradientEstimator:
    """ReLIZO: the shortest gradient that interpolates new and past queries.

    With aᵢ = xᵢ − θ for the K new points and the past points within the radius, and
    δᵢ = f(xᵢ) − f(θ), it is the g with the largest first-order change of all g of
    its length in the span of the aᵢ, a quadratically constrained linear program with
    the solution

        g = Aᵀ c,  (A Aᵀ) c = δ

    the projection of the gradient on that span, up to a ridge of 10⁻⁴. A step takes
    K + 1 evaluations; past queries cost none. If the parameters move less than μ per
    step, many past points are near, and they add to what the new points measure. Like
    `prior_guided` it is shorter than the gradient, and not unbiased. Past values must
    belong to the same function: with minibatches, their level is noise.

    The inner products are computed from directions, which are drawn again, and from
    differences of parameters: the memory is H − 1 copies of the parameters, and 20
    bytes a query. The equation has n = H (K + 1) − 1 unknowns, and each step
    draws all n directions, leaf by leaf, so keep n below a few hundred.

    Args:
      distribution: The distribution of the directions u.
      num_directions: K, the number of new directions per estimate.
      smoothing: μ, how far from θ along u the function is evaluated.
      memory_size: H, of how many steps queries are used, this one included: at least 2.
      radius: The largest distance of past points from θ, in units of the parameters.
        Points closer than a tenth of the new points' distance are left out.

    Returns:
      The estimator, with a `LinearInterpolationState`. Its value is f(θ). Values that
      are not finite are left out. If f(θ) is not finite, the mean of the values along
      the new directions replaces it, as in `forward_difference`.

    Raises:
      TypeError, ValueError: If an argument has the wrong type or is out of range.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator = zo.contrib.linear_interpolation(num_directions=2)
      >>> x = jnp.arange(4.0)
      >>> state = estimator.init(x)
      >>> for key in range(2):
      ...     (_, gradient), state = zo.estimators.estimate(
      ...         estimator, lambda x: jnp.sum(x**2), key, x, state
      ...     )
      >>> bool(jnp.allclose(gradient, 2 * x, atol=0.3))
      True

    References:
      Wang et al., ReLIZO: Sample Reusable Linear Interpolation-based Zeroth-order
      Optimization, NeurIPS 2024, the solution of its quadratically constrained program.
    """
    memory_size = checks.check_int_at_least("memory_size", memory_size, 2)
    radius = checks.check_positive("radius", radius)
    return LinearInterpolation(
        distribution, num_directions, smoothing, memory_size, radius
    )


def _rows_of_points(size: int, before: int, smoothing: float) -> np.ndarray:
    """Returns the aᵢ as sums of new directions, past ones, and differences of θ.

    New points come first, followed by past points and past θ.
    """
    past = before * size
    new = smoothing * np.eye(size, size + past + before)
    thetas = np.eye(before, size + past + before, size + past)
    moved = smoothing * np.eye(past, size + past + before, size)
    return np.concatenate([new, moved + np.repeat(thetas, size, axis=0), thetas])
