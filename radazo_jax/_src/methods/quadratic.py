"""Quadratic models of least change in a trust region, as in Powell's NEWUOA."""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from radazo_jax._src.base.names import checks_names
from radazo_jax._src.methods import contract
from radazo_jax._src.methods.contract import Box, End, Method, Part, Start, Steps
from radazo_jax._src.methods.ends import Reason, decided, guarded

# The first radius, in sizes of the parameters, and the last one, as a share of it.
_FIRST, _LAST = 0.1, 1e-7

# If values are noisy, models that come first have this first radius. Noise hides the
# changes that are less than so many times as large.
_IF_NOISY, _CLEAR = 0.3, 10.0

# The model has at most so many points, times d.
_POINTS = 6

# Up to so many parameters, models come before slopes, and if values are noisy, before
# a strategy.
FEW, FEW_IF_NOISY = 6, 20

# Models that come first end at this share of the first radius; after so many
# evaluations, times d + 1; or after so many without progress, which is a fall by more
# than a share of all falls so far.
_LAST_FIRST, _LONGEST, _PATIENCE, _PROGRESS = 1e-2, 15, 4, 1e-3

# They also end if they promise less than this share of all falls so far.
_LITTLE = 1e-7

# They do not begin if the first changes along two parameters differ by this factor.
_APART = 1e3

# A step is good if the value falls by more than the first share of the promised fall,
# and very good beyond the second one.
_GOOD, _BEST = 0.1, 0.7

# A region whose radius is below this many resolutions has their radius.
_CLOSE = 1.5

# A point is far from the best one beyond this many radii.
_FAR = 2.0

# A point is replaced by one that is no better if its Lagrange polynomial there exceeds
# this.
_USEFUL = 1e-4

# The diagonal that keeps the equations of an interpolation regular.
_REGULAR = 1e-13


@dataclasses.dataclass(frozen=True)
class Quadratic:
    """See `quadratic`."""

    scale: Any = 1.0

    @guarded
    def __call__(self, start: Start) -> Steps:
        contract.check_continuous("quadratic()", start)
        value = float((yield start.params[None])[0])
        if not np.isfinite(value):
            return End(start.params, np.inf, Reason.FAILED)
        units = contract.sizes(start, self.scale)
        return (yield from steps(start, value, units))


@checks_names
def quadratic(scale: Any = 1.0) -> Method:
    """Minimizes quadratic models of the function in a trust region.

    A model interpolates the function at d + 1 points first, a radius apart. The points
    of later steps are added up to (d + 1)(d + 2)/2, but at most 6 d, and replace others
    then. Of all quadratic models through them, it is the one whose Hessian matrix
    differs least from the one before. Each step evaluates the minimum of the model
    within the trust region and the bounds. If the model was wrong, the region shrinks,
    or a point that is far away is replaced by one that is closer.

    Use it for functions of up to about 20 parameters that are smooth but for noise or
    jitter of a solver: it compares values that are far apart, and needs few of them. A
    step takes O(d³) operations.

    A run ends if the radius is 10⁻⁷ of the first one, which is a tenth of the size of
    the parameters.

    Args:
      scale: Order of magnitude of the distance to the minimum; see
        `radazo_jax.methods.evolution`.

    Returns:
      The method.

    Examples:
      >>> import radazo_jax as zo
      >>> zo.methods.quadratic()
      Quadratic(scale=1.0)

    References:
      Powell, Least Frobenius norm updating of quadratic models that satisfy
      interpolation conditions, Mathematical Programming 2004,
      <https://doi.org/10.1007/s10107-003-0490-7>; Powell, The NEWUOA software for
      unconstrained optimization without derivatives, 2006: the radii, and which point
      is replaced.
    """
    return Quadratic(scale)


def in_ball(gradient: np.ndarray, hessian: np.ndarray, radius: float) -> np.ndarray:
    """Returns the minimum of gᵀs + sᵀHs/2 within |s| ≤ radius, shape [d].

    References:
      Moré & Sorensen, Computing a trust region step, SIAM J. Sci. Stat. Comput. 1983.
    """
    curvatures, basis = np.linalg.eigh(hessian)
    slopes = basis.T @ gradient
    if curvatures[0] > 0:
        step = slopes / curvatures
        if step @ step <= radius**2:
            return -basis @ step
    # |s(λ)| = radius for (H + λ I) s = −g; Newton's method for 1/|s(λ)|.
    low = max(0.0, -curvatures[0])
    high = low + np.linalg.norm(slopes) / radius
    shift = low + 1e-12 * np.max(abs(curvatures))
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(50):
            step = slopes / (curvatures + shift)
            length = np.linalg.norm(step)
            if abs(length - radius) <= 1e-3 * radius or not low < high:
                break
            low, high = (shift, high) if length > radius else (low, shift)
            rate = np.sum(step**2 / (curvatures + shift)) / length
            shift += (length / radius - 1) * length / rate
            if not low < shift < high:
                shift = (low + high) / 2
        step = np.where(np.isfinite(step), step, 0)
    missing = radius**2 - step @ step
    if curvatures[0] <= 0 and missing > 0.02 * radius**2:
        # The slope along the least curvature is 0: either way along it.
        step[0] += math.copysign(math.sqrt(missing), slopes[0])
    longest = max(radius, float(np.linalg.norm(step)))
    return -basis @ step * (radius / longest)


def in_box(
    gradient: np.ndarray, hessian: np.ndarray, box: Box, radius: float
) -> np.ndarray:
    """Returns a low point of gᵀs + sᵀHs/2 in a box around 0 and |s| ≤ radius.

    What reaches a bound on the way to the minimum of the other coordinates stays there.
    """
    (lower, upper), step = box, np.zeros_like(gradient)
    free = ~(((lower >= 0) & (gradient > 0)) | ((upper <= 0) & (gradient < 0)))
    while np.any(free):
        left = radius**2 - step[~free] @ step[~free]
        if left <= 0:
            break
        part = hessian[free]
        slopes = gradient[free] + part[:, ~free] @ step[~free]
        move = in_ball(slopes, part[:, free], math.sqrt(left)) - step[free]
        end = np.where(move > 0, upper[free], lower[free])
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(move == 0, np.inf, (end - step[free]) / move)
        share = min(1.0, np.min(room))
        step[free] += share * move
        if share == 1:
            break
        hit = np.flatnonzero(free)[room <= share]
        step[hit], free[hit] = end[room <= share], False
    return box.clip(step)


def interpolated(
    points: np.ndarray, values: np.ndarray, hessian: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the model through points whose Hessian matrix changes least.

    The change is Σⱼ λⱼ yⱼ yⱼᵀ, and λ, c and g solve

        ½ Σⱼ (yᵢᵀ yⱼ)² λⱼ + c + gᵀ yᵢ = fᵢ − yᵢᵀ H yᵢ / 2,    Σ λⱼ = 0,    Σ λⱼ yⱼ = 0

    Args:
      points: y, about the origin of the model, shape [m, d].
      values: f, shape [m].
      hessian: H before, shape [d, d].

    Returns:
      g, shape [d]; H, shape [d, d]; and the inverse of the equations, of which column
      j < m has λ, c and g of the Lagrange polynomial of point j.
    """
    m, d = points.shape
    equations = np.zeros((m + d + 1, m + d + 1))
    equations[:m, :m] = (points @ points.T) ** 2 / 2
    equations[np.arange(m), np.arange(m)] += _REGULAR
    equations[:m, m] = equations[m, :m] = 1
    equations[:m, m + 1 :], equations[m + 1 :, :m] = points, points.T
    try:
        inverse = np.linalg.inv(equations)
    except np.linalg.LinAlgError:
        inverse = np.linalg.pinv(equations)
    known = np.einsum("mi,ij,mj->m", points, hessian, points) / 2
    found = inverse[:, :m] @ (values - known)
    change = (points.T * found[:m]) @ points
    return found[m + 1 :], hessian + change, inverse


class Frame(NamedTuple):
    """Coordinates in sizes of the parameters and about the start.

    Attributes:
      start: The start of the run.
      free: Whether a parameter can move: bool, shape [d].
      units: Sizes of parameters that can, shape [n].
      box: Bounds of coordinates, shape [n] each.
    """

    start: Start
    free: np.ndarray
    units: np.ndarray
    box: Box

    @classmethod
    def of(cls, start: Start, units: np.ndarray) -> "Frame":
        """Returns the coordinates of a run in sizes of its parameters, shape [d]."""
        free = start.box.lower < start.box.upper
        ends = ((bound - start.params)[free] / units[free] for bound in start.box)
        return cls(start, free, units[free], Box(*ends))

    def point(self, u: np.ndarray) -> np.ndarray:
        """Returns the points of coordinates, shape [..., d]."""
        x = self.start.params
        points = np.broadcast_to(x, (*u.shape[:-1], len(x))).copy()
        points[..., self.free] += u * self.units
        return self.start.box.clip(self.start.round(points))

    def place(self, points: np.ndarray) -> np.ndarray:
        """Returns the coordinates of points, shape [..., n]."""
        return (points - self.start.params)[..., self.free] / self.units

    def moves(self, at: "Region") -> bool:
        """Says whether a move by ρ is not rounded away."""
        best = at.points[at.best]
        ends = self.point(best + at.resolution * np.array([[0.0], [1.0], [-1.0]]))
        return bool(np.any(ends != ends[0]))


class Region:
    """A trust region, in sizes of the parameters and about the start.

    Attributes:
      points: Shape [m, d].
      values: Shape [m].
      hessian: Hessian matrix of the latest model, shape [d, d].
      radius: Δ, within which the model is minimized.
      resolution: ρ, the least radius until the model is good at that distance.
      highest: The highest value so far, which stands for those that failed.
      count: Number of values.
      failed: Whether one of them failed.
    """

    def __init__(self, points: np.ndarray, values: np.ndarray, radius: float):
        self.points, self.values = points, values
        self.hessian = np.zeros((points.shape[1], points.shape[1]))
        self.radius = self.resolution = radius
        self.highest, self.count, self.failed = -np.inf, 0, False
        self.comparable(values)

    def comparable(self, values: np.ndarray) -> np.ndarray:
        """Returns the values, the highest one so far for those that failed."""
        finite = np.isfinite(values)
        self.highest = max(self.highest, *values[finite], -np.inf)
        self.count += len(values)
        self.failed |= not np.all(finite)
        return np.where(finite, values, self.highest)

    @property
    def best(self) -> int:
        """The number of the best point."""
        return int(np.argmin(self.values))

    @property
    def lowest(self) -> float:
        """The value of the best point."""
        return float(self.values[self.best])

    @property
    def away(self) -> np.ndarray:
        """Distances of the points from the best one, shape [m]."""
        return np.linalg.norm(self.points - self.points[self.best], axis=1)

    def model(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Interpolates; returns points, g, H and the inverse, in units of Δ."""
        scale, best = self.radius, self.best
        points = (self.points - self.points[best]) / scale
        values = self.values - self.values[best]
        found = interpolated(points, values, self.hessian * scale**2)
        self.hessian = found[1] / scale**2
        return points, *found

    def room(self, box: Box) -> Box:
        """Returns the bounds of steps from the best point, in units of Δ."""
        at = self.points[self.best]
        return Box((box.lower - at) / self.radius, (box.upper - at) / self.radius)

    def add(self, new: np.ndarray, value: float, most: int) -> None:
        """Adds a point, or replaces the one that matters least near the best."""
        m, best = len(self.points), self.best
        if m < most:
            self.points = np.vstack([self.points, new])
            self.values = np.append(self.values, value)
            return
        points, _, _, inverse = self.model()
        at = (new - self.points[best]) / self.radius
        row = np.concatenate([(points @ at) ** 2 / 2, [1.0], at])
        better = value < self.values[best]
        center = new if better else self.points[best]
        away = np.linalg.norm(self.points - center, axis=1)
        near = max(self.resolution, 0.1 * self.radius)
        score = abs(row @ inverse[:, :m]) * np.maximum(1, away / near) ** 4
        if not better:
            score[best] = 0
        worst = int(np.argmax(score))
        if better or score[worst] > _USEFUL:
            self.points[worst], self.values[worst] = new, value

    def judge(self, ratio: float, length: float) -> None:
        """Adapts Δ to a step: its fall, as a share of the promised one, and length."""
        half = self.radius / 2
        if ratio <= _GOOD:
            self.radius = length / 2
        else:
            self.radius = max(half, length if ratio <= _BEST else 2 * length)
        if self.radius <= _CLOSE * self.resolution:
            self.radius = self.resolution

    def closer(self, box: Box) -> tuple[int, np.ndarray] | None:
        """Returns a point that is far away, and a better place for it; or `None`.

        The place is near the best point, and its Lagrange polynomial is large there.
        """
        away = self.away
        far = int(np.argmax(away))
        if away[far] <= _FAR * self.radius:
            return None
        reach = max(min(0.1 * away[far], self.radius / 2), self.resolution)
        points, _, _, inverse = self.model()
        m = len(points)
        slopes, weights = inverse[m + 1 :, far], inverse[:m, far]
        bend = (points.T * weights) @ points
        room, limit = self.room(box), reach / self.radius
        tries = [in_box(s * slopes, s * bend, room, limit) for s in (1, -1)]
        sizes = [abs(slopes @ s + s @ bend @ s / 2) for s in tries]
        step = self.radius * tries[int(np.argmax(sizes))]
        if np.linalg.norm(step) <= 1e-3 * reach:
            return None
        return far, self.points[self.best] + step

    def sharpen(self) -> None:
        """Makes the resolution finer."""
        before, self.resolution = self.resolution, 0.1 * self.resolution
        self.radius = max(before / 2, self.resolution)


def steps(start: Start, value: float, units: np.ndarray) -> Steps:
    """Takes the steps of `quadratic`.

    Args:
      start: The start.
      value: Its value, finite.
      units: Sizes of the parameters, shape [d].
    """
    frame = Frame.of(start, units)
    if not len(frame.units):
        return End(start.params, value, Reason.FIXED)
    at = yield from _begun(frame, value, _FIRST)
    while at.resolution > _LAST * _FIRST and frame.moves(at):
        yield from _step(frame, at)
    reason = decided(at.lowest, at.highest > at.lowest)
    return End(frame.point(at.points[at.best]), at.lowest, reason)


def _begun(frame: "Frame", value: float, radius: float) -> Part[Region]:
    """Evaluates a point along each parameter, away from a bound that is close."""
    (lower, upper), d = frame.box, len(frame.units)
    ends = frame.point(
        np.diag(np.where(radius > upper, np.maximum(-radius, lower), radius))
    )
    points = np.vstack([np.zeros(d), frame.place(ends)])
    at = Region(points, np.array([value]), radius)
    at.values = np.append(value, at.comparable((yield ends)))
    at.radius *= math.sqrt(d)  # Steps move all parameters.
    return at


def _step(frame: Frame, at: Region) -> Part[float]:
    """Evaluates the minimum of the model, or makes the model better.

    Returns:
      The fall of the value that the model promised.
    """
    d = len(frame.units)
    most = min((d + 1) * (d + 2) // 2, _POINTS * d)
    _, gradient, hessian, _ = at.model()
    step = in_box(gradient, hessian, at.room(frame.box), 1.0)
    length = at.radius * float(np.linalg.norm(step))
    fall = -float(gradient @ step + step @ hessian @ step / 2)
    before, ratio, is_tried = at.lowest, 0.0, False
    if length >= at.resolution / 2 and fall > frame.start.resolution * abs(before):
        new = frame.point(at.points[at.best] + at.radius * step)
        found = float(at.comparable((yield new[None]))[0])
        ratio, is_tried = (before - found) / fall, True
        at.add(frame.place(new), found, most)
        at.judge(ratio, length)
        if ratio > _GOOD:
            return fall
    closer = at.closer(frame.box)
    if closer is not None:
        new = frame.point(closer[1])
        at.values[closer[0]] = at.comparable((yield new[None]))[0]
        at.points[closer[0]] = frame.place(new)
    elif not (is_tried and (ratio > 0 or max(at.radius, length) > at.resolution)):
        at.sharpen()
    return fall


class ModelEnd(NamedTuple):
    """The best point of models at their end, and their last Hessian matrix.

    Attributes:
      params: Best point, shape [d].
      value: Its value.
      hessian: Hessian matrix of the model, zero for parameters that cannot move, shape
        [d, d]; `None` if the models did not lead to lower values until their end.
    """

    params: np.ndarray
    value: float
    hessian: np.ndarray | None = None


def first(
    start: Start, value: float, units: np.ndarray, noise: float = 0.0
) -> Part[ModelEnd]:
    """Takes steps along models as long as they are worth it, before other methods.

    They are not if the function fails, if the sizes of the parameters are wrong, if
    noise hides the first changes, or if values hardly fall. If values are noisy, points
    are further apart.

    Args:
      start: The start.
      value: Its value, finite.
      units: Sizes of the parameters, shape [d].
      noise: Change of the value at the start between two evaluations.
    """
    x, frame = start.params, Frame.of(start, units)
    size = len(frame.units) + 1
    if size == 1:
        return ModelEnd(x, value)
    radius = _IF_NOISY if noise else _FIRST
    at = yield from _begun(frame, value, radius)
    latest, hessian, changes = at.count, None, at.values[1:] - value
    if noise and np.max(abs(changes)) < _CLEAR * noise:
        return ModelEnd(x, value)
    least = np.min(abs(changes[changes != 0]), initial=np.inf)
    goes_on = not at.failed and np.max(abs(changes)) <= _APART * least
    while goes_on and at.resolution > _LAST_FIRST * radius and frame.moves(at):
        before = at.lowest
        fall = yield from _step(frame, at)
        if before - at.lowest > _PROGRESS * (value - at.lowest):
            latest = at.count
        goes_on = not at.failed and at.count - latest <= _PATIENCE * size
        if at.count >= _LONGEST * size or fall <= _LITTLE * (value - at.lowest):
            break
    if goes_on and at.lowest < value:
        hessian = np.zeros((len(x), len(x)))
        units = np.outer(frame.units, frame.units)
        hessian[np.ix_(frame.free, frame.free)] = at.hessian / units
    return ModelEnd(frame.point(at.points[at.best]), at.lowest, hessian)
