"""Forward differences along all coordinates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src import checks
from radazo_jax._src.directions import sums
from radazo_jax._src.directions.coordinates import Basis
from radazo_jax._src.directions.layout import layout_of
from radazo_jax._src.estimate.differences import differences
from radazo_jax._src.estimate.estimator import GradientEstimator
from radazo_jax._src.estimate.points import Draw, Estimate, Points, Values
from radazo_jax._src.trees import as_flat, like_tree, wide, widest

# Coordinates below this are moved as far as one of this size, in float64 and in other
# dtypes: values of float32 hide shorter differences.
_LEAST, _LEAST_NARROW = 0.1, 1.0

# Factors of the distance if the differences led nowhere, and if there were none; and
# the longest distance, in the same units.
_LONGER, _SHORTER, _LONGEST = 30.0, 0.5, 0.3


class FullDifferenceState(NamedTuple):
    """State of `full_difference`.

    Scalars are float32, or float64 if the parameters are.

    Attributes:
      smoothing: μ of the latest step, relative to the coordinates: shape ().
      previous: The parameters of the latest step: a tree like the parameters.
      measured: The parameters of the latest step with a difference, likewise.
      usable: Whether the latest step had a difference: bool, shape ().
    """

    smoothing: jax.Array
    previous: Any
    measured: Any
    usable: jax.Array


def full_difference(smoothing: float | None = None) -> GradientEstimator:
    """Forward differences along all d coordinates: the whole gradient.

        ĝᵢ = (f(θ + sᵢ eᵢ) − f(θ)) / sᵢ,    |sᵢ| = μ max(|θᵢ|, a)

    of d + 1 evaluations, with a = 0.1 in float64 and a = 1 in narrower dtypes. Use it
    with `bfgs` for few parameters, as the default method does up to 20. For more
    parameters, use random directions, as
    `adaptive_difference` does.

    All sᵢ have the same sign through a run, which is drawn for each coordinate. Under
    bounds, a coordinate whose bound is closer than |sᵢ| is moved away from it, so that
    no point leaves the box. In a box narrower than |sᵢ|, the difference ends at the
    farther bound. A coordinate with equal bounds is not moved, and its ĝᵢ is 0. Also 0
    is ĝᵢ if the difference is not finite; the extra argument `known`, bool, [d], tells
    the optimizer which ĝᵢ are known.

    If f(θ) is not finite, the mean f̄ of the K finite values replaces it, and

        ĝᵢ = K/(K−1) · (f(θ + sᵢ eᵢ) − f̄) / sᵢ

    It takes the difference of each value to the mean of the other values, and is
    unbiased over the signs up to O(μ). This needs K ≥ 2.

    If the run is still, or again, at the point of the latest differences, these led
    nowhere. The distance is then 30 times as long, because noise, rounding or a flat
    function hide short differences; above 0.3 it starts again. If the latest step had
    no difference at all, the distance is halved instead.

    Args:
      smoothing: The first μ, a positive number; by default the square root of the
        machine epsilon, 1.5 · 10⁻⁸ in float64 and 3.5 · 10⁻⁴ in float32.

    Returns:
      The estimator, with a `FullDifferenceState`.

    Raises:
      TypeError, ValueError: If `smoothing` is not a positive number.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator, x = zo.full_difference(), jnp.array([1.0, -2.0])
      >>> (_, gradient), _ = estimator.estimate(
      ...     lambda x: jnp.sum(x**2), jax.random.key(0), x, estimator.init(x)
      ... )
      >>> bool(jnp.allclose(gradient, jnp.array([2.0, -4.0]), rtol=1e-2))
      True

    References:
      Nocedal & Wright, Numerical Optimization, 2006, section 8.1.
    """
    if smoothing is not None:
        checks.check_positive("smoothing", smoothing)

    def first(params: Any) -> float:
        if smoothing is not None:
            return smoothing
        dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(params)]
        return float(max(float(jnp.finfo(dtype).eps) for dtype in dtypes) ** 0.5)

    def init(params: Any) -> FullDifferenceState:
        return FullDifferenceState(
            jnp.full((), first(params), widest(params)),
            jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params),
            jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params),
            jnp.ones((), jnp.bool_),
        )

    def points(
        draw: Draw, params: Any, state: FullDifferenceState
    ) -> tuple[Points, FullDifferenceState]:
        layout = layout_of(params)
        numbers = np.arange(layout.dimension, dtype=np.uint32)
        directions = sums.sample(Basis(), draw.key, numbers, layout)
        smoothing = _followed(params, state, first(params))
        at = as_flat(params)
        least = _LEAST if at.dtype == jnp.float64 else _LEAST_NARROW
        distances = smoothing * jnp.maximum(abs(at), least).astype(smoothing.dtype)
        signs = jax.random.rademacher(draw.run_key, at.shape, at.dtype)
        steps = _moved(params, signs * distances.astype(at.dtype), draw.bounds)
        scales = steps.astype(jnp.float32)[:, None]
        state = state._replace(smoothing=smoothing, previous=params)
        return Points(directions, scales, True, layout), state

    def reduce(
        points: Points, values: Values, params: Any, state: FullDifferenceState
    ) -> tuple[Estimate, FullDifferenceState]:
        found = differences(values)
        scales = points.scales[:, 0].astype(found.each.dtype)
        finite = jnp.isfinite(found.each) & (scales != 0)
        gain = jnp.asarray(found.gain, found.each.dtype)
        slopes = gain * found.each / jnp.where(finite, scales, 1)
        count = jnp.sum(jnp.isfinite(found.each), dtype=jnp.int32)
        slopes = jnp.where(finite, slopes, 0)
        estimate = Estimate(
            found.value,
            slope=jnp.sum(slopes**2),
            num_values=jnp.where(count > 0, count + found.num_base, 0),
            gradient=points.combine(jnp.where(count > 0, slopes, jnp.nan)),
            extra_args={"known": finite | (scales == 0)},
        )
        measured = optax.tree.where(count > 0, params, state.measured)
        return estimate, state._replace(measured=measured, usable=count > 0)

    return GradientEstimator(init, points, reduce)


def _followed(params: Any, state: FullDifferenceState, first: float) -> jax.Array:
    """The distance after the latest step."""
    nothing = ~state.usable & _equal(params, state.previous)
    longer = _LONGER * state.smoothing
    # Once the longest distance has led nowhere, the first one is tried again.
    longer = jnp.where(longer > _LONGEST, first, longer).astype(longer.dtype)
    longer = jnp.where(_equal(params, state.measured), longer, state.smoothing)
    return jnp.where(nothing, _SHORTER * state.smoothing, longer)


def _equal(params: Any, others: Any) -> jax.Array:
    """Whether two trees have the same elements: bool, shape ()."""
    same = jax.tree.map(lambda p, q: jnp.all(p == q), params, others)
    return jnp.all(jnp.stack(jax.tree.leaves(same)))


def _moved(params: Any, steps: jax.Array, bounds: Any) -> jax.Array:
    """The displacements along each coordinate that a point within bounds can have.

    They are differences of rounded parameters, and so exact.
    """
    tree = like_tree(steps, params)

    def within(p: jax.Array, s: jax.Array, low: jax.Array, high: jax.Array) -> Any:
        s = s.astype(wide(p).dtype)

        def at(s: jax.Array) -> jax.Array:
            return (wide(p) + s).astype(p.dtype)

        def fits(s: jax.Array) -> jax.Array:
            return (at(s) >= low) & (at(s) <= high)

        to_low, to_high = wide(low) - wide(p), wide(high) - wide(p)
        farther = jnp.where(to_high >= -to_low, to_high, to_low)
        s = jnp.where(fits(s), s, jnp.where(fits(-s), -s, farther))
        return wide(at(s)) - wide(p)

    low, high = (
        jax.tree.map(lambda p, end=end: jnp.full_like(p, end), params)
        for end in (-jnp.inf, jnp.inf)
    )
    if bounds is not None:
        low, high = bounds
    return as_flat(jax.tree.map(within, params, tree, low, high))
