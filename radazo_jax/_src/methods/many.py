"""Descent along few directions per step, for hundreds or thousands of parameters."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from radazo_jax._src.base import checks
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.methods import contract
from radazo_jax._src.methods.contract import Box, End, Method, Part, Start, Steps
from radazo_jax._src.methods.ends import decided, guarded
from radazo_jax._src.methods.points import scaled

# K is at least 10, because two of the K + 2 evaluations of a step are no directions. It
# is at most 32, because a cycle of d directions should have many steps.
_FEWEST, _MOST = 10, 32

# A step that raises the value is rejected if its curvature is so many times the known
# one.
_SURPRISE = 4.0

# Factors by which the step size changes at once, by measurements or blindly: while
# its scale is being searched for, and thereafter.
_SEARCH, _SEARCH_BLIND, _AVERAGED, _BLIND = 100.0, 10.0, 2.0, 1.25

# By its slope, the first step lowers the value by this share of it. One measurement is
# enough then to find the best step on a parabola down to 0.
_FIRST = 2 / _SEARCH

# The decay rate of the averages of slope and curvature, and of the shares of curvature.
_DECAY, _SHARE_DECAY = 0.8, 0.9

# If the average share of curvature is above this, it would bias the differences. They
# become shorter then, and longer otherwise.
_CURVED, _SHORTER, _LONGER = 0.2, 0.5, 1.05

# The size of the parameters for differences is at least this.
_LEAST_SIZE = 0.1

# A fall of the value by so many roundings within a cycle is none. After so many such
# cycles a run ends, at once or while the scale of the step size is being searched for.
_ROUNDINGS, _IDLE, _SEARCHES = 8, 2, 10


class Lookahead(NamedTuple):
    """Momentum of Nesterov's method.

    Attributes:
      z: The point to which the momentum leads, shape [d].
      share: a, its share in the lookahead point; 0 for none.
    """

    z: np.ndarray
    share: float

    def point(self, x: np.ndarray) -> np.ndarray:
        """Returns y = x + a (z − x)."""
        return x + self.share * (self.z - x) if self.share else x

    def moved(
        self, x: np.ndarray, y: np.ndarray, new: np.ndarray, first: float
    ) -> "Lookahead":
        """Returns the momentum after a step from y to `new`.

        Args:
          x: The point before, whose lookahead point may be y.
          y: Start of the step.
          new: End of the step.
          first: a₀.
        """
        step, a = new - y, self.share
        if not a or step @ (new - x) <= 0:
            return Lookahead(new, first)
        z = self.z + first / a * step
        return Lookahead(z, (math.sqrt(a**4 + 4 * a**2) - a**2) / 2)


class StepSize(NamedTuple):
    """Step size η from parabolas along the latest steps.

    Attributes:
      size: η, 0 before the first step.
      slope: Average of the slope along a step, per squared length and 1/η.
      curvature: Average of the curvature along a step, per squared length.
      measurements: Number of measurements in the averages.
      searching: Whether the scale of η is still being searched for.
    """

    size: float = 0.0
    slope: float = 0.0
    curvature: float = 0.0
    measurements: int = 0
    searching: bool = True


class Parabola(NamedTuple):
    """The function along a step u, f(y + t u) ≈ f(y) − t·fall + t²·rise / 2.

    Attributes:
      fall: Decrease of the value in the step according to the slope alone.
      before: f(y), finite.
      after: f(y + u), or NaN.
      square: |u|², positive.
    """

    fall: float
    before: float
    after: float
    square: float

    @property
    def rise(self) -> float:
        """The curvature along the step."""
        return 2 * (self.after - self.before + self.fall)


def adapted_size(
    state: StepSize, parabola: Parabola, highest: float, resolution: float
) -> tuple[StepSize, bool]:
    """Adapts the step size to the parabola along a step.

    Args:
      state: Step size before.
      parabola: The parabola.
      highest: Value that no step may exceed.
      resolution: Relative spacing of values.

    Returns:
      The step size of the next step, and whether this step is taken.
    """
    fall, before, after, square = parabola
    finite = math.isfinite(after)
    rise = parabola.rise if finite else math.inf
    least = resolution * max(abs(before), abs(after)) if finite else 0.0
    seen = finite and max(abs(fall), abs(rise)) > least and after != before
    # If rounding hid the steps, η has grown beyond what is known.
    expected = square * min(state.curvature, abs(state.slope) / state.size)
    known = abs(fall) if state.searching else expected
    upward = seen and rise > 2 * fall
    taken = finite and not (upward and (rise > _SURPRISE * known or after > highest))
    # If the scale was wrong, the averages mean nothing.
    count = state.measurements if taken and not state.searching else 0
    slope, curvature = state.slope, state.curvature
    if seen:
        weight = min(_DECAY, count / (count + 1))
        slope = weight * slope + (1 - weight) * state.size * fall / square
        curvature = weight * curvature + (1 - weight) * rise / square
    scaled = state.size * curvature
    ratio = slope / scaled if scaled > 0 else math.inf
    clear = seen and abs(rise) > least
    if state.searching:
        limit = _SEARCH if clear else _SEARCH_BLIND
        factor = min(max(ratio, 1 / limit), limit) if clear else limit
    else:
        factor = min(max(ratio, 1 / _AVERAGED), _AVERAGED) if seen else _BLIND
    if not taken:
        shorter = ratio if finite and ratio > 0 else 1 / _SEARCH_BLIND
        factor = min(shorter, 1 / _AVERAGED)
    lost = not taken and (not finite or factor < 1 / _SEARCH_BLIND)
    found = clear and 1 / 3 < ratio < 3
    searching = lost or (state.searching and not (taken and found))
    count = 0 if searching else count + 1
    return StepSize(factor * state.size, slope, curvature, count, searching), taken


class Distance(NamedTuple):
    """Distance h of differences, which follows their curvature.

    Attributes:
      factor: Share of the longest h.
      curved: Average of meanₖ Δₖ / √meanₖ Δₖ² over the latest steps.
    """

    factor: float = 1.0
    curved: float = 0.0

    def adapted(self, changes: np.ndarray, least: float) -> "Distance":
        """Returns the distance after the finite differences Δ of a step."""
        if not len(changes):
            return self._replace(factor=_SHORTER * self.factor)
        size = math.sqrt(np.mean(changes**2))
        share = float(np.mean(changes)) / size if size > least else 0.0
        curved = _SHARE_DECAY * self.curved + (1 - _SHARE_DECAY) * share
        if abs(curved) > _CURVED and size > least:
            # The share of curvature is proportional to h.
            return Distance(_SHORTER * self.factor, _SHORTER * curved)
        return Distance(min(1.0, _LONGER * self.factor), curved)


class Bounded(NamedTuple):
    """Coordinates at a bound, to which the function falls.

    Directions have all coordinates. The part of coordinates that cannot move is taken
    from the slopes along the directions; otherwise a step would follow it.

    Attributes:
      box: Bounds.
      gradient: Gradient according to the latest slopes along each direction, shape [d].
    """

    box: Box
    gradient: np.ndarray

    def at_bound(self, x: np.ndarray) -> np.ndarray:
        """Returns which coordinates are at a bound, shape [d]."""
        return (x <= self.box.lower) | (x >= self.box.upper)

    def free(
        self, x: np.ndarray, slopes: np.ndarray, block: np.ndarray
    ) -> tuple[np.ndarray, float, "Bounded"]:
        """Returns the gradient of what can move, its square, and the next state.

        Args:
          x: The point.
          slopes: Slopes along the directions, shape [K].
          block: The directions, shape [K, d].
        """
        if not np.any(np.isfinite(self.box)):
            return slopes @ block, float(slopes @ slopes), self
        known = self.gradient + (slopes - block @ self.gradient) @ block
        held = np.where(known > 0, x <= self.box.lower, x >= self.box.upper)
        slopes = slopes - block @ np.where(held, known, 0)
        gradient = np.where(held, 0, slopes @ block)
        return gradient, float(slopes @ slopes), self._replace(gradient=known)


class Idle(NamedTuple):
    """Cycles of directions without progress.

    Attributes:
      value: The least value at the end of the latest cycle.
      cycles: Number of such cycles in succession.
    """

    value: float
    cycles: int = 0

    def after(self, value: float, resolution: float) -> "Idle":
        """Returns the state after one more cycle, whose least value is given."""
        least = _ROUNDINGS * resolution * abs(value) if np.isfinite(value) else 0.0
        falls = self.value - value > least
        return Idle(value, 0 if falls else self.cycles + 1)


def _around(
    start: Start, y: np.ndarray, block: np.ndarray, distance: Distance
) -> np.ndarray:
    """Returns y and y + h u for directions u, shape [K + 1, d].

    Near a bound, y is moved inside, so that all points have room.
    """
    box, y = start.box, start.box.clip(y)
    typical = max(_LEAST_SIZE, math.sqrt(np.mean(y**2)))
    h = distance.factor * math.sqrt(start.resolution * len(y)) * typical / 3
    room = np.minimum(h * np.max(abs(block), 0), (box.upper - box.lower) / 2)
    inside = np.clip(y, box.lower + room, box.upper - room)
    return box.clip(start.round(np.concatenate([inside[None], inside + h * block])))


def _slopes(
    points: np.ndarray,
    values: np.ndarray,
    block: np.ndarray,
    distance: Distance,
    resolution: float,
) -> tuple[np.ndarray, Distance]:
    """Returns the slopes along directions, and the next distance."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        changes = values[1:] - values[0]
        # Points are rounded, so the steps to them are measured.
        slopes = changes / np.einsum("kd,kd->k", points[1:] - points[0], block)
    is_known = np.isfinite(slopes)
    distance = distance.adapted(changes[is_known], resolution * abs(values[0]))
    return np.where(is_known, slopes, 0), distance


@dataclasses.dataclass(frozen=True)
class Many:
    """See `many`."""

    num_directions: int | None = None

    @guarded
    def __call__(self, start: Start) -> Steps:
        contract.check_continuous("many()", start)
        values = yield start.params[None]
        inner = functools.partial(steps, start, num_directions=self.num_directions)
        return (yield from scaled(inner, values))


@checks_names
def many(num_directions: int | None = None) -> Method:
    """Descent along few directions per step, with momentum and parabolas.

    A step evaluates differences along K orthonormal directions uₖ at the lookahead
    point of Nesterov's method, and the end of the step:

        y = θ + a (z − θ),    ĝ = Σₖ uₖ (f(y + h uₖ) − f(y)) / h,    θ ← y − η ĝ
        z ← z + a₀/a (θ − y),    a₀ = K/d,    a ← (√(a⁴ + 4 a²) − a²) / 2

    Directions are drawn without replacement: d directions in succession are a basis.
    The step size η is the minimum of the average of the latest parabolas, through the
    value and the slope at y and the value at θ.

    Momentum is reset if f(y) exceeds both f(θ) and the f(y) before, or if the step from
    y opposes the step from θ. After each d/K steps from b, the point 2θ − b is tried;
    if it is lower, the next step starts there. In this way, many short steps add up to
    a long one.

    Use it for smooth functions of more than about 100 parameters. Memory and time of a
    step are O(d K).

    A run ends if the value falls by less than eight roundings within d/K steps, twice
    in succession.

    Args:
      num_directions: K. By default √d, at least 10 and at most 32.

    Returns:
      The method.

    Raises:
      TypeError, ValueError: If `num_directions` is not a positive integer.

    Examples:
      >>> import radazo_jax as zo
      >>> zo.methods.many()
      Many(num_directions=None)

    References:
      Fercoq & Richtárik, Accelerated, Parallel, and Proximal Coordinate Descent, SIAM
      J. Optim. 2015, algorithm 1, <https://arxiv.org/abs/1312.5799>; restarted by the
      gradient as in O'Donoghue & Candès, Adaptive Restart for Accelerated Gradient
      Schemes, 2015, <https://arxiv.org/abs/1204.3982>. Pattern moves: Hooke & Jeeves,
      "Direct Search" Solution of Numerical and Statistical Problems, J. ACM 1961.
      Parabolas: Mutschler & Zell, Parabolic Approximation Line Search for DNNs, NeurIPS
      2020, <https://arxiv.org/abs/1903.11991>, with another slope and other averages.
    """
    if num_directions is not None:
        checks.check_int_at_least("num_directions", num_directions, 1)
    return Many(num_directions)


def directions(d: int, count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yields orthonormal directions in blocks of at most `count`, without end.

    The directions of a cycle are a basis: the rows of the discrete cosine transform in
    random order, with a random sign of each coordinate. The cosines of all rows have d
    different angles up to sign, which are tabulated.
    """
    cosines = math.sqrt(2 / d) * np.cos(np.pi / (2 * d) * np.arange(4 * d))
    odd = 2 * np.arange(d) + 1
    while True:
        signs = rng.choice([-1.0, 1.0], d)
        for rows in np.array_split(rng.permutation(d), math.ceil(d / count)):
            block = cosines[rows[:, None] * odd % (4 * d)] * signs
            block[rows == 0] *= math.sqrt(1 / 2)
            yield block


def steps(start: Start, value: float, num_directions: int | None = None) -> Steps:
    """Takes the steps of `many`.

    Args:
      start: The start.
      value: Its value, NaN if it failed.
      num_directions: K.
    """
    x, box, resolution = start.params, start.box, start.resolution
    d, value = len(x), float(value) if np.isfinite(value) else np.inf
    count = min(num_directions or min(max(math.isqrt(d), _FEWEST), _MOST), d)
    blocks, cycle = directions(d, count, start.rng), math.ceil(d / count)
    first, around = count / d, functools.partial(_around, start)
    best, highest, previous = End(x, value, ""), value, np.inf
    ahead, size, distance = Lookahead(x, 0.0), StepSize(), Distance()
    base, since, block, idle = x, 0, next(blocks), Idle(value)
    bounded = Bounded(box, np.zeros(d))
    learns = cycle if np.any(bounded.at_bound(x)) else 0
    for number in itertools.count(1):
        if since >= cycle:  # A pattern move is due.
            far = box.clip(start.round(2 * x - base))
            far_value = float((yield far[None])[0])
            if far_value < value:
                ahead = ahead._replace(z=ahead.z + far - x)
                x, value = far, far_value
            else:
                base, since = x, 0
        near = box.clip(ahead.point(x))
        points = around(near, block, distance)
        values = yield from _values(points, x, value)
        slopes, distance = _slopes(points, values, block, distance, resolution)
        gradient, slope, bounded = bounded.free(near, slopes, block)
        before = float(values[0])
        rises, previous, since = before > max(value, previous), before, since + 1
        block, restart = next(blocks), Lookahead(x, first)
        # Near a bound, y is moved, and may be higher than the start.
        is_low = before <= highest or np.array_equal(near, x)
        if 0 < slope < np.inf and is_low and number > learns:
            if not size.size:
                size = size._replace(size=_FIRST * (abs(before) or 1.0) / slope)
            new = box.clip(start.round(near - size.size * gradient))
            # Directions that are all new gather nothing.
            no_momentum = Lookahead(new, 0.0 if number < cycle else first)
            moved = ahead.moved(x, near, new, first) if number > cycle else no_momentum
            if np.any(new != near):
                after = float((yield new[None])[0])
                parabola = _parabola(new - near, gradient, slope, before, after)
                size, is_taken = adapted_size(size, parabola, highest, resolution)
                if is_taken:
                    x, value, restart = new, after, no_momentum
                    restart = no_momentum if rises else moved
        ahead = restart
        if value < best.value:
            best = End(x, value, "")
        if number % max(cycle, _FEWEST) == 0:
            idle = idle.after(best.value, resolution)
            searches = size.searching and size.size > 0
            if idle.cycles >= (_SEARCHES if searches else _IDLE):
                return best._replace(reason=decided(best.value, size.curvature > 0))
    raise AssertionError("unreachable")


def _values(points: np.ndarray, x: np.ndarray, value: float) -> Part[np.ndarray]:
    """Evaluates points, without the first one if it is x, whose value is known."""
    if np.array_equal(points[0], x):
        return np.r_[value, (yield points[1:])]
    return (yield points)


def _parabola(
    step: np.ndarray, gradient: np.ndarray, slope: float, before: float, after: float
) -> Parabola:
    """Returns the parabola along a step, along a gradient whose square is `slope`."""
    fall = -(step @ gradient) * slope / (gradient @ gradient)
    return Parabola(fall, before, after, step @ step)
