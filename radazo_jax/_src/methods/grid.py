"""Whole numbers and other grids: quadratic models over a grid, and its neighbors."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from radazo_jax._src.methods import contract, evolution, slopes
from radazo_jax._src.methods.contract import Ask, Box, Part, Start, Steps, answered
from radazo_jax._src.methods.ends import Reason, decided
from radazo_jax._src.methods.points import Space
from radazo_jax._src.methods.quadratic import in_ball

# Up to so many parameters, models come first.
_MOST = 100

# The radius of a model in sizes of the parameters: the first, the largest, and the
# smallest one of continuous parameters. It is at least a step of the grid.
_FIRST, _LARGEST, _SMALLEST = 0.15, 1.0, 2e-3

# A step is good if the value falls by more than the first share of the promised fall,
# and very good beyond the second one.
_GOOD, _BEST = 0.1, 0.7

# A model has at most so many points, in the number of its coefficients and in all, and
# of the latest ones.
_TIMES, _POINTS, _LATEST = 3, 400, 4000

# How far a model may miss the values: a share at the radius, which grows by this power
# of the distance beyond it.
_MISS, _POWER = 1e-9, 6

# A step that promises less than this share of all falls so far waits for the others.
_LITTLE = 1e-4

# Continuous parameters are settled once slopes lower the value by less than this share.
_SETTLED = 1e-6

# Models end after so many evaluations, times d + 1, without progress, which is a fall
# by more than a share of all falls, if another method can follow.
_PATIENCE, _PROGRESS = 10, 1e-2

# Up to so many whole numbers, a model is minimized along pairs of them.
_PAIRS = 12

# The least curvature of continuous parameters, as a share of the largest.
_CURVED = 1e-6

# The first step size of a strategy, and the number of its steps after which a lower
# value leads back to models.
_WIDE, _STALLED = 0.3, 3

# A run ends after so many searches whose points were all known.
_IDLE = 10


class Grid(NamedTuple):
    """The parameters that can move, and the points that they can have.

    Attributes:
      space: The space of the points.
      free: Numbers of the parameters that can move, shape [n].
      units: Their sizes, shape [n].
      step: Spacing of their values, 0 if they are continuous, shape [n].
    """

    space: Space
    free: np.ndarray
    units: np.ndarray
    step: np.ndarray

    @classmethod
    def of(cls, start: Start, units: np.ndarray) -> "Grid":
        """Returns the grid of a run."""
        free = np.flatnonzero(start.box.lower < start.box.upper)
        units = np.maximum(units, start.step)
        space = Space.of(start, units)
        return cls(space, free, units[free], start.step[free])

    @property
    def whole(self) -> np.ndarray:
        """Whether a parameter is not continuous: bool, shape [n]."""
        return self.step > 0

    def point(self, x: np.ndarray, moves: np.ndarray) -> np.ndarray:
        """Returns the points that moves lead to from x, shape [..., d]."""
        points = np.broadcast_to(x, (*moves.shape[:-1], len(x))).copy()
        points[..., self.free] += moves
        return self.space.point(points)

    def numbers(self, x: np.ndarray) -> bytes:
        """Returns what is not continuous of a point, as a key."""
        return x[self.free][self.whole].tobytes()


class GridModel(NamedTuple):
    """A quadratic model gᵀs + sᵀHs/2 of the change of the value, |sᵢ| ≤ 1.

    Attributes:
      gradient: g, shape [n].
      hessian: H, shape [n, n].
      box: Bounds of s, within [−1, 1]ⁿ.
      step: Spacing of s, 0 if it is continuous, shape [n].
    """

    gradient: np.ndarray
    hessian: np.ndarray
    box: Box
    step: np.ndarray

    def change(self, s: np.ndarray) -> np.ndarray:
        """Returns the change that the model promises for rows s."""
        return s @ self.gradient + np.sum(s @ self.hessian * s, -1) / 2

    def moves(self, lengths: np.ndarray) -> np.ndarray:
        """Returns moves of parameters up and down, shape [2n, n].

        The continuous parameters follow a move of one that is not.
        """
        n, free = len(lengths), self.step == 0
        moves = np.concatenate([np.diag(lengths), -np.diag(lengths)])
        if not np.any(free):
            return moves
        curvatures, basis = np.linalg.eigh(self.hessian[np.ix_(free, free)])
        least = max(_CURVED * np.max(abs(curvatures)), np.finfo(float).tiny)
        inverse = (basis / np.maximum(curvatures, least)) @ basis.T
        follows = np.tile(~free, 2)
        response = moves @ self.hessian[:, free] @ inverse
        moves[np.ix_(follows, free)] -= response[follows]
        low, high = self.box.lower[free], self.box.upper[free]
        moves[:, free] = np.clip(moves[:, free], low, high)
        return moves.reshape(2 * n, n)

    def settled(self, s: np.ndarray, free: np.ndarray) -> np.ndarray:
        """Returns s with the parameters that are free at a low point of the model."""
        s, free = s.copy(), free.copy()
        while np.any(free):
            g = self.gradient[free] + self.hessian[np.ix_(free, ~free)] @ s[~free]
            s[free] = in_ball(g, self.hessian[np.ix_(free, free)], math.sqrt(len(g)))
            within = self.box.clip(s)
            # What leaves the box stays at its bound, and the others follow.
            outside = free & (within != s)
            s = np.where(free, within, s)
            if not np.any(outside):
                break
            free &= ~outside
        return s

    def lowest(self) -> np.ndarray:
        """Returns a low point of the model on the grid, shape [n].

        It is the low point without a grid, rounded, and improved by moves of one and of
        two numbers as long as they help.
        """
        n, free, whole = len(self.step), self.step == 0, self.step > 0
        one_by_one = np.sum(whole) <= _PAIRS
        left, s = np.ones(n, bool), np.zeros(n)
        while np.any(left & whole):
            s = self.settled(s, left)
            # The number closest to the grid first, the others follow.
            rounded = np.rint(s / np.where(whole, self.step, 1)) * self.step
            away = np.where(left & whole, abs(s - rounded), np.inf)
            now = np.arange(n) == np.argmin(away) if one_by_one else whole
            s, left = np.where(now, rounded, s), left & ~now
        both = self.settled(s, free), self.settled(np.zeros(n), free)
        best = min(both, key=self.change)
        moves = self.moves(self.step)[np.tile(whole, 2)]
        if len(moves) <= 2 * _PAIRS:
            one, other = np.triu_indices(len(moves), 1)
            moves = np.concatenate([moves, moves[one] + moves[other]])
        low, high = self.box.lower - 1e-9, self.box.upper + 1e-9
        for _ in range(4 * n):
            new = best + moves
            new[:, free] = self.box.clip(new)[:, free]
            inside = np.all((new >= low) & (new <= high), 1)
            changes = np.where(inside, self.change(new), np.inf)
            i, before = int(np.argmin(changes)), self.change(best)
            if not changes[i] < before - 1e-12 * abs(before):
                break
            best = self.settled(new[i], free)
        return best


def fitted(
    points: np.ndarray, values: np.ndarray, hessian: np.ndarray, misses: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the model near values whose Hessian matrix changes least.

    It minimizes |H' − H|² + Σ (model − f)²ⱼ / mⱼ. The change is Σⱼ λⱼ yⱼ yⱼᵀ; see
    `quadratic.interpolated`.

    Args:
      points: y, about the origin of the model, shape [m, n].
      values: f, shape [m].
      hessian: H before, shape [n, n].
      misses: m, how far a value may be missed, shape [m].

    Returns:
      The gradient, shape [n], and the Hessian matrix, shape [n, n].
    """
    m, n = points.shape
    equations = np.zeros((m + n + 1, m + n + 1))
    equations[:m, :m] = (points @ points.T) ** 2 / 2 + np.diag(misses)
    equations[:m, m] = equations[m, :m] = 1
    equations[:m, m + 1 :], equations[m + 1 :, :m] = points, points.T
    right = np.zeros(m + n + 1)
    right[:m] = values - np.sum(points @ hessian * points, 1) / 2
    try:
        found = np.linalg.solve(equations, right)
    except np.linalg.LinAlgError:
        found = np.linalg.lstsq(equations, right, rcond=None)[0]
    return found[m + 1 :], hessian + (points.T * found[:m]) @ points


class GridDescent:
    """A descent along models.

    Attributes:
      grid: The parameters that can move.
      known: Points and values so far.
      radius: The radius of the model, in sizes of the parameters.
      least: The smallest radius.
      hessian: The Hessian matrix of the latest model, shape [n, n].
      tried: Neighbors that were tried from the best point.
    """

    def __init__(self, grid: Grid, known: contract.Known):
        self.grid, self.known, self.radius = grid, known, _FIRST
        n, half = len(grid.free), grid.step[grid.whole] / grid.units[grid.whole] / 2
        self.least = np.min(half, initial=np.inf)
        if not np.all(grid.whole):
            self.least = min(self.least, _SMALLEST)
        self.hessian = np.zeros((n, n))
        self.tried: set[bytes] = set()

    @property
    def reach(self) -> np.ndarray:
        """The radius along each parameter, a multiple of its step, shape [n]."""
        reach, step = self.radius * self.grid.units, self.grid.step
        number = np.maximum(np.rint(reach / np.where(step > 0, step, 1)), 1)
        return np.where(step > 0, number * step, reach)

    def first(self) -> np.ndarray:
        """Returns a point along each parameter, toward the middle of the bounds."""
        x, free, box = self.known.best.params, self.grid.free, self.grid.space.box
        middle = (box.lower + box.upper)[free] / 2
        inward = np.where(x[free] > middle, -1, 1)
        moves = np.diag(inward * self.reach)
        ahead, back = self.grid.point(x, moves), self.grid.point(x, -moves)
        i = np.arange(len(free))
        longer = abs(ahead - x)[i, free] >= abs(back - x)[i, free]
        return np.where(longer[:, None], ahead, back)

    def model(self) -> GridModel:
        """Returns the model about the best point, in units of the reach."""
        x, value = self.known.best.params, self.known.best.value
        n, reach = len(self.grid.free), self.reach
        points = np.array(self.known.points[-_LATEST:])
        values = np.array(self.known.values[-_LATEST:])
        moves = (points - x)[:, self.grid.free] / reach
        distances = np.linalg.norm(moves, axis=1)
        count = (n + 1) * (n + 2) // 2
        near = np.argsort(distances, kind="stable")[: min(_TIMES * count, _POINTS)]
        # The highest value stands for those that failed.
        highest = np.max(values, initial=value, where=np.isfinite(values))
        changes = np.where(np.isfinite(values), values, highest)[near] - value
        within = max(1.0, float(distances[near[:count][-1]]))
        misses = _MISS * np.maximum(1, distances[near] / within) ** _POWER
        units = np.outer(reach, reach)
        gradient, hessian = fitted(moves[near], changes, self.hessian * units, misses)
        self.hessian = hessian / units
        lower, upper = (
            (bound - x)[self.grid.free] / reach for bound in self.grid.space.box
        )
        box = Box(np.maximum(lower, -1), np.minimum(upper, 1))
        return GridModel(gradient, hessian, box, self.grid.step / reach)

    def neighbors(self, model: GridModel) -> np.ndarray:
        """Returns neighbors that were not tried, the best first, shape [m, d]."""
        x, moves = self.known.best.params, model.moves(np.ones(len(model.step)))
        points = self.grid.point(x, moves * self.reach)
        numbers, here = list(map(self.grid.numbers, points)), self.grid.numbers(x)
        new = [
            point not in self.known and (number == here or number not in self.tried)
            for point, number in zip(points, numbers, strict=True)
        ]
        order = np.argsort(model.change(moves), kind="stable")
        return points[order[np.array(new)[order]]]


def steps(
    start: Start, known: contract.Known, units: np.ndarray, patience: float = np.inf
) -> Steps:
    """Takes steps along models over the grid, until no neighbor is better.

    Args:
      start: The start of the run.
      known: Points and values so far, one of them finite.
      units: Sizes of the parameters, shape [d].
      patience: Number of evaluations without progress after which models end.
    """
    grid, value = Grid.of(start, units), known.best.value
    if not len(grid.free):
        return known.best._replace(reason=Reason.FIXED)
    at, latest, lowest = GridDescent(grid, known), len(known.values), value
    yield from known.at(at.first())
    while True:
        best = known.best
        if lowest - best.value > _PROGRESS * (value - lowest):
            latest, lowest = len(known.values), best.value
        if len(known.values) - latest > patience:
            return best._replace(reason=Reason.SLOW)
        if not (yield from _step(at, value, start.resolution)):
            continue
        if at.radius > at.least:
            at.radius = max(at.radius / 2, at.least)
        elif not (yield from _settled(at, value, start.resolution)):
            best, rises = known.best, max(known.values) > known.best.value
            return best._replace(reason=decided(best.value, rises, Reason.NEIGHBORS))


def _step(at: GridDescent, value: float, resolution: float) -> Part[bool]:
    """Takes a step along the model, or to a neighbor.

    Args:
      at: The descent.
      value: The value at its start.
      resolution: Relative spacing of values.

    Returns:
      Whether there is nothing left to try within the radius.
    """
    best, model = at.known.best, at.model()
    s = model.lowest()
    new, fall = at.grid.point(best.params, s * at.reach), -float(model.change(s))
    least = max(resolution * abs(best.value), _LITTLE * (value - best.value))
    if new not in at.known and fall > least:
        found = (yield from at.known.at(new[None]))[0]
        ratio = (best.value - found) / fall
        if ratio > _BEST and np.any(abs(s) >= 0.9):
            at.radius = min(2 * at.radius, max(_LARGEST, at.least))
        if ratio > _GOOD:
            return False
    points = at.neighbors(model)
    if not len(points):
        return True
    if at.grid.numbers(at.known.best.params) != at.grid.numbers(best.params):
        at.tried = set()
        return False
    found = (yield from at.known.at(points[:1]))[0]
    at.tried.add(at.grid.numbers(points[0]))
    if found < best.value:
        at.tried = set()
        return False
    return at.radius > at.least


def _settled(at: GridDescent, value: float, resolution: float) -> Part[bool]:
    """Moves the continuous parameters along slopes; says whether that helped."""
    best, grid = at.known.best, at.grid
    if np.all(grid.whole):
        return False
    fixed = np.zeros(len(best.params), bool)
    fixed[grid.free[grid.whole]] = True
    box = Box(*(np.where(fixed, best.params, bound) for bound in grid.space.box))
    space = grid.space._replace(box=box)
    inner = slopes.steps(best.params, best.value, space, resolution)
    yield from at.known.steps(inner)
    fall = best.value - at.known.best.value
    if not fall > max(_SETTLED * (value - best.value), resolution * abs(best.value)):
        return False
    at.tried, at.radius = set(), max(4 * at.least, at.radius)
    return True


def minimized(
    start: Start, value: float, noisy: bool, scale: Any, restarts: float
) -> Steps:
    """Minimizes over a grid: models first, then searches of `evolution`.

    Args:
      start: The start of the run.
      value: Its value.
      noisy: Whether the function has another value if it is evaluated again.
      scale: As in `untuned`.
      restarts: Number of searches after the first minimum.
    """
    d, known = len(start.params), contract.Known(start.params, value)
    population, models = evolution.default_population(d), not noisy and d <= _MOST
    patience = _PATIENCE * (d + 1) if restarts > 0 else np.inf

    def descent(reason: str) -> Steps:
        start.report("models over the grid", reason)
        units = contract.sizes(start._replace(params=known.best.params), scale)
        return (yield from steps(start, known, units, patience))

    best, idle = known.best, 0
    if models and np.isfinite(best.value):
        best = yield from descent(Reason.GRID)
        if best.reason == Reason.FIXED:
            return best
    else:
        restarts += 1
        why = Reason.NOISE if noisy else Reason.MANY
        best = best._replace(reason=why if np.isfinite(value) else Reason.FAILED)
    while restarts > 0:
        start.report(f"evolution(step_size={_WIDE})", best.reason)
        ahead = start._replace(params=best.params)
        units = contract.sizes(ahead, scale)
        inner = evolution.steps(ahead, best.value, units, _WIDE, population, noisy)
        count = len(known.values) if models else -1
        if models:
            best = yield from _explored(known, inner, descent)
        else:
            best = yield from inner
        population, restarts = evolution.doubled(population, d), restarts - 1
        idle = idle + 1 if len(known.values) == count else 0
        if idle == _IDLE:
            break
    return best


def _explored(
    known: contract.Known, inner: Steps, descent: Callable[[str], Steps]
) -> Steps:
    """Takes the steps of a strategy; models follow a lower value."""
    before, lowest, since = known.best, known.best.value, 0

    def answer(asked: Ask) -> Part[np.ndarray]:
        nonlocal before, lowest, since
        values = yield from known.received(asked)
        since = 0 if known.best.value < lowest else since + 1
        lowest = known.best.value
        if since == _STALLED and lowest < before.value:
            before = yield from descent(Reason.LOWER)
            lowest = before.value
        return values

    end = yield from answered(inner, answer)
    if known.best.value < before.value:
        before = yield from descent(Reason.LOWER)
    return before._replace(reason=before.reason or end.reason)
