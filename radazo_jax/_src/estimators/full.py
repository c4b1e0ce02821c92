"""Forward differences along all coordinates."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import checks
from radazo_jax._src.base import Draw, Estimate, GradientEstimator, Points, Values
from radazo_jax._src.directions import sums
from radazo_jax._src.directions.dense import Basis
from radazo_jax._src.directions.layout import layout_of
from radazo_jax._src.estimators import gathered, scales
from radazo_jax._src.estimators.differences import Differences
from radazo_jax._src.estimators.gathered import FullDifferenceState
from radazo_jax._src.estimators.scales import Sizes
from radazo_jax._src.trees import as_flat, like_tree, number, size, wide, widest

# Coordinates below this are moved as far as one of this size, in float64 and in other
# dtypes: values of float32 hide shorter differences.
_LEAST, _LEAST_NARROW = 0.1, 1.0

# Shorter moves than so many roundings of a coordinate mean nothing.
_ROUNDINGS = 64

# Differences that led nowhere so many times in a row will lead nowhere again.
_STUCK = 3


@dataclasses.dataclass(frozen=True, repr=False)
class FullDifference(GradientEstimator):
    """See `full_difference`."""

    _constructor = "full_difference"

    smoothing: float | None = None
    tolerance: float | None = None

    def _first(self, params: Any) -> float:
        """The first μ."""
        if self.smoothing is not None:
            return self.smoothing
        dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(params)]
        return float(max(float(jnp.finfo(dtype).eps) for dtype in dtypes) ** 0.5)

    def init(self, params: Any) -> FullDifferenceState:
        return FullDifferenceState(
            jnp.asarray(self._first(params), widest(params)),
            jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params),
            jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params),
            usable=number(True, jnp.bool_),
            complete=number(True, jnp.bool_),
            tries=number(0, jnp.int32),
            base=number(jnp.nan, widest(params)),
            steps=jnp.zeros(size(params), widest(params)),
            values=jnp.full(size(params), jnp.nan, widest(params)),
            noise=number(0, widest(params)),
            first=number(jnp.nan, widest(params)),
            stuck=number(0, jnp.int32),
            in_steps=number(False, jnp.bool_),
            is_small=number(False, jnp.bool_),
            sizes=Sizes.unknown(size(params), widest(params)),
            exhausted=number(False, jnp.bool_),
        )

    def exhausted(self, state: FullDifferenceState) -> jax.Array:
        return state.exhausted

    def points(
        self, draw: Draw, params: Any, state: FullDifferenceState
    ) -> tuple[Points, FullDifferenceState]:
        layout = layout_of(params)
        again = ~state.complete & gathered.equal(params, state.previous)
        seeks = again & (state.sizes.round > 0)
        goes_on = again & ~seeks
        tries = jnp.where(goes_on, optax.safe_increment(state.tries), 0)
        smoothing = gathered.followed(params, state, self._first(params))
        smoothing = jnp.where(again, state.smoothing, smoothing)
        at = as_flat(params)
        signs = jax.random.rademacher(draw.run_key, at.shape, at.dtype)
        share = jnp.asarray(gathered.SHARES, at.dtype)[tries]
        least = _LEAST if at.dtype == jnp.float64 else _LEAST_NARROW
        units = state.sizes.typical(at, least)
        units = jnp.where(
            state.in_steps, scales.units(state.sizes.origin, draw.bounds), units
        )
        distances = share * smoothing * units
        rounded = _ROUNDINGS * jnp.finfo(at.dtype).eps * abs(at)
        sought = jnp.maximum(state.sizes.distances, rounded)
        distances = jnp.where(seeks, sought, distances)
        steps = _moved(params, signs * distances.astype(at.dtype), draw.bounds)
        missing = ~goes_on | state.in_steps | gathered.missing(state, tries)
        moves = jnp.where(seeks, ~state.sizes.found, missing)
        steps = jnp.where(moves, steps, 0)
        # Coordinates that do not move are the last: nobody needs to evaluate them.
        order = jnp.argsort(steps == 0, stable=True).astype(jnp.uint32)
        directions = sums.sample(Basis(), draw.key, order, layout)
        distances = steps.astype(jnp.float32)
        begun = state.sizes.begun(at, draw.bounds)
        state = state._replace(
            smoothing=smoothing,
            previous=params,
            tries=tries,
            sizes=optax.tree.where(jnp.isnan(state.first), begun, state.sizes),
        )
        return Points(directions, distances[order, None], True, layout), state

    def reduce(
        self, points: Points, values: Values, params: Any, state: FullDifferenceState
    ) -> tuple[Estimate, FullDifferenceState]:
        order = points.directions.number
        found_here = gathered.in_order(order, points, values)
        changed = gathered.changed(params, state, found_here.base)
        before = gathered.counted(params, state)
        seeks = state.sizes.round > 0
        merged = optax.tree.where(
            state.in_steps,
            gathered.averaged(before, found_here),
            gathered.merged(before, found_here),
        )
        state = optax.tree.where(seeks, before, merged)
        found = Differences.of(Values(state.base, state.values[:, None]))
        finite = jnp.isfinite(found.each) & (state.steps != 0)
        gain = jnp.asarray(found.gain, found.each.dtype)
        slopes = gain * found.each / jnp.where(finite, state.steps, 1)
        slopes = jnp.where(finite, slopes, 0)
        count = jnp.sum(jnp.isfinite(found.each), dtype=jnp.int32)
        # Between equal bounds the gradient is 0.
        still = jnp.all(state.steps == 0) & jnp.isfinite(state.base)
        known = (count > 0) | still
        state = gathered.judged(before, state, found_here, found.each)
        ends = gathered.is_settled(params, before, state, self.tolerance) & (
            changed == 0
        )
        ends |= still
        state = state._replace(is_small=state.is_small | ends)
        estimate = Estimate(
            found.value,
            slope=jnp.sum(slopes**2),
            num_values=jnp.where(known, count + found.num_base, 0),
            gradient=points.combine(jnp.where(known, slopes[order], jnp.nan)),
            known=finite | (state.steps == 0),
            complete=state.complete & (changed == 0),
            noisy=(state.noise > 0) | (changed > 0),
            sizes=state.sizes.used(),
        )
        measured = optax.tree.where(count > 0, params, state.measured)
        state = state._replace(measured=measured, usable=count > 0)
        state = gathered.lengthened(gathered.restarted(before, state), changed)
        once = state.is_small | state.in_steps
        stuck = state.stuck >= jnp.where(once, 1, _STUCK)
        exhausted = (state.noise > 0) | stuck | ends
        return estimate, state._replace(exhausted=exhausted)


def full_difference(
    smoothing: float | None = None, tolerance: float | None = None
) -> GradientEstimator:
    """Forward differences along all d coordinates: the whole gradient.

        ĝᵢ = (f(θ + sᵢ eᵢ) − f(θ)) / sᵢ,    |sᵢ| = μ max(|θᵢ|, a)

    of d + 1 evaluations, with a = 0.1 in float64 and a = 1 in narrower dtypes. Use it
    with `bfgs` for few parameters, as the default method does up to 100. For more
    parameters, use random directions, as `adaptive_difference` does.

    At the start, f(θ) is evaluated twice, which shows noise. If the first slopes are
    apart by a factor of 10⁴, or some differences are hidden by rounding, the next steps
    stay at θ and search the size of each parameter: the change of it that changes f by
    about 1 %, within a factor of 10, in at most ten rounds, of which the first
    differences are one. Finite bounds are sizes without a search. With sizes σᵢ and the
    start θ₀, |sᵢ| is μ max(|θᵢ − θ₀ᵢ|, a σᵢ), and the extra argument `sizes`, [d],
    tells the optimizer.

    All sᵢ have the same sign through a run, which is drawn for each coordinate. Under
    bounds, a coordinate whose bound is closer than |sᵢ| is moved away from it, so that
    no point leaves the box. In a box narrower than |sᵢ|, the difference ends at the
    farther bound. A coordinate with equal bounds is not moved, and its ĝᵢ is 0.

    If values are not finite, the next steps evaluate at the same θ what is missing, at
    −sᵢ, sᵢ/2 and −sᵢ/2; the run stays there until then. If f(θ) is missing, two values
    along one coordinate replace it:

        f(θ) ≈ (t f(θ + sᵢ eᵢ) − sᵢ f(θ + t eᵢ)) / (t − sᵢ),    t = −sᵢ, sᵢ/2, …

    After three such steps, a missing ĝᵢ is 0, and the extra argument `known`, bool,
    [d], tells the optimizer which ĝᵢ are known. If f(θ) is still missing, the mean f̄
    of the K finite values replaces it, and

        ĝᵢ = K/(K−1) · (f(θ + sᵢ eᵢ) − f̄) / sᵢ

    It takes the difference of each value to the mean of the other values, and is
    unbiased over the signs up to O(μ). This needs K ≥ 2.

    If the run is still, or again, at the point of the latest differences, these led
    nowhere. The distance is then 30 times as long, because noise, rounding or a flat
    function hide short differences; above 0.3 it starts again. If the latest step had
    no difference at all, the distance is halved instead.

    If f(θ) has changed since then, by Δ, the function has noise. The distance is then
    at least √(Δ/|f|), which balances noise and curvature, and twice as long if
    differences lead nowhere again, up to 1. `noisy` of the estimate tells the search.

    A function is in steps if all first differences are 0, or if, once the sizes are
    known, most differences are 0 or as large as at a long distance. Its differences are
    then central ones of two steps, one with sᵢ and one with −sᵢ, and |sᵢ| is 0.3 times
    max(1, |θ₀|/√d), or 0.2 of the distance of two finite bounds. If they lead nowhere,
    |sᵢ| is a third of it.

    `exhausted(state)` tells when further steps would teach nothing: when the function
    has noise; when three differences at one point led nowhere, or one did of a function
    in steps, or one whose slopes are small enough for a minimum; when no coordinate can
    move between its bounds; or when neither θ nor f has moved beyond the tolerance τ
    from one gradient to the next:

        |f′ − f| ≤ τ max(|f′|, |f(θ₀)|)  and  |θ′ᵢ − θᵢ| ≤ τ max(|θ′ᵢ|, σᵢ)  for all i

    Args:
      smoothing: The first μ, a positive number; by default the square root of the
        machine epsilon, 1.5 · 10⁻⁸ in float64 and 3.5 · 10⁻⁴ in float32.
      tolerance: τ, a number in [0, 1); by default, only differences that led nowhere
        count.

    Returns:
      The estimator, with a `FullDifferenceState`.

    Raises:
      TypeError, ValueError: If `smoothing` is not a positive number, or `tolerance`
        is none in [0, 1).

    Examples:
      >>> import jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> estimator, x = zo.full_difference(), jnp.array([1.0, -2.0])
      >>> (_, gradient), _ = zo.estimators.estimate(
      ...     estimator, lambda x: jnp.sum(x**2), 0, x, estimator.init(x)
      ... )
      >>> bool(jnp.allclose(gradient, jnp.array([2.0, -4.0]), rtol=1e-2))
      True

    References:
      Nocedal & Wright, Numerical Optimization, 2006, section 8.1. Under noise: Moré &
      Wild, Estimating Derivatives of Noisy Simulations, ACM TOMS 2012.
    """
    if smoothing is not None:
        checks.check_positive("smoothing", smoothing)
        smoothing = checks.as_number(smoothing)
    if tolerance is not None:
        checks.check_unit_interval("tolerance", tolerance)
        tolerance = checks.as_number(tolerance)
    return FullDifference(smoothing, tolerance)


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
