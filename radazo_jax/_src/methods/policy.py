"""The method that tunes nothing: what the first values say, and what follows."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np

from radazo_jax._src.base import checks
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.methods import (
    contract,
    evolution,
    far,
    grid,
    many,
    noise,
    quadratic,
    slopes,
)
from radazo_jax._src.methods.contract import Ask, Box, End, Method, Part, Start, Steps
from radazo_jax._src.methods.ends import Reason, decided, guarded
from radazo_jax._src.methods.points import (
    AxisDifferences,
    Space,
    finite,
    forward,
    scaled,
)

# The first step sizes of a strategy: at a start, next to a jump, and once slopes have
# led nowhere.
_WIDE, _ACROSS, _NARROW = 0.3, 0.1, 0.03

# Kinds of functions that slopes suit.
_SMOOTH = Reason.MANY, Reason.DIGITS, Reason.JITTER, Reason.APART, Reason.SMOOTH

# Ends of slopes with nothing lower nearby.
_FOUND = Reason.MINIMUM, Reason.SETTLED, Reason.FLAT

# The first step sizes after ends of slopes; `_ACROSS` after any other.
_WIDTHS: dict[str, float] = {
    **dict.fromkeys(_FOUND, _WIDE),
    Reason.NOWHERE: _NARROW,
}

# Values with more relative noise than this have no short differences.
_COARSE = 1e-4

# Slopes that lowered the value by less than this share have not left a saddle or a
# plateau; so many steps of a strategy look around then.
_LITTLE, _GLANCES = 1e-6, 5

# Values are equal up to so many roundings.
_EQUAL = 8.0

# The number of times that a look along dead parameters leads back to slopes.
_LOOKS = 30

# Up to so many parameters, slopes are differences along all of them.
_MOST = 100

# Ends of slopes that moves along the parameters cannot follow.
_UNMOVED = Reason.WITHIN, Reason.NOISE, Reason.FIXED

MOVES = "moves along the parameters"


class Plan(NamedTuple):
    """The plan that follows from the first values.

    Attributes:
      end: The best point so far, its value, and the kind of the function in words.
      smooth: Whether slopes can lead to a minimum.
      space: The space of the points.
      begun: The value at the start.
      resolution: Relative spacing of the values, or their relative noise.
      noise: Change of the value at the start between two evaluations.
      first: Differences at the point, if they are known.
      hessian: Hessian matrix near the point, if a model has one.
      sizes: Sizes of the parameters, if they were sought.
      cells: Moves by which parameters that seem to have no effect change the value.
    """

    end: End
    smooth: bool
    space: Space
    begun: float
    resolution: float
    noise: float = 0.0
    first: AxisDifferences | None = None
    hessian: np.ndarray | None = None
    sizes: np.ndarray | None = None
    cells: np.ndarray | None = None

    def resolved(self, *values: float) -> float:
        """Returns the least change that matters next to these values."""
        return _EQUAL * self.resolution * max(map(abs, values))

    def hidden(self, fall: float) -> float:
        """Returns the step size within which noise hides a minimum after a fall."""
        return min(max(math.sqrt(self.noise / fall), _NARROW), _WIDE)


@dataclasses.dataclass(frozen=True)
class Untuned:
    """See `untuned`."""

    tolerance: float | None = None
    restarts: int | None = None
    scale: Any = 1.0

    @guarded
    def __call__(self, start: Start) -> Steps:
        gridded, x = np.any(start.step), start.params
        near = x if gridded else _near(self, start, math.sqrt(start.resolution))
        values = yield Ask(np.stack([x, near]), again=True)
        steps = _on_grid if gridded else _run
        end = yield from scaled(functools.partial(steps, self, start), values)
        if end.unused is None:
            return end
        still = np.where(end.unused, x, end.params)
        value = float((yield still[None])[0])
        same = value <= end.value + _EQUAL * start.resolution * abs(end.value)
        return end._replace(params=still, value=value) if same else end

    def sizes(self, start: Start, x: np.ndarray) -> np.ndarray:
        """Returns the sizes of the parameters at a point, shape [d]."""
        return contract.sizes(start._replace(params=x), self.scale)

    def left(self, start: Start) -> float:
        """Returns the number of restarts of a run."""
        if self.restarts is not None:
            return self.restarts
        return math.inf if start.limited else 0


@checks_names
def untuned(
    tolerance: float | None = None, restarts: int | None = None, scale: Any = 1.0
) -> Method:
    """The default method: the first values choose the steps, later ones change them.

    The second point is a short move of all parameters away. If its value differs much,
    the lower point is evaluated again, which shows noise; if it does not differ, a
    longer move shows steps. Unless there are steps, `quadratic` follows up to 6
    parameters, or 20 under noise, if its first changes differ by less than 10³, and as
    long as its models lower the value; its last model starts the slopes. Noise, steps
    and more than 100 parameters are known then. Otherwise a short difference along each
    parameter decides. The cases are

    - *noise*, if two values of a point differ by more than 10⁻⁶ of them: `evolution`,
      which has an estimate of the minimum besides its points;
    - *values of few digits*, if changes are whole multiples of one, or are 0 and differ
      at longer moves: the noise is measured, and differences are as long as it says;
    - *jitter* of up to 20 parameters, if changes do not add up to the change along all
      of them: the noise is measured, and `quadratic` follows;
    - *steps*, if all changes are 0 or jumps: differences that cross the steps as long
      as these lead down. If moves of each parameter then raise the value at both sides,
      as along a parabola, a minimum of printed values was found; otherwise `evolution`
      follows;
    - *sizes*, if slopes differ by more than 10⁴, or changes are hidden by rounding, and
      models were not used, or were given up: for each parameter a move is sought that
      changes the value by about a hundredth;
    - *slopes* otherwise: `slopes`, or `many` if there are more than 100 parameters.

    Slopes that lead nowhere are measured at both sides and at longer distances before
    anything is called a minimum: some move must rise at both sides. A parameter whose
    moves changed nothing is moved up and down, by up to ten of its sizes, before it is
    called unimportant, and stays at θ₀. If slopes lead nowhere or to a jump, or if
    their steps must be cut short, long moves along one parameter after another follow,
    and then `evolution`: its step size is 0.03 if slopes lead nowhere, 0.1 at a jump or
    if parameters change the value by steps, and 0.3 otherwise.

    If restarts are left, long moves begin at θ₀ once more after the first slopes, which
    may have missed a lower minimum. They do without restarts, too, if the slopes went
    far, and found no minimum there.

    After a minimum the run ends, or `evolution` starts again around the best point,
    with twice as many points each time up to a limit, and any lower value leads back to
    slopes. At a saddle or on a plateau, a few of its steps look around even if there is
    no restart. A run whose last stage is `evolution` ends as that does: its values are
    equal, or no longer fall.

    With a `step` of the run, quadratic models over the grid come first, and a move of
    each parameter to its neighbors. They end if no neighbor is better; a neighbor of a
    parameter is tried with continuous parameters as the model predicts them there. If a
    budget ends the run, `evolution` follows, and models from each lower value. Under
    noise, or for more than 100 parameters, `evolution` comes first.

    Args:
      tolerance: τ, a number in [0, 1), or `None`. The run ends if a step moved neither
        the value nor any parameter beyond it: |f′ − f| ≤ τ max(|f′|, |f(θ₀)|) and
        |θ′ᵢ − θᵢ| ≤ τ max(|θ′ᵢ|, size of i). By default, the resolution of the values
        decides. It has no effect with a `step` of the run.
      restarts: Number of restarts after the first minimum, at least 0. By default any
        number if a budget ends the run, and none otherwise.
      scale: Order of magnitude of the distance to the minimum: a positive number, or a
        tree like the parameters of numbers and arrays that broadcast to the leaves.

    Returns:
      The method.

    Raises:
      TypeError, ValueError: If an argument has the wrong type or is out of range.

    Examples:
      >>> import radazo_jax as zo
      >>> zo.methods.untuned(restarts=2)
      Untuned(tolerance=None, restarts=2, scale=1.0)

    References:
      Moré & Wild, Estimating Computational Noise, SIAM J. Sci. Comput. 2011,
      <https://doi.org/10.1137/100786125>; Nocedal & Wright, Numerical Optimization,
      2006, chapters 3, 7 and 8; Hansen, The CMA Evolution Strategy: A Tutorial, 2016,
      <https://arxiv.org/abs/1604.00772>; Hooke & Jeeves, "Direct Search" Solution of
      Numerical and Statistical Problems, Journal of the ACM 1961.
    """
    if tolerance is not None:
        tolerance = checks.check_unit_interval("tolerance", tolerance)
    if restarts is not None:
        restarts = checks.check_int_at_least("restarts", restarts, 0)
    return Untuned(tolerance, restarts, scale)


def _on_grid(method: Untuned, start: Start, value: float, again: float) -> Steps:
    """Minimizes over a grid, and over the parameters that have no step."""
    noisy = abs(again - value) > slopes.NOISY * abs(value)
    value = value if np.isfinite(value) else again
    return grid.minimized(start, value, noisy, method.scale, method.left(start))


def _near(method: Untuned, start: Start, length: float) -> np.ndarray:
    """Returns the end of a move of all parameters from the start, in spans."""
    space, x = Space.of(start, start.flatten(method.scale)), start.params
    return space.ends(x, length * space.spans(x))


def _repeated(
    method: Untuned, start: Start, value: float, near: float
) -> Part[tuple[float, float, bool]]:
    """Looks for noise if a short move changes the value much, and else for steps.

    Args:
      method: The method.
      start: The start.
      value: Its value, NaN if it failed.
      near: The value after a short move of all parameters.

    Returns:
      The value at the start, the change of the lower value if it is evaluated again,
      and whether a longer move changes nothing either.
    """
    if near == value:
        further = yield _near(method, start, noise.PROBE)[None]
        return value, 0.0, bool(further[0] == value)
    if abs(near - value) <= slopes.NOISY * abs(value):
        return value, 0.0, False
    lower = near < value
    x = _near(method, start, math.sqrt(start.resolution)) if lower else start.params
    again = float((yield Ask(x[None], again=True))[0])
    if not np.isfinite(value):
        return again, 0.0, False
    changed = abs(again - (near if lower else value))
    return value, changed * (changed > slopes.NOISY * abs(value)), False


def _run(method: Untuned, start: Start, value: float, near: float) -> Steps:
    """Takes the steps that the first values suggest, followed by others."""
    d, left = len(start.params), method.left(start)
    population, sigma = evolution.default_population(d), _WIDE
    if np.array_equal(*start.box):
        return End(start.params, value, Reason.FIXED)
    first = yield from _repeated(method, start, value, near)
    plan = yield from _first_values(method, start, *first)
    best, before, descends, reason = plan.end, plan.begun, plan.smooth, plan.end.reason
    origin = End(start.params, value, "") if np.isfinite(value) else None
    while True:
        # A strategy ends at a value below the limit, or after so many steps.
        limit, most = -math.inf, None
        units = method.sizes(start, best.params)
        if descends:
            start.report("slopes()" if d <= _MOST else "many()", reason)
            best, plan = yield from _search(method, start, plan, best, origin, left)
            origin = None
            sigma = _WIDTHS.get(best.reason, _ACROSS)
        if best.reason == Reason.WITHIN:
            return best
        if best.reason == Reason.NOISE and best.value < before:
            sigma = plan.hidden(before - best.value)
        if best.reason in _FOUND:
            limit = best.value - plan.resolved(best.value, value)
            # At a saddle or on a plateau slopes are as small as at a minimum.
            moved = before - best.value > _LITTLE * abs(before)
            if left <= 0:
                if moved or not descends:
                    return best
                most = _GLANCES
            left -= moved  # To look around at a saddle is no restart.
        elif descends:
            units = units if plan.sizes is None else plan.sizes
            if best.reason == Reason.CELLS and plan.cells is not None:
                limit = best.value - plan.resolved(best.value, value)
                units = np.maximum(units, plan.cells / sigma)
        elif not np.isfinite(best.value):
            limit = math.inf
        found, interrupted = yield from _until(
            _evolution(start, best, reason, units, sigma, population, plan.noise),
            *(limit, most),
        )
        if interrupted and found.value < best.value:
            before, reason = found.value, Reason.LOWER
            if not np.isfinite(best.value):
                ahead = start._replace(params=found.params)
                plan = yield from _first_values(method, ahead, before)
                found = plan.end
            best, descends = found, plan.smooth
            continue
        if interrupted:
            return best
        best = found if found.value < best.value else best
        left -= 1
        if left < 0:
            return best._replace(reason=found.reason)
        descends, sigma, reason = False, _WIDE, found.reason
        # The next stage follows for the reason of this one.
        best = best._replace(reason="")
        population = evolution.doubled(population, d)


def _evolution(
    start: Start,
    best: End,
    reason: str,
    units: np.ndarray,
    sigma: float,
    population: int,
    noise: float,
) -> Steps:
    """Returns the steps of a strategy from the best point, which it reports.

    Parameters that changed no value stay.
    """
    box, reason = start.box, best.reason or reason
    reason = Reason.LOOKING if reason == Reason.MINIMUM else reason
    start.report(f"evolution(step_size={sigma:.2g})", reason)
    if best.unused is not None:
        box = Box(*(np.where(best.unused, best.params, bound) for bound in box))
    ahead = start._replace(params=best.params, box=box)
    return evolution.steps(ahead, best.value, units, sigma, population, noise > 0)


def _until(inner: Steps, limit: float, most: int | None) -> Part[tuple[End, bool]]:
    """Takes steps until a value is below a limit, or until so many have none.

    Returns:
      The end, and whether the steps were interrupted.
    """
    lowest, steps = End(np.zeros(0), np.inf, ""), 0

    def answer(asked: Ask) -> Part[np.ndarray | None]:
        nonlocal lowest, steps
        values = yield asked
        comparable, steps = finite(values), steps + 1
        i = int(np.argmin(comparable))
        lowest = End(asked.points[i], float(comparable[i]), "")
        return None if lowest.value < limit or steps == most else values

    end = yield from contract.answered(inner, answer)
    return end or lowest, end is None


def _first_values(
    method: Untuned,
    start: Start,
    value: float,
    changed: float = 0.0,
    flat: bool = False,
) -> Part[Plan]:
    """Says from values near a point which method suits the function.

    Args:
      method: The method.
      start: The point.
      value: Its value, NaN if it failed.
      changed: Change of the value if it is evaluated again; 0 without noise.
      flat: Whether short moves of all parameters change nothing.
    """
    x, begun, noisy = start.params, value, changed > 0
    spacing = math.sqrt(start.resolution)
    space, hessian = Space.of(start, start.flatten(method.scale)), None

    def plan(kind: str, **known: Any) -> Plan:
        known = {"resolution": start.resolution, "hessian": hessian} | known
        return Plan(End(x, value, kind), kind in _SMOOTH, space, begun, **known)

    if not np.isfinite(value):
        value = np.inf
        return plan(Reason.FAILED)
    if len(x) <= (quadratic.FEW_IF_NOISY if noisy else quadratic.FEW) and not flat:
        x, value, hessian = yield from _models(method, start, value, changed)
    if noisy:
        return plan(Reason.NOISE, noise=changed)
    if len(x) > _MOST:
        return plan(Reason.MANY)
    if flat:
        return (yield from _across(method, start, plan(Reason.STILL)))
    first = yield from forward(x, value, spacing * space.spans(x), space)
    x = yield from _returned(start, x, value, first.dead)
    short = yield from noise.short(x, value, begun, first, space)
    if short is noise.Short.FLAT:
        return plan(Reason.SMOOTH, first=first)
    if short is noise.Short.DIGITS:
        found = yield from noise.measured(x, value, noise.PROBE, space)
        if found is not None and found < _COARSE:
            return plan(Reason.DIGITS, resolution=found)
        jumps = np.all(first.dead | noise.are_jumps(first, value))
        first = first._replace(dead=first.dead | (found is not None) | jumps)
    slopes_show = short is noise.Short.SLOPES
    if slopes_show and quadratic.FEW < len(x) <= quadratic.FEW_IF_NOISY:
        found = yield from noise.jitter(x, value, first, space)
        if found is not None and found > start.resolution:
            x, value, hessian = yield from _models(method, start, value, None)
            return plan(Reason.JITTER, resolution=found)
    if np.all(first.dead | (first.steps == 0)):
        return (yield from _across(method, start, plan(Reason.STILL)))
    # Near a minimum slopes differ by chance, and sizes that models used are right.
    steep = short is noise.Short.STEEP and hessian is None
    if steep:
        # Next to a minimum of about 0, a value is compared with those around.
        longer = yield space.point(x + noise.PROBE * space.spans(x))[None]
        begun = max(abs(begun), *abs(longer[np.isfinite(longer)]))
    if not steep and (hessian is not None or not noise.are_needed(first, value)):
        return plan(Reason.SMOOTH, first=first)
    sizes = yield from noise.measured_sizes(x, value, first, space)
    space = space._replace(origin=x, sizes=sizes)
    first = yield from forward(x, value, spacing * space.spans(x), space)
    steps = not steep and noise.are_of_steps(first, value)
    if steps:
        changed = abs(float((yield Ask(x[None], again=True))[0]) - value)
        if changed > slopes.NOISY * abs(value):
            return plan(Reason.NOISE, noise=changed)
    return plan(Reason.STEPS if steps else Reason.APART, first=first, sizes=sizes)


def _models(
    method: Untuned, start: Start, value: float, noise: float | None
) -> Part[quadratic.ModelEnd]:
    """Takes steps along models as long as they are worth it; `None` is jitter."""
    start.report("quadratic()", Reason.JITTER if noise is None else Reason.FEW)
    units = contract.sizes(start, method.scale)
    return quadratic.first(start, value, units, noise or 0.0)


def _returned(
    start: Start, x: np.ndarray, value: float, dead: np.ndarray
) -> Part[np.ndarray]:
    """Returns x, with dead parameters as in θ₀ if that does not raise the value."""
    back = np.where(dead, start.params, x)
    if np.array_equal(back, x) or not (yield back[None])[0] <= value:
        return x
    return back


def _across(method: Untuned, start: Start, plan: Plan) -> Part[Plan]:
    """Takes differences that cross the steps of a function; returns the next plan."""
    x, value, space = plan.end.params, plan.end.value, plan.space
    units, everywhere = contract.sizes(start, method.scale), np.ones(len(x), bool)
    start.report("long differences", Reason.STILL)
    x, value, changed = yield from far.long_differences(x, value, units, space)
    if not changed:
        looked = yield from far.look(x, value, everywhere, units, space)
        x, value = looked.x, looked.value
        if not np.any(looked.lengths):
            return plan._replace(end=End(x, value, decided(value, False)))
    short = math.sqrt(start.resolution) * space.spans(x)
    near = (yield space.point(x + short)[None])[0]
    if near == value or np.array_equal(x, start.params):
        bowl = yield from far.is_bowl(x, value, units, space)
        kind = decided(value, True) if bowl else Reason.STEPS
        return plan._replace(end=End(x, value, kind))
    # The start was a saddle or on a plateau, and not between steps.
    return (yield from _first_values(method, start._replace(params=x), value))


def _search(
    method: Untuned,
    start: Start,
    plan: Plan,
    best: End,
    origin: End | None,
    left: float,
) -> Part[tuple[End, Plan]]:
    """Slopes, and moves along the parameters if they may lead lower.

    Args:
      method: The method.
      start: The start of the run.
      plan: The plan.
      best: The best point so far.
      origin: The first point, if there may be moves from there.
      left: Number of restarts that are left.
    """
    if len(best.params) > _MOST:
        return (yield from _along_few(start, plan.space.sizes, best)), plan
    units = contract.sizes(start, method.scale)
    far_away = units if origin is not None else np.full_like(units, np.inf)
    watch = far.Watch(best, start.params, far_away)
    found = yield from far.watched(_descent(method, start, plan, best), watch)
    best, plan = found or (watch.best, plan)
    if best.reason in _UNMOVED or watch.fails:
        return best, plan
    plateau = best.unused is not None or best.reason != Reason.MINIMUM
    if origin is not None and (left > 0 or (watch.is_far and plateau)):
        surely = best.reason in _FOUND or watch.is_far
        best, plan = yield from _from_origin(method, start, plan, best, origin, surely)
    if best.reason not in (Reason.MINIMUM, Reason.SETTLED, *_UNMOVED):
        start.report(MOVES, best.reason)
        units = method.sizes(start, best.params)
        units = units if plan.sizes is None else plan.sizes
        x, value = yield from far.moves(best.params, best.value, units, plan.space)
        best = best._replace(params=x, value=value)
    return best, plan


def _from_origin(
    method: Untuned, start: Start, plan: Plan, best: End, origin: End, surely: bool
) -> Part[tuple[End, Plan]]:
    """Moves along the parameters from the start, which may lead to a lower minimum.

    Slopes follow if the moves end at a lower value, or surely.
    """
    start.report(MOVES, Reason.OTHERS)
    units = contract.sizes(start, method.scale)
    space = Space.of(start, units)
    x, value = yield from far.moves(origin.params, origin.value, units, space)
    if not (surely or value < best.value):
        return best, plan
    its = yield from _first_values(method, start._replace(params=x), value)
    end = its.end
    if its.smooth:
        start.report("slopes()", Reason.NEXT)
        end, its = yield from _descent(method, start, its, end)
    return (end, its) if end.value < best.value else (best, plan)


def _descent(
    method: Untuned, start: Start, plan: Plan, best: End
) -> Part[tuple[End, Plan]]:
    """Slopes, and looks along parameters that seem to have no effect."""
    x, value, space = best.params, best.value, plan.space
    for _ in range(_LOOKS):
        end = yield from slopes.steps(
            x,
            value,
            space,
            plan.resolution,
            begun=plan.first,
            hessian=plan.hessian,
            first=plan.begun,
            tolerance=method.tolerance,
        )
        plan = plan._replace(first=None, hessian=None, resolution=end.resolution)
        best = End(end.params, end.value, end.reason)
        if end.reason == Reason.NOISE:
            plan = plan._replace(noise=end.resolution * abs(end.value))
        if not np.any(end.dead) or end.reason in (Reason.NOISE, Reason.FIXED):
            return best, plan
        units = method.sizes(start, best.params)
        looked = yield from far.look(best.params, best.value, end.dead, units, space)
        if not looked.value < best.value:
            cells = looked.lengths
            reason = Reason.CELLS if np.any(cells) else end.reason
            unused = end.dead & (cells == 0)
            best = best._replace(unused=unused if np.any(unused) else None)
            return best._replace(reason=reason), plan._replace(cells=cells)
        x, value = looked.x, looked.value
    return End(x, value, Reason.CELLS), plan


def _along_few(start: Start, unit: np.ndarray, best: End) -> Steps:
    """Descends along few directions, in units of the parameters."""
    box = Box(start.box.lower / unit, start.box.upper / unit)

    def point(z: np.ndarray) -> np.ndarray:
        return start.round(start.box.clip(z * unit))

    within = start._replace(
        params=best.params / unit, box=box, round=lambda z: point(z) / unit
    )

    def answer(asked: Ask) -> Part[np.ndarray]:
        return (yield Ask(point(asked.points), again=asked.again))

    end = yield from contract.answered(many.steps(within, best.value), answer)
    return end._replace(params=point(end.params))
