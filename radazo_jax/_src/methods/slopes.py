"""Quasi-Newton steps along differences of values."""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from radazo_jax._src.base import checks
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.methods import contract, noise
from radazo_jax._src.methods.contract import Ask, End, Method, Part, Start, Steps
from radazo_jax._src.methods.ends import Reason, decided, guarded
from radazo_jax._src.methods.points import (
    AxisDifferences,
    Space,
    both_sides,
    central,
    forward,
    scaled,
)

# A step is accepted if it lowers the value by this share of what the slope promises,
# and lengthened by the factor unless it has less than this share.
_SUFFICIENT, _ENOUGH, _FURTHER = 0.1, 0.7, 2.5

# The number of lengthened steps in the first search and later, and of shorter tries.
_LENGTHENED_FIRST, _LENGTHENED, _TRIES = 6, 2, 9

# A shorter try is the minimum of a parabola, within these shares.
_SHORTEST, _LONGEST = 0.1, 0.5

# A jump: a try of this share of the length, or less, is at least this share as high.
_MUCH_SHORTER, _AS_HIGH, _ROUNDINGS = 0.2, 0.5, 1e3

# Values at one point that differ by more than this share are noise.
NOISY = 1e-6

# The first distance of points that show noise, in spans.
_PROBE = 1e-5

# So many directions in a row that ended before a jump will end there again.
_AT_JUMPS = 5

# A step is cut short if it has less than this share of what was promised for all of it.
# After so many in a row, moves of this many sizes show whether slopes miss something.
_CUT, _AT_CUTS, _LONG = 1e-2, 3, 0.3

# A step may be so many times as long as the longest one so far.
_REACH = 10.0

# The longest differences, in spans, and their factor once they led nowhere.
_FAR, _LONGER = 1e-2, 300.0

# The value falls no more if it falls by less than so many roundings, twice.
_EQUAL = 8.0

# A rise at both sides by so many roundings shows curvature.
_CURVE = 2.0

# The value hardly falls if so many steps in a row lower it by less than this share, or
# are all shorter than this share of what matters.
_CRAWL, _HARDLY, _CLOSE = 5, 1e-10, 1e-9

# Curvatures of less than this share of the largest one may be errors of a model.
_FLAT = 1e-6

# The least curvature of a step that the memory keeps.
_CURVED = 1e-10


class Memory:
    """The latest steps and changes of the gradient: limited-memory BFGS.

    The inverse Hessian matrix begins as (s·y / y·y) I of the newest step.

    References:
      Nocedal & Wright, Numerical Optimization, 2006, algorithm 7.4.
    """

    def __init__(self, most: int):
        self.most = most
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, step: np.ndarray, change: np.ndarray) -> None:
        """Keeps a step, unless the function is not convex along it."""
        if step @ change > _CURVED * np.linalg.norm(step) * np.linalg.norm(change):
            self.pairs = [*self.pairs, (step, change)][-self.most :]

    def know(self, hessian: np.ndarray) -> None:
        """Keeps a step along each axis of a Hessian matrix, with its change."""
        curvatures, basis = np.linalg.eigh(hessian)
        for curvature, axis in zip(curvatures, basis.T, strict=True):
            if curvature > _FLAT * curvatures[-1]:
                self.add(axis, curvature * axis)

    def direction(self, gradient: np.ndarray, free: np.ndarray) -> np.ndarray:
        """Returns −H g within the parameters that are free, shape [d].

        Args:
          gradient: Shape [d].
          free: Whether a parameter may move: bool, shape [d].
        """
        pairs = [(s * free, y * free) for s, y in self.pairs]
        least = 1e-2 * _CURVED
        pairs = [
            (s, y)
            for s, y in pairs
            if s @ y > least * np.linalg.norm(s) * np.linalg.norm(y)
        ]
        q, shares = gradient * free, []
        for s, y in reversed(pairs):
            shares.append(s @ q / (s @ y))
            q = q - shares[-1] * y
        if pairs:
            s, y = pairs[-1]
            q = q * (s @ y) / (y @ y)
        for (s, y), share in zip(pairs, reversed(shares), strict=True):
            q = q + (share - y @ q / (s @ y)) * s
        return -q


class Searched(NamedTuple):
    """The end of a line search.

    Attributes:
      x: The lower point, `None` if there is none.
      value: Its value.
      jumps: Whether the value jumps along the line.
      lied: Whether the first try had nothing of what the slope promised.
    """

    x: np.ndarray | None
    value: float
    jumps: bool = False
    lied: bool = False


def line_search(
    x: np.ndarray,
    value: float,
    gradient: np.ndarray,
    direction: np.ndarray,
    space: Space,
    most: int,
    tries: int = _TRIES,
) -> Part[Searched]:
    """Takes a whole step, longer ones if it promises more, or shorter ones.

    Args:
      x: The point, shape [d].
      value: Its value.
      gradient: Slopes there, shape [d].
      direction: The whole step, shape [d].
      space: The space of the points.
      most: Number of times that the step may be lengthened.
      tries: Number of shorter steps.
    """

    def ahead(t: float) -> Part[tuple[np.ndarray, float, float]]:
        new = space.point(x + t * direction)
        at = float((yield new[None])[0])
        return new, at if np.isfinite(at) else np.inf, float(gradient @ (new - x))

    t = 1.0
    new, at, promised = yield from ahead(t)
    if at < value and at <= value + _SUFFICIENT * promised:
        for _ in range(most):
            if at >= value + _ENOUGH * promised:
                break
            further, lower, promised = yield from ahead(_FURTHER * t)
            if not lower < at:
                break
            t, new, at = _FURTHER * t, further, lower
        return Searched(new, at)
    lied, jumps, along = abs(at - value) < -0.1 * promised, False, gradient @ direction
    for number in range(tries):
        rise, before = at - value, t
        curve = rise - along * t
        share = 0.9 if number == 0 else _LONGEST
        if np.isfinite(rise):
            share = -along * t / (2 * curve) if curve > 0 else _LONGEST
            share = float(np.clip(share, _SHORTEST, _LONGEST))
        t *= share
        new, at, promised = yield from ahead(t)
        if at < value and at <= value + _SUFFICIENT * promised:
            return Searched(new, at)
        rounding = _ROUNDINGS * np.finfo(float).eps * abs(value)
        high = at - value > max(rounding, _AS_HIGH * rise)
        jumps |= t <= _MUCH_SHORTER * before and bool(high) and np.isfinite(at)
    return Searched(None, value, jumps, lied)


class Ended(NamedTuple):
    """The end of slopes.

    Attributes:
      params: Best point, shape [d].
      value: Its value.
      reason: The reason.
      dead: Parameters whose last difference was exactly 0: bool, shape [d].
      resolution: Relative spacing of the values, or their relative noise.
    """

    params: np.ndarray
    value: float
    reason: Reason
    dead: np.ndarray
    resolution: float


class Descent:
    """A descent along slopes: the point, what is known there, and how it is measured.

    Attributes:
      x: The point, shape [d].
      value: Its value.
      start: The value at the start of the run.
      resolution: Relative spacing of the values, or their relative noise.
      spacing: Length of the differences, in spans.
      twosided: Whether differences are central ones.
      found: The latest differences.
      memory: The latest steps.
      reach: Length of the longest step so far, in sizes.
      nowhere: Number of times that central differences led nowhere.
      latest: The latest values of steps.
      close: Number of steps in a row that hardly moved.
      equal: Number of steps in a row that hardly lowered the value.
      jumps: Number of directions in a row that ended before a jump.
      cuts: Number of steps in a row that were cut short.
      before: The point and the slopes before the latest step, if it led lower.
    """

    def __init__(self, x: np.ndarray, value: float, start: float, resolution: float):
        self.x, self.value, self.start = x, value, start
        self.resolution = resolution
        self.memory = Memory(max(10, min(2 * len(x), 40)))
        self.twosided, self.reach, self.nowhere = False, 0.0, 0
        self.latest: list[float] = []
        self.close = self.equal = self.jumps = self.cuts = 0
        self.is_probed = False
        self.before: tuple[np.ndarray, np.ndarray] | None = None
        self.spacing = self.length(1 / 2)
        self.found = AxisDifferences.none(x)

    def length(self, power: float) -> float:
        """Returns the length of differences that balances noise and curvature."""
        return min(_FAR, self.resolution**power)

    def resolved(self) -> float:
        """Returns the least change of the value that means anything."""
        eps = self.resolution
        return eps * (abs(self.value) + eps**0.5 * abs(self.start))

    def ended(self, reason: Reason) -> Ended:
        return Ended(self.x, self.value, reason, self.found.dead, self.resolution)

    def coarser(self, resolution: float) -> None:
        """Begins anew with differences for a coarser resolution of the values."""
        self.resolution, self.memory = resolution, Memory(self.memory.most)
        self.spacing = self.length(1 / 3 if self.twosided else 1 / 2)

    def crawls(self, moved: np.ndarray, space: Space) -> bool:
        """Says whether the latest steps have led to hardly anything, after one more."""
        is_close = np.all(abs(moved) <= _CLOSE * space.spans(self.x))
        self.latest = [*self.latest, self.value][-_CRAWL:]
        self.close = self.close + 1 if is_close else 0
        hardly = self.latest[0] - self.value <= _HARDLY * abs(self.value)
        return (hardly and len(self.latest) == _CRAWL) or self.close >= _CRAWL

    def both_sides(self) -> None:
        """Takes central differences from now on."""
        self.twosided, self.latest, self.close = True, [], 0
        self.spacing = max(self.spacing, self.length(1 / 3))

    def measure(self, space: Space) -> Part[None]:
        """Takes the differences at the point."""
        lengths = self.spacing * space.spans(self.x)
        take = central if self.twosided else forward
        self.found = yield from take(self.x, self.value, lengths, space)


def steps(
    x: np.ndarray,
    value: float,
    space: Space,
    resolution: float,
    *,
    begun: AxisDifferences | None = None,
    hessian: np.ndarray | None = None,
    first: float | None = None,
    tolerance: float | None = None,
) -> Part[Ended]:
    """Takes quasi-Newton steps along differences, until they lead nowhere.

    Forward differences serve until they lead nowhere, and central ones then: the error
    of a difference is not called a minimum.

    Args:
      x: First point, shape [d].
      value: Its value, finite.
      space: The space of the points.
      resolution: Relative spacing of the values, or their relative noise.
      begun: Differences at x if they are known.
      hessian: Hessian matrix near x if it is known, shape [d, d].
      first: Value at the start of the run, if it began elsewhere.
      tolerance: See `untuned`.
    """
    at = Descent(x, value, value if first is None else first, resolution)
    if hessian is not None:
        at.memory.know(hessian * np.outer(space.sizes, space.sizes))
    while True:
        if begun is None:
            yield from at.measure(space)
        else:
            at.found, begun = begun, None
        gradient = at.found.gradient
        if not np.any(at.found.steps):
            return at.ended(Reason.FIXED)
        if at.before is not None:
            step, change = at.x - at.before[0], gradient - at.before[1]
            at.memory.add(step / space.sizes, change * space.sizes)
        direction, free = _direction(at, gradient, space)
        promised = -float(gradient @ direction)
        searched = Searched(None, at.value)
        if promised > (2 * at.resolved() if at.memory.pairs else 0):
            most = _LENGTHENED_FIRST if at.before is None else _LENGTHENED
            searched = yield from line_search(
                at.x, at.value, gradient, direction, space, most
            )
        if searched.x is not None:
            reason = yield from _moved(
                at, searched.x, searched.value, promised, space, tolerance
            )
            if reason is not None:
                return at.ended(reason)
            if at.equal < 2:
                continue
        at.before, at.jumps = None, at.jumps + searched.jumps
        if at.jumps >= _AT_JUMPS:
            return at.ended(Reason.JUMPS)
        settled = at.equal >= 2 or _is_small(at, gradient * free, space)
        reason = yield from _without_a_step(at, searched, settled, space)
        if reason is not None:
            return at.ended(reason)
        at.equal = 0


def _moved(
    at: Descent,
    x: np.ndarray,
    value: float,
    promised: float,
    space: Space,
    tolerance: float | None,
) -> Part[Reason | None]:
    """Moves to a lower point; returns why slopes end there, or `None`.

    Args:
      at: The descent.
      x: The point, shape [d].
      value: Its value.
      promised: Fall that the slope promised for the whole step.
      space: The space of the points.
      tolerance: See `untuned`.
    """
    fall, moved = at.value - value, x - at.x
    gradient, at.jumps = at.found.gradient, 0
    at.before = at.x, gradient
    at.reach = max(at.reach, float(np.linalg.norm(moved / space.sizes)))
    at.x, at.value = x, value
    if tolerance is not None and _within(tolerance, at, moved, fall, space):
        return Reason.WITHIN
    at.cuts = at.cuts + 1 if -gradient @ moved < _CUT * promised else 0
    if at.cuts == _AT_CUTS and not at.is_probed:
        at.is_probed = True
        if (yield from _is_lower_around(at, space)):
            return Reason.NOWHERE
    at.equal = at.equal + 1 if fall <= _EQUAL * at.resolved() else 0
    if at.crawls(moved, space):
        if at.twosided:
            return Reason.SETTLED
        at.both_sides()
        at.equal = 0
    return None


def _without_a_step(
    at: Descent, searched: Searched, settled: bool, space: Space
) -> Part[Reason | None]:
    """Says why slopes end here, or measures them in another way: the result is `None`.

    Args:
      at: The descent.
      searched: The line search that found nothing, or nothing more.
      settled: Whether slopes and steps are as small as at a minimum.
      space: The space of the points.
    """
    curved = at.found.rise > _CURVE * at.resolution * abs(at.value)
    if at.twosided and settled and curved:
        return decided(at.value, curved)
    if searched.x is None and at.nowhere == 0:
        again = float((yield Ask(at.x[None], again=True))[0])
        differs = abs(again - at.value) / abs(at.value) if at.value else abs(again)
        if differs > NOISY:
            at.resolution = differs
            return Reason.NOISE
        if differs > at.resolution:
            # Sums in another order, for example: a coarser rounding.
            at.coarser(_EQUAL * differs)
            return None
    if searched.lied and not (at.twosided or settled):
        found = yield from noise.measured(at.x, at.value, _PROBE, space)
        if found is not None and found > at.resolution:
            at.coarser(found)
            return None
    if not at.twosided:
        at.both_sides()
        return None
    at.nowhere += 1
    at.spacing = min(_LONGER * at.spacing, max(_FAR, at.spacing))
    at.memory = Memory(at.memory.most)
    if at.nowhere < 2:
        return None
    changes = np.any(~at.found.dead & (at.found.steps != 0))
    return decided(at.value, curved or bool(changes)) if settled else Reason.NOWHERE


def _is_lower_around(at: Descent, space: Space) -> Part[bool]:
    """Moves each parameter far to both sides, and keeps the best point."""
    sides = yield from both_sides(at.x, at.value, _LONG * space.sizes, space)
    if sides.lowest is None or not sides.change < 0:
        return False
    at.x, at.value = sides.lowest, at.value + sides.change
    return True


def _direction(
    at: Descent, gradient: np.ndarray, space: Space
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a direction of descent, and whether each parameter is free to move.

    A slope that pushes out of the box at a bound is no reason to move.
    """
    box, unit = space.box, space.sizes
    out = ((at.x <= box.lower) & (gradient > 0)) | (
        (at.x >= box.upper) & (gradient < 0)
    )
    g, free = gradient * unit, ~out
    if not np.any(g * free):
        return np.zeros_like(g), free
    direction = at.memory.direction(g, free)
    length = max(float(np.linalg.norm(g * free)), np.finfo(float).tiny)
    far = max(1.0, float(np.linalg.norm((at.x - space.origin) / unit)))
    if not at.memory.pairs:
        # A step that would bring the value to 0, unless it is very long.
        to_zero = abs(at.value) / length if at.value else np.inf
        direction = -g * free / length * min(to_zero, far)
    elif not g @ direction < 0:
        direction = -g * free / length * min(length, far)
    reach = _REACH * max(at.reach, far)
    longest = float(np.linalg.norm(direction))
    if longest > reach:
        direction = direction * (reach / longest)
    return direction * unit, free


def _is_small(at: Descent, gradient: np.ndarray, space: Space) -> bool:
    """Says whether slopes are as small as at a minimum, as far as values resolve it."""
    least = at.resolution ** (1 / 3) * max(abs(at.value), abs(at.start))
    return bool(np.all(abs(gradient) * space.spans(at.x) <= least))


def _within(
    tolerance: float, at: Descent, moved: np.ndarray, fall: float, space: Space
) -> bool:
    """Says whether a step moved nothing beyond a tolerance."""
    little = abs(moved) <= tolerance * np.maximum(abs(at.x), space.sizes)
    return bool(np.all(little)) and fall <= tolerance * max(
        abs(at.value), abs(at.start)
    )


@dataclasses.dataclass(frozen=True)
class Slopes:
    """See `slopes`."""

    tolerance: float | None = None
    scale: Any = 1.0

    @guarded
    def __call__(self, start: Start) -> Steps:
        contract.check_continuous("slopes()", start)
        values = yield start.params[None]
        if not np.isfinite(values[0]):
            return End(start.params, float(values[0]), Reason.FAILED)
        return (yield from scaled(functools.partial(self._inner, start), values))

    def _inner(self, start: Start, value: float) -> Steps:
        space = Space.of(start, contract.sizes(start, self.scale))
        end = yield from steps(
            start.params, value, space, start.resolution, tolerance=self.tolerance
        )
        return End(end.params, end.value, end.reason)


@checks_names
def slopes(tolerance: float | None = None, scale: Any = 1.0) -> Method:
    """Quasi-Newton steps along differences of values.

    A step evaluates a difference along each parameter, and one to a few points along

        θ ← θ + t p,    p = −H ĝ,    ĝᵢ = (f(θ + sᵢ eᵢ) − f(θ)) / sᵢ

    H is the inverse Hessian matrix of limited-memory BFGS. The step t is 1, longer if
    the value falls nearly as fast as its slope promises, or shorter by parabolas until
    it falls. A parameter at a bound to which its slope pushes stays there.

    Use it for smooth functions of up to about 100 parameters. If values have noise or
    steps, use `untuned` or `evolution`.

    Differences have the length √ε, ε being the resolution of the values. If a slope
    promises what no step finds, the noise of the values is measured, and replaces ε.
    If they lead nowhere, central differences of the length ∛ε follow. The run ends if
    these promise less than ε; if nothing moves; or if five directions in succession
    lead to a jump of the value.

    Args:
      tolerance: τ, a number in [0, 1), or `None`; see `untuned`.
      scale: Sizes of the parameters; see `untuned`.

    Returns:
      The method.

    Raises:
      TypeError, ValueError: If an argument has the wrong type or is out of range.

    Examples:
      >>> import radazo_jax as zo
      >>> zo.methods.slopes()
      Slopes(tolerance=None, scale=1.0)

    References:
      Nocedal & Wright, Numerical Optimization, 2006, algorithms 7.4 and 7.5, and
      section 8.1. Moré & Wild, Estimating Derivatives of Noisy Simulations, ACM TOMS
      2012.
    """
    if tolerance is not None:
        tolerance = checks.check_unit_interval("tolerance", tolerance)
    return Slopes(tolerance, scale)
