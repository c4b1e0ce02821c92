"""An evolution strategy with covariance matrix adaptation (CMA-ES)."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src import checks, trees
from radazo_jax._src.base import (
    Draw,
    Estimate,
    GradientEstimator,
    Points,
    Values,
    sample_points,
)
from radazo_jax._src.directions import sums
from radazo_jax._src.directions.combination import LinearCombination
from radazo_jax._src.directions.dense import gaussian
from radazo_jax._src.directions.distribution import elements
from radazo_jax._src.directions.elements import DenseElements
from radazo_jax._src.directions.layout import Layout, layout_of, rows_of, unflattened
from radazo_jax._src.estimators.covariance import (
    MOST_FULL,
    CmaState,
    Population,
    colored,
    constants_of,
    is_exhausted,
    learned,
    product,
    whitened,
)
from radazo_jax._src.estimators.reflected import Box

# The first standard deviation: as a share of the parameters, but of a parameter of size
# 1 at least, and as a share of the distance of two bounds.
_OF_PARAMS, _OF_WIDTH = 0.3, 0.2


@dataclasses.dataclass(frozen=True, repr=False)
class Cma(GradientEstimator):
    """See `cma`."""

    _constructor = "cma"

    population_size: int | None = None
    step_size: float | None = None

    def _size(self, dimension: int) -> int:
        """λ, the size of the population."""
        if self.population_size is not None:
            return self.population_size
        return 4 + int(3 * math.log(dimension))

    def init(self, params: optax.Params) -> CmaState:
        dtype, d = trees.widest(params), trees.size(params)
        is_full = d <= MOST_FULL
        step_size = self._first_step_size(params, dtype)
        return CmaState(
            step_size,
            step_size,
            scale=jnp.ones(d, dtype),
            covariance=jnp.eye(d, dtype=dtype) if is_full else jnp.ones(d, dtype),
            basis=jnp.eye(d, dtype=dtype) if is_full else None,
            deviations=jnp.ones(d, dtype),
            step_path=jnp.zeros(d, dtype),
            covariance_path=jnp.zeros(d, dtype),
            normals=jnp.zeros((self._size(d), d), dtype),
            generation=trees.number(0, jnp.int32),
            lower=jnp.full(d, jnp.nan, dtype),
            upper=jnp.full(d, jnp.nan, dtype),
            level=trees.number(jnp.nan, dtype),
            unchanged=trees.number(0, jnp.int32),
            exhausted=trees.number(False, jnp.bool_),
        )

    def _first_step_size(self, params: optax.Params, dtype: Any) -> jax.Array:
        if self.step_size is not None:
            return jnp.asarray(self.step_size, dtype)
        return jnp.asarray(_OF_PARAMS * _typical_size(params, dtype), dtype)

    def _begun(self, draw: Draw, params: optax.Params, state: CmaState) -> CmaState:
        """The state with the bounds of the run, and with the scale that they give."""
        dtype = state.scale.dtype
        if draw.bounds is None:
            ends = jnp.full_like(state.lower, jnp.inf)
            return state._replace(lower=-ends, upper=ends)
        lower, upper = (_flat(bound, dtype) for bound in draw.bounds)
        begun = state._replace(lower=lower, upper=upper)
        if self.step_size is not None:
            return begun
        width = upper - lower
        share = jnp.asarray(_OF_WIDTH, dtype)
        other = jnp.asarray(_OF_PARAMS, dtype) / share * _typical_size(params, dtype)
        scaled = begun._replace(
            step_size=share,
            first_step_size=share,
            scale=jnp.where(jnp.isfinite(width) & (width > 0), width, other),
        )
        is_first = jnp.any(jnp.isnan(state.lower))
        return optax.tree.where(is_first, scaled, begun)

    def points(
        self, draw: Draw, params: optax.Params, state: CmaState
    ) -> tuple[Points, CmaState]:
        layout = layout_of(params)
        state = self._begun(draw, params, state)
        size, dtype = self._size(layout.dimension), state.scale.dtype
        normal = sample_points(gaussian(), draw, size, [1.0], params)
        drawn = sums.cache(normal.directions, layout, at_once=True)
        z = rows_of(jax.vmap(lambda u: elements(u, layout))(drawn), dtype)
        rows = (state.scale[None] * colored(state, z)).astype(jnp.float32)
        length = state.step_size.astype(jnp.float32)
        away = (length * rows).astype(dtype)
        if dtype != jnp.float32:  # Directions are rounded, and z belongs to the point.
            z = whitened(state, away / (state.step_size * state.scale)[None])
        if draw.bounds is not None:
            within = jax.vmap(_box(state).moved, (None, 0))
            away = within(_flat(params, dtype), away)
            rows = (away / length.astype(dtype)).astype(jnp.float32)
        given = dataclasses.replace(
            drawn,
            cached=tuple(
                DenseElements(part.reshape(size, *leaf.shape))
                for leaf, part in zip(layout.leaves, _parts(rows, layout), strict=True)
            ),
        )
        scales = jnp.broadcast_to(length, (size, 1))
        points = dataclasses.replace(normal, directions=given, scales=scales)
        return points, state._replace(normals=z)

    def reduce(
        self, points: Points, values: Values, params: optax.Params, state: CmaState
    ) -> tuple[Estimate, CmaState]:
        constants = constants_of(points.layout.dimension, points.num_points)
        found = Population.of(constants, values.along[:, 0], state)
        at = _flat(params, state.scale.dtype)
        away = state.step_size * state.scale * found.mean_y
        shift = _box(state).shift(at, away)
        gradient = unflattened(-shift, points.layout, params)
        estimate = Estimate(
            _median(found.values, values.base),
            slope=_slope(found),
            num_values=jnp.sum(found.finite, dtype=jnp.int32),
            gradient=LinearCombination.of_tree(gradient, points.layout),
        )
        after = learned(constants, found, state)
        exhausted = is_exhausted(constants, at + shift, after)
        return estimate, after._replace(exhausted=exhausted)

    def exhausted(self, state: CmaState) -> jax.Array:
        return state.exhausted


def cma(
    population_size: int | None = None, step_size: float | None = None
) -> GradientEstimator:
    """An evolution strategy with covariance matrix adaptation (CMA-ES).

    In each step, λ points are drawn from a normal distribution around θ,

        xᵢ = θ + σ S B D zᵢ,    zᵢ ~ N(0, I),    C = B D² Bᵀ

    The weighted mean of the better half is the next θ. The covariance C and the step
    size σ are learned from the ranks of all values: C from the steps that were good and
    from those that were bad, σ from the length of the path of θ. The gradient of the
    estimate is minus the shift of the mean. So use the optimizer `optax.sgd(1.0)`,
    which takes the shift as it is, with the search `search.whole()`.

    Use it for functions with steps in their values, with noise, with many local minima,
    or without a derivative, of up to a few hundred parameters. Only ranks count, so
    that any increasing function of the values gives the same run. It adapts to scales
    and to correlations of the parameters in about 10 d steps. If the function is
    smooth, methods with differences need fewer evaluations.

    For up to 200 parameters, C is a matrix; a step takes O(d³) operations at most. For
    more parameters C is its diagonal, which cannot learn correlations.

    Under bounds, points are drawn in a space without bounds and mapped into the box,

        x − l = (g − l + a)² / (4a)    if x − l < a, with the lower bound l

    likewise at the upper bound u; a is a twentieth of u − l. What is drawn beyond a
    bound is reflected, so that no point needs to be moved into the box. Bounds also
    give S, the unit of each parameter, if `step_size` is not given.

    Values that are not finite are the worst, and such points have no part in the mean.
    If no value is finite, θ stays, and the next points lie half as far away.

    `exhausted(state)` tells when further steps would teach nothing: when all standard
    deviations are below 10⁻¹² of the first ones or below the rounding of θ, above 10¹²
    of them or not finite; when the least value of a step has not changed, except by
    rounding, for 10 + 30 d/λ steps; or when the condition number of C reaches 10¹⁴
    (8 · 10⁶ in float32). For many local minima, start again with twice the population
    then.

    Args:
      population_size: λ, the number of points per step, at least 2; by default
        4 + ⌊3 ln d⌋. More points find better local minima, and average more noise.
      step_size: The first σ, the standard deviation of the points in each parameter, in
        the units of the parameters: a positive number. The minimum should be within
        about three of them. By default 0.3, or 0.3 times the root mean square of θ if
        that is larger; under bounds, 0.2 of the distance of two finite bounds.

    Returns:
      The estimator, with a `CmaState`. Its value is the median of the finite values,
      and its slope is their derivative along the gradient, by linear regression.

    Raises:
      TypeError, ValueError: If an argument has the wrong type or is out of range.

    Examples:
      A function with steps, whose differences are 0 nearly everywhere:

      >>> import numpy as np, optax
      >>> import radazo_jax as zo
      >>> def stairs(x):
      ...     return float(np.sum(np.floor(4 * np.abs(x - 1.0))))
      >>> result = zo.minimize_black_box(
      ...     stairs,
      ...     np.zeros(5),
      ...     optax.sgd(1.0),
      ...     zo.estimators.cma(),
      ...     max_evaluations=1000,
      ...     progress=False,
      ... )
      >>> stairs(np.zeros(5)), result.best.value
      (20.0, 0.0)

    References:
      Hansen, The CMA Evolution Strategy: A Tutorial, 2016,
      <https://arxiv.org/abs/1604.00772>, table 1 and figure 6, with negative weights.

      Ros & Hansen, A Simple Modification in CMA-ES Achieving Linear Time and Space
      Complexity, PPSN 2008, the diagonal.
    """
    if population_size is not None:
        population_size = checks.check_int_at_least(
            "population_size", population_size, 2
        )
    if step_size is not None:
        checks.check_positive("step_size", step_size)
        step_size = checks.as_number(step_size)
    return Cma(population_size, step_size)


def _flat(tree: Any, dtype: Any) -> jax.Array:
    """The leaves of a tree, one after another: [d]."""
    return rows_of(jax.tree.map(lambda x: jnp.asarray(x)[None], tree), dtype)[0]


def _typical_size(params: optax.Params, dtype: Any) -> jax.Array:
    """The root mean square of the parameters, but 1 at least: shape ()."""
    return jnp.maximum(jnp.sqrt(jnp.mean(_flat(params, dtype) ** 2)), 1)


def _parts(rows: jax.Array, layout: Layout) -> list[jax.Array]:
    """The columns of each leaf."""
    ends = np.cumsum([leaf.size for leaf in layout.leaves])
    return jnp.split(rows, ends[:-1], axis=1)


def _box(state: CmaState) -> Box:
    """The box of a run."""
    return Box.of(state.lower, state.upper, state.scale)


def _median(values: jax.Array, base: jax.Array) -> jax.Array:
    """The lower median of the finite values, which are sorted; NaN without any."""
    count = jnp.sum(jnp.isfinite(values), dtype=jnp.int32)
    middle = values[jnp.maximum(count - 1, 0) // 2]
    return jnp.where(count > 0, middle, jnp.nan).astype(base.dtype)


def _slope(found: Population) -> jax.Array:
    """The derivative along the gradient of a linear regression of the values."""
    finite, dtype = found.finite, found.values.dtype
    count = jnp.maximum(jnp.sum(finite, dtype=jnp.int32), 1).astype(dtype)
    values = jnp.where(finite, found.values, 0)
    centered = jnp.where(finite, values - jnp.sum(values) / count, 0)
    along = product(found.z, found.mean_z)
    return -jnp.sum(centered * along.astype(dtype)) / count
