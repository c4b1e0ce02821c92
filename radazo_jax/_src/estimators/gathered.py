"""The values that whole differences have gathered, and what they tell."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.base import Points, Values
from radazo_jax._src.estimators import scales
from radazo_jax._src.estimators.scales import Sizes
from radazo_jax._src.trees import as_flat

# Missing values are evaluated at these shares of their steps, in this order.
SHARES = (1.0, -1.0, 0.5, -0.5)

# Once noise is recognized, a distance that led nowhere is so many times as long, up to
# this one.
_LONGER_IN_NOISE, _LONGEST_IN_NOISE = 2.0, 1.0

# Slopes are small if they change the value, relative to values here and at the start,
# by less than this power of the machine epsilon over the size of a parameter.
_SMALL = 1 / 3

# The distance of differences of a function in steps, in `scales.units`, its factor once
# they led nowhere, and the least of it, after which the first one is tried again.
_FAR, _NEARER, _NEAREST = 0.3, 1 / 3, 1e-3

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
      complete: Whether all values of its gradient are known: bool, shape ().
      tries: Number of earlier steps at the same parameters whose values the latest step
        has completed: int32, shape ().
      base: The value at the parameters, NaN if it is missing: shape ().
      steps: The displacement along each coordinate: [d].
      values: The values there, NaN if they are missing: [d].
      noise: The largest change of the value at equal parameters: shape ().
      first: The value at the first parameters, NaN if it is missing: shape ().
      stuck: Number of times that differences at the same parameters led nowhere:
        int32, shape ().
      in_steps: Whether most differences are 0, as of a function in steps: bool,
        shape ().
      is_small: Whether the slopes at the latest parameters were small enough for a
        minimum: bool, shape ().
      sizes: The sizes of the parameters.
      exhausted: Whether further steps would teach nothing: bool, shape ().
    """

    smoothing: jax.Array
    previous: Any
    measured: Any
    usable: jax.Array
    complete: jax.Array
    tries: jax.Array
    base: jax.Array
    steps: jax.Array
    values: jax.Array
    noise: jax.Array
    first: jax.Array
    stuck: jax.Array
    in_steps: jax.Array
    is_small: jax.Array
    sizes: Sizes
    exhausted: jax.Array


class Found(NamedTuple):
    """Values of a step by coordinate: the value at θ, steps, and values there."""

    base: jax.Array
    steps: jax.Array
    values: jax.Array


def in_order(order: jax.Array, points: Points, values: Values) -> Found:
    """The values of a step, by coordinate."""
    scales = points.scales[:, 0].astype(values.base.dtype)
    along = jnp.where(scales == 0, jnp.nan, values.along[:, 0])
    steps, each = (jnp.zeros_like(x).at[order].set(x) for x in (scales, along))
    return Found(values.base, steps, jnp.where(jnp.isfinite(each), each, jnp.nan))


def counted(params: Any, state: FullDifferenceState) -> FullDifferenceState:
    """The state with the number of times that differences here led nowhere."""
    again = state.usable & equal(params, state.measured)
    stuck = jnp.where(state.complete, optax.safe_increment(state.stuck), state.stuck)
    return state._replace(stuck=jnp.where(again, stuck, 0))


def judged(
    before: FullDifferenceState,
    state: FullDifferenceState,
    found: Found,
    changes: jax.Array,
) -> FullDifferenceState:
    """The state after a look at its differences.

    Args:
      before: The state before the step.
      state: The state with the values of the step.
      found: The values of the step.
      changes: The differences: [d].
    """
    seeks = before.sizes.round > 0
    is_first = jnp.isnan(before.first) & jnp.isfinite(state.base)
    is_first &= jnp.any(jnp.isfinite(changes))
    moved = state.steps != 0
    still = is_first & jnp.any(moved) & jnp.all((changes == 0) | ~moved)
    needed = scales.are_needed(changes, state.base, state.steps)
    needed &= is_first & ~still
    sizes = optax.tree.where(
        seeks,
        before.sizes.after(found.values - state.base, state.base),
        before.sizes.sought(needed, state.steps, changes, state.base),
    )
    # A function whose first differences are all 0 is one of steps. If some are, those
    # after the search for sizes tell.
    is_fresh = sizes.known & ~before.complete & (before.tries == 0) & ~seeks
    of_steps = scales.are_of_steps(changes, state.base, moved)
    highest = jnp.fmax(abs(state.base), abs(state.first))
    slopes = abs(changes) * sizes.used() / jnp.where(moved, abs(state.steps), 1)
    least = jnp.finfo(slopes.dtype).eps ** _SMALL * highest
    is_small = jnp.all((slopes <= least) | ~moved)
    in_steps = state.in_steps | (is_fresh & of_steps) | still
    return state._replace(
        first=jnp.where(is_first, state.base, before.first),
        sizes=sizes,
        in_steps=in_steps,
        is_small=is_small | (state.is_small & (state.stuck > 0)),
        # At the start, f(θ) is evaluated twice, which shows noise.
        complete=state.complete
        & ~(is_first & before.complete)
        & ~needed
        & ~seeks
        & (before.in_steps | ~in_steps),
    )


def is_settled(
    params: Any,
    before: FullDifferenceState,
    state: FullDifferenceState,
    tolerance: float | None,
) -> jax.Array:
    """Whether the step between two gradients moved nothing beyond a tolerance.

    Args:
      params: The parameters.
      before: The state before the step, with the value at its measured parameters.
      state: The state with the values of the step.
      tolerance: The tolerance, `None` if nothing is within it.
    """
    if tolerance is None:
        return jnp.zeros((), jnp.bool_)
    at = as_flat(params)
    moved = abs(at - as_flat(before.measured))
    little = moved <= tolerance * jnp.maximum(abs(at), state.sizes.used())
    highest = jnp.fmax(abs(state.base), abs(state.first))
    level = abs(state.base - before.base) <= tolerance * highest
    # If nothing has moved at all, the differences led nowhere.
    return state.complete & jnp.any(moved != 0) & jnp.all(little) & level


def restarted(
    before: FullDifferenceState, state: FullDifferenceState
) -> FullDifferenceState:
    """The state in which all is measured anew: with sizes, or at other distances."""
    far = state.in_steps & ~before.in_steps
    ends = (state.sizes.known & ~before.sizes.known) | far
    none = jnp.full_like(state.values, jnp.nan)
    smoothing = jnp.where(far, _FAR, state.smoothing).astype(state.smoothing.dtype)
    return state._replace(
        smoothing=smoothing,
        base=jnp.where(ends, jnp.nan, state.base),
        steps=jnp.where(ends, 1, state.steps),
        values=jnp.where(ends, none, state.values),
        tries=jnp.where(ends, -1, state.tries),
    )


def missing(state: FullDifferenceState, tries: jax.Array) -> jax.Array:
    """The coordinates along which a step evaluates to complete the latest one."""
    known = jnp.isfinite(state.values)
    # If f(θ) is missing, a second value along one of the others.
    places = jnp.cumsum(known, dtype=jnp.int32)
    second = known & (places == jnp.minimum(tries, places[-1]))
    return (~known & (state.steps != 0)) | (second & ~jnp.isfinite(state.base))


def merged(state: FullDifferenceState, found: Found) -> FullDifferenceState:
    """The state with the values of a step, and of earlier steps at the same θ."""
    again = state.tries > 0
    before = jnp.where(again, state.values, jnp.nan)
    base = jnp.where(jnp.isfinite(found.base), found.base, jnp.nan)
    base = jnp.where(jnp.isnan(base) & again, state.base, base)
    both = jnp.isfinite(before) & jnp.isfinite(found.values)
    apart = found.steps - state.steps
    line = found.steps * before - state.steps * found.values
    line = jnp.where(both & (apart != 0), line / jnp.where(apart == 0, 1, apart), 0)
    replaced = jnp.where(jnp.any(both & (apart != 0)), jnp.sum(line), jnp.nan)
    base = jnp.where(jnp.isnan(base), replaced, base)
    kept = again & (jnp.isfinite(before) | (found.steps == 0))
    steps = jnp.where(kept, state.steps, found.steps)
    values = jnp.where(kept, before, found.values)
    known = jnp.isfinite(values)
    all_known = jnp.all(known | (steps == 0)) & jnp.isfinite(base)
    ends = ~jnp.any(known) | (state.tries >= len(SHARES) - 1)
    return state._replace(
        base=base, steps=steps, values=values, complete=all_known | ends
    )


def averaged(state: FullDifferenceState, found: Found) -> FullDifferenceState:
    """The state with the mean slopes of two steps, ahead and back."""
    again = state.tries > 0
    base = jnp.where(jnp.isfinite(found.base), found.base, state.base)

    def slopes(values: jax.Array, steps: jax.Array) -> jax.Array:
        return (values - base) / jnp.where(steps == 0, 1, steps)

    ahead, back = slopes(state.values, state.steps), slopes(found.values, found.steps)
    both = again & jnp.isfinite(ahead) & jnp.isfinite(back)
    slope = jnp.where(
        both, (ahead + back) / 2, jnp.where(again & jnp.isfinite(ahead), ahead, back)
    )
    return state._replace(
        base=base, steps=found.steps, values=base + slope * found.steps, complete=again
    )


def changed(params: Any, state: FullDifferenceState, value: jax.Array) -> jax.Array:
    """The first change of f(θ) at equal parameters: shape ()."""
    change = abs(value - state.base)
    same = state.usable & equal(params, state.measured) & (state.noise == 0)
    return jnp.where(same & jnp.isfinite(change), change, 0)


def lengthened(state: FullDifferenceState, changed: jax.Array) -> FullDifferenceState:
    """The state once noise is recognized: the next step begins with longer steps."""
    balanced = jnp.sqrt(changed / jnp.where(state.base == 0, 1, abs(state.base)))
    longest = jnp.asarray(_LONGEST, balanced.dtype)
    longer = jnp.maximum(state.smoothing, jnp.minimum(balanced, longest))
    found = changed > 0
    return state._replace(
        noise=jnp.where(found, changed, state.noise),
        smoothing=jnp.where(found, longer, state.smoothing).astype(longer.dtype),
        complete=state.complete & ~found,
        base=jnp.where(found, jnp.nan, state.base),
        values=jnp.where(found, jnp.nan, state.values),
    )


def followed(params: Any, state: FullDifferenceState, first: float) -> jax.Array:
    """The distance after the latest step."""
    nothing = ~state.usable & equal(params, state.previous)
    longer = _LONGER * state.smoothing
    # Once the longest distance has led nowhere, the first one is tried again.
    longer = jnp.where(longer > _LONGEST, first, longer)
    in_noise = jnp.minimum(_LONGER_IN_NOISE * state.smoothing, _LONGEST_IN_NOISE)
    nearer = _NEARER * state.smoothing
    nearer = jnp.where(nearer < _NEAREST, _FAR, nearer)
    longer = jnp.where(state.in_steps, nearer, longer)
    longer = jnp.where(state.noise > 0, in_noise, longer).astype(state.smoothing.dtype)
    longer = jnp.where(equal(params, state.measured), longer, state.smoothing)
    return jnp.where(nothing, _SHORTER * state.smoothing, longer)


def equal(params: Any, others: Any) -> jax.Array:
    """Whether two trees have the same elements: bool, shape ()."""
    same = jax.tree.map(lambda p, q: jnp.all(p == q), params, others)
    return jnp.all(jnp.stack(jax.tree.leaves(same)))
