"""Least squares: Gauss–Newton steps with a Jacobian that is learned from the values."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import numpy as np

from radazo_jax._src.base import checks, shown
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.methods import contract
from radazo_jax._src.methods.contract import Ask, Box, End, Method, Part, Start, Steps
from radazo_jax._src.methods.ends import Reason, decided
from radazo_jax._src.methods.quadratic import Frame, in_box

# Radius of the first trust region, length of the first differences, and limits of later
# lengths, all in sizes of the parameters. The length is this share of the radius.
_RADIUS, _FIRST, _SHORTEST, _LONGEST, _SHARE = 0.3, 1e-2, 1e-5, 0.1, 0.6

# A step is rejected if it has less than the first share of the promised decrease, and
# says nothing about the Jacobian if its value is so many times as high. The radius
# grows by the factor if the share is above the second one.
_BAD, _WILD, _GOOD, _GROW = 0.1, 10.0, 0.7, 2.5

# After a rejected step, the radius is the first share of its length, or the second one
# if the deviation of the Jacobian along some axis exceeds the third one. An axis is
# evaluated again if the deviation exceeds so many radii. Below the least radius, a run
# ends.
_SHRINK, _SHRINK_IF_STALE, _STALE, _REACH, _LEAST = 0.25, 0.6, 0.5, 3.0, 1e-9

# Noise is looked for by a move of this many sizes, or the second number if the first is
# rounded away, and again once the radius has fallen by this factor. It is noise if it
# exceeds the expected change by this factor, and this share of the first residuals.
_PROBES, _AGAIN, _SURPRISE, _SEEN = (1e-8, 1e-6), 1e-2, 100.0, 3e-8

# A parameter changes nothing if its effect is below this share of the largest effect.
_NEGLIGIBLE = 1e-5

# At a minimum, the Jacobian is known for steps of these lengths. An axis is flat if a
# move by its size changes the residuals by less than this share of them.
_CLOSE, _CLOSEST, _FLAT = 1e-4, 1e-6, 1e-6

# Variance of an unknown Jacobian.
_UNKNOWN = 1e6

# A singular value of the Jacobian counts if it exceeds this share of the largest one.
# Less is an error of the estimate.
_RANK = 1e-6


def _soft_l1(z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    root = np.sqrt(1 + z)
    return 2 * (root - 1), 1 / root, -0.5 / root**3


def _huber(z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    root, inner = np.sqrt(np.maximum(z, 1)), z <= 1
    return (
        np.where(inner, z, 2 * root - 1),
        1 / root,
        np.where(inner, 0, -0.5) / root**3,
    )


# The losses ρ(z) of squared residuals z, with ρ′ and ρ″, as SciPy defines them.
LOSSES = {
    "linear": lambda z: (z, np.ones_like(z), np.zeros_like(z)),
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": lambda z: (np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2),
    "arctan": lambda z: (np.arctan(z), 1 / (1 + z**2), -2 * z / (1 + z**2) ** 2),
}


class Loss(NamedTuple):
    """A loss of residuals, C² Σ ρ(r²/C²).

    Attributes:
      name: Name of ρ in `LOSSES`.
      scale: C.
    """

    name: str
    scale: float

    def value(self, residuals: np.ndarray) -> np.ndarray:
        """Returns the losses of residuals, shape [n, m] → [n]; NaN if one is NaN."""
        with np.errstate(all="ignore"):
            rho = LOSSES[self.name]((residuals / self.scale) ** 2)[0]
            return self.scale**2 * np.sum(rho, axis=1)

    def weighted(self, residuals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns √w and r̃, so that √w J and r̃ have the loss's Gauss–Newton step.

        References:
          Triggs, McLauchlan, Hartley & Fitzgibbon, Bundle Adjustment, 1999, 4.3.
        """
        z = (residuals / self.scale) ** 2
        _, first, second = LOSSES[self.name](z)
        root = np.sqrt(np.maximum(first + 2 * second * z, np.finfo(float).eps))
        return root, residuals * first / root


class Model(NamedTuple):
    """A linear model of residuals about a point, r + J s, with the errors of r and J.

    All rows have the same covariance, in units of the second derivatives, which are
    independent random numbers of variance 1. So ½ sᵀH s has the variance |s|⁴/4, and
    the Jacobian changes by H s in a step. The model is a Kalman filter of both.

    Attributes:
      mean: r and J, shape [m, 1 + d].
      covariance: Covariance of a row, shape [1 + d, 1 + d].
    """

    mean: np.ndarray
    covariance: np.ndarray

    @property
    def residuals(self) -> np.ndarray:
        """r, shape [m]."""
        return self.mean[:, 0]

    @property
    def jacobian(self) -> np.ndarray:
        """J, shape [m, d]."""
        return self.mean[:, 1:]

    @classmethod
    def begun(cls, residuals: np.ndarray, d: int) -> "Model":
        """Returns the model of known residuals and an unknown Jacobian."""
        mean = np.column_stack([residuals, np.zeros((len(residuals), d))])
        return cls(mean, np.diag(np.r_[0, np.full(d, _UNKNOWN)]))

    def missed(self, step: np.ndarray, residuals: np.ndarray) -> tuple[float, float]:
        """Returns the expected and the observed mean square error at a step."""
        z = np.append(1, step)
        error = residuals - self.mean @ z
        spread = max(float(z @ self.covariance @ z), 0) + float(step @ step) ** 2 / 4
        return spread, float(error @ error) / len(error)

    def learned(self, step: np.ndarray, residuals: np.ndarray, noise: float) -> "Model":
        """Returns the model after residuals at a step, whose variance is `noise`."""
        z, spread = np.append(1, step), self.missed(step, residuals)[0]
        along = self.covariance @ z
        gain = along / (spread + noise + 1e-300)
        covariance = self.covariance - np.outer(gain, along)
        mean = self.mean + np.outer(residuals - self.mean @ z, gain)
        return Model(mean, (covariance + covariance.T) / 2)

    def moved(self, step: np.ndarray) -> "Model":
        """Returns the model about the end of a step."""
        square, shift = step @ step, np.eye(len(step) + 1)
        shift[1:, 0] = step
        change = np.diag(np.r_[square**2 / 4, np.full(len(step), square)])
        change[0, 1:] = change[1:, 0] = square / 2 * step
        return Model(self.mean @ shift, shift.T @ self.covariance @ shift + change)


class Fit(NamedTuple):
    """The fit at the best point.

    Attributes:
      residuals: Residuals at the best point, shape [m].
      jacobian: Estimate of their Jacobian matrix, shape [m, d]; 0 for parameters that
        cannot move.
      weights: Square roots of the weights of the residuals in the Gauss–Newton matrix,
        shape [m]; 1 without a robust loss.
      value: f, the sum of squares, or of the losses.
      free: Whether each parameter can move: bool, shape [d].
    """

    residuals: np.ndarray
    jacobian: np.ndarray
    weights: np.ndarray
    value: float
    free: np.ndarray

    def __repr__(self) -> str:
        return shown.on_a_line(
            self,
            value=shown.number(self.value),
            degrees_of_freedom=str(self.degrees_of_freedom),
            rank=str(self.rank),
            jacobian=shown.tree(self.jacobian),
        )

    @property
    def degrees_of_freedom(self) -> int:
        """Number of residuals minus the number of parameters that can move."""
        return len(self.residuals) - int(np.sum(self.free))

    def _inverse(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns R with (JᵀJ)⁻¹ = R Rᵀ, and the directions without an effect."""
        matrix = self.weights[:, None] * self.jacobian[:, self.free]
        sizes = np.linalg.norm(matrix, axis=0)
        sizes = np.where(sizes > 0, sizes, 1)
        _, w, rows = np.linalg.svd(matrix / sizes)
        known = np.flatnonzero(w > _RANK * max(w, default=0))
        inverse = rows[known].T / w[known] / sizes[:, None]
        return inverse, np.delete(rows, known, axis=0)

    @property
    def rank(self) -> int:
        """Rank of the Jacobian matrix of the parameters that can move."""
        return self._inverse()[0].shape[1]

    @property
    def covariance(self) -> np.ndarray:
        """Covariance of the parameters, f / (m − d) · (JᵀJ)⁻¹, shape [d, d].

        It is infinite for parameters that the residuals do not determine, with a
        warning, NaN without a degree of freedom, and 0 for parameters that cannot move.
        """
        inverse, flat = self._inverse()
        left, which = self.degrees_of_freedom, np.flatnonzero(self.free)
        block = inverse @ inverse.T * (self.value / left if left > 0 else np.nan)
        loose = np.any(abs(flat) > np.sqrt(_RANK), axis=0)
        block[loose] = block[:, loose] = np.inf
        covariance = np.zeros((len(self.free), len(self.free)))
        covariance[np.ix_(which, which)] = block
        if np.any(loose):
            checks.warn(
                f"The Jacobian of {len(which)} parameters has rank {len(inverse.T)}. "
                f"The residuals do not determine parameters {which[loose].tolist()}, "
                "whose standard errors are infinite. Fix some of them, or add data."
            )
        return covariance

    @property
    def standard_errors(self) -> np.ndarray:
        """Standard errors of the parameters, shape [d]."""
        return np.sqrt(np.diag(self.covariance))


@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """See `least_squares`."""

    scale: Any = None
    tolerance: float = 1e-10
    loss: str = "linear"
    f_scale: float = 1.0

    # The function returns an array of residuals.
    residuals: ClassVar[bool] = True

    def __call__(self, start: Start) -> Steps:
        contract.check_continuous("least_squares()", start)
        frame = Frame.of(start, sizes_of_fit(start, self.scale))
        search = Search(self, frame, (yield start.params[None])[0])
        if not np.isfinite(search.measured):
            return End(start.params, np.inf, Reason.FAILED)
        reason = Reason.FIXED if not len(search.at) else (yield from search.steps())
        return End(search.best[0], search.best[2], reason, search.fit())

    def value(self, residuals: np.ndarray) -> np.ndarray:
        """Returns the values of residuals, shape [n, m] → [n]; NaN if one is NaN."""
        return Loss(self.loss, self.f_scale).value(residuals)


def sizes_of_fit(start: Start, scale: Any) -> np.ndarray:
    """Returns the sizes of the parameters, shape [d]; see `least_squares`."""
    if scale is not None:
        return contract.sizes(start, scale)
    width = (start.box.upper - start.box.lower) / 4
    size = np.where(start.params != 0, abs(start.params), 1)
    return np.where(width > 0, np.minimum(size, width), size)


class Search:
    """The search for a minimum, in coordinates of a frame.

    Attributes:
      at: The point of the model, shape [n].
      model: The model about it.
      measured: The value that was measured there.
      best: The best point, shape [d], its residuals, and its value.
      radius: Radius of the trust region.
      length: Length of differences, negative if the other side comes first.
      variance: Variance of the noise of a residual, 0 if none was seen.
      noise: The same in the units of the model.
      errors: Expected and observed mean square errors of the model, the latest ones.
      limited: Whether a budget ends the run.
      escapes: Whether long steps have been tried.
      probe_below: Radius below which noise is looked for.
      level: Variance below which noise is none.
    """

    def __init__(self, method: LeastSquares, frame: Frame, residuals: np.ndarray):
        self.frame, self.at = frame, np.zeros(len(frame.units))
        self.loss, self.tolerance = Loss(method.loss, method.f_scale), method.tolerance
        self.model = Model.begun(residuals, len(self.at))
        self.measured = self.value()
        self.best = frame.start.params, residuals, self.measured
        self.radius, self.length, self.variance, self.noise = _RADIUS, _FIRST, 0.0, 0.0
        self.errors: list[tuple[float, float]] = []
        self.limited, self.escapes, self.probe_below = frame.start.limited, False, 0.0
        self.level = _SEEN**2 * self.measured / len(residuals)

    def fit(self) -> Fit:
        """Returns the fit at the best point."""
        _, residuals, value = self.best
        free, weights = self.frame.free, self.loss.weighted(residuals)[0]
        jacobian = np.zeros((len(residuals), len(free)))
        effects = np.linalg.norm(self.model.jacobian, axis=0)
        known = effects > _NEGLIGIBLE * np.max(effects, initial=0)
        jacobian[:, free] = np.where(known, self.model.jacobian, 0) / self.frame.units
        return Fit(residuals, jacobian, weights, value, free)

    def value(self) -> float:
        """Returns the value at the point, as the model has it."""
        return float(self.loss.value(self.model.residuals[None])[0])

    def settled(self, steps: np.ndarray) -> np.ndarray:
        """Returns the steps from the point that remain within bounds and rounded."""
        return self.frame.place(self.frame.point(self.at + steps)) - self.at

    def asked(self, steps: np.ndarray) -> Part[tuple[np.ndarray, np.ndarray]]:
        """Evaluates steps from the point; returns residuals, and values or ∞."""
        points = self.frame.point(self.at + steps)
        center = self.frame.point(self.at) if self.noise else None
        residuals = yield Ask(points, center=center, fit=self.fit())
        values = np.nan_to_num(self.loss.value(residuals), nan=np.inf, posinf=np.inf)
        i = int(np.argmin(values))
        if values[i] < self.best[2]:
            self.best = points[i], residuals[i], float(values[i])
        return residuals, values

    def judge(self, step: np.ndarray, residuals: np.ndarray) -> float:
        """Compares the model with residuals at a step; returns the noise."""
        expected, missed = self.model.missed(step, residuals)
        if self.noise < expected < 1:
            self.errors = [*self.errors, (expected, missed)][-3 * len(self.at) - 8 :]
        known = np.array(self.errors or [(1.0, np.inf)])
        unit = float(np.median(known[:, 1] / (known[:, 0] + self.noise))) + 1e-300
        self.noise = min(self.variance / unit, _LONGEST**2)
        return missed - _SURPRISE * unit * (expected - self.model.covariance[0, 0])

    def move(self, step: np.ndarray, residuals: np.ndarray, value: float) -> None:
        """Moves the point by a step whose residuals are known."""
        moved, here = self.model.moved(step), np.zeros_like(step)
        self.model = moved.learned(here, residuals, self.noise)
        self.at, self.measured = self.at + step, float(value)

    def probe(self) -> np.ndarray:
        """Returns a step that is too short for a change, shape [1, n], if it is due."""
        if not self.radius < self.probe_below:
            return np.zeros((0, len(self.at)))
        self.probe_below = _AGAIN * self.radius
        signs = np.where(self.frame.start.rng.random(len(self.at)) < 0.5, -1.0, 1.0)
        short, longer = (self.settled(length * signs) for length in _PROBES)
        return np.where(short == 0, longer, short)[None]

    def look(self, step: np.ndarray, residuals: np.ndarray) -> None:
        """Looks for noise in the residuals after a short step."""
        # Both residuals have noise.
        before, variance = self.variance, self.judge(step, residuals) / 2
        self.variance = variance if self.level < variance < np.inf else 0.0
        self.judge(step, residuals)
        if self.variance and not before:
            # What was learned as if it were exact has errors.
            slopes = np.full(len(step), 2 / max(abs(self.length), 1e-3) ** 2)
            errors = self.noise * np.diag(np.r_[1, slopes])
            self.model = Model(self.model.mean, self.model.covariance + errors)

    def differences(self, axes: np.ndarray) -> Part[bool]:
        """Evaluates steps along axes, shape [k, n]; returns whether none failed."""
        ahead, back = (self.settled(s * self.length * axes) for s in (1, -1))
        room = np.linalg.norm(ahead, axis=1) >= np.linalg.norm(back, axis=1)
        steps, probe = np.where(room[:, None], ahead, back), self.probe()
        if not np.any(steps):  # All moves are rounded away.
            self.length = 0.0
        residuals, values = yield from self.asked(np.concatenate([steps, probe]))
        if len(probe) and values[-1] < np.inf:
            self.look(probe[0], residuals[-1])
        values = values[: len(steps)]
        for i in np.flatnonzero(values < np.inf):
            self.judge(steps[i], residuals[i])
            self.model = self.model.learned(steps[i], residuals[i], self.noise)
        best, complete = int(np.argmin(values)), bool(np.all(values < np.inf))
        self.length = abs(self.length) if complete else -0.25 * self.length
        if complete and values[best] < self.measured and not self.noise:
            self.move(steps[best], residuals[best], values[best])
        return complete

    def trial(self) -> tuple[np.ndarray, float]:
        """Returns the step of least value in the region, and what it promises."""
        root, residuals = self.loss.weighted(self.model.residuals)
        jacobian = root[:, None] * self.model.jacobian
        gradient, hessian = jacobian.T @ residuals, jacobian.T @ jacobian
        room = Box(*(bound - self.at for bound in self.frame.box))
        for shorter in 0.125 ** np.arange(7):
            # The box may bend a step upward.
            step = self.settled(in_box(gradient, hessian, room, shorter * self.radius))
            promised = -float(2 * gradient @ step + step @ hessian @ step)
            if promised > 0 or not np.any(step):
                break
        return step, promised

    def tried(self, step: np.ndarray, promised: float) -> Part[float]:
        """Evaluates a step; returns its decrease as a share of the promised one."""
        residuals, values = yield from self.asked(step[None])
        before, old = self.value(), (self.model, self.at, self.measured)
        level = max(before, self.measured) + 2 * residuals.size * self.variance
        if not values[0] < _WILD * level:
            return -np.inf
        self.judge(step, residuals[0])
        self.move(step, residuals[0], values[0])
        decrease = before - self.value()
        if not decrease > 0:
            self.model, self.at, self.measured = old
            self.model = self.model.learned(step, residuals[0], self.noise)
        return decrease / promised

    def escaped(self) -> Part[bool]:
        """Tries long steps along flat axes once; returns whether one leads lower."""
        squares, axes = np.linalg.eigh(self.model.jacobian.T @ self.model.jacobian)
        flat = axes.T[squares <= _FLAT**2 * self.measured]
        if self.escapes or not len(flat):
            return False
        # On a plateau, the start and the way back to it are not flat.
        back = -np.outer(1 - 0.5 ** np.arange(1, 7), flat.T @ (flat @ self.at))
        self.escapes, steps = True, self.settled(np.vstack([flat, -flat, back]))
        residuals, values = yield from self.asked(steps)
        best = int(np.argmin(values))
        if lower := bool(values[best] < self.measured):
            self.move(steps[best], residuals[best], values[best])
        return lower

    def steps(self) -> Part[str]:
        """Takes the steps; returns the reason for the end."""
        refresh, every = True, False
        while True:
            spread, axes = np.linalg.eigh(self.model.covariance[1:, 1:])
            wanted = every | (spread > (_REACH * self.radius) ** 2)
            if refresh and np.any(wanted):
                refresh = not (yield from self.differences(axes.T[wanted][::-1]))
                every = False
                if abs(self.length) < 1e-10:
                    return Reason.NEIGHBORHOOD
                continue
            step, promised = self.trial()
            length = float(np.linalg.norm(step))
            value = self.value()
            # Without a limit, a run does not average the noise of values away.
            least = 0.0 if self.limited else 2 * np.sqrt(value * self.variance)
            if promised <= max(self.tolerance * value, least) or length < 1e-12:
                length = float(np.clip(min(self.radius, length), _CLOSEST, _CLOSE))
                close = (_REACH * length) ** 2 + 3 * self.noise / self.length**2
                if spread[-1] <= close:
                    every = self.noise > 0 and self.limited
                    if not every:
                        if not (yield from self.escaped()):
                            changed = bool(np.any(self.model.jacobian))
                            return decided(self.measured, changed)
                        length = _RADIUS
            else:
                share = yield from self.tried(step, promised)
                if share > _GOOD:
                    self.radius = max(self.radius, _GROW * length)
                if share >= _BAD:
                    continue
                stale = spread[-1] > (_STALE * length) ** 2
                length *= _SHRINK_IF_STALE if stale else _SHRINK
                if length < _LEAST:
                    every, length = self.noise > 0 and self.limited, _CLOSE
                    if not every:
                        return Reason.MINIMUM if self.noise else Reason.NOWHERE
            self.radius, refresh = length, True
            self.probe_below = self.probe_below or 2 * length
            # At the least length, a curvature of 1 is as large as the noise.
            least = np.clip((4 * self.noise) ** 0.25, _SHORTEST, _LONGEST)
            self.length = float(np.clip(_SHARE * length, least, _LONGEST))


@checks_names
def least_squares(
    scale: Any = None,
    tolerance: float = 1e-10,
    loss: str = "linear",
    f_scale: float = 1.0,
) -> Method:
    """Fits by least squares: minimizes a sum of squared residuals.

    The function returns an array of residuals rᵢ, shape [m]; a number is one residual,
    and the arrays of a tree are joined. The value of a run is their sum of squares,
    Σ rᵢ² (and not half of it). Each step minimizes |r + J s|² within a trust region and
    the bounds: Gauss–Newton steps. The Jacobian J is not evaluated at each step. Every
    value improves an estimate of it, a Kalman filter knows along which axes the
    estimate has become too uncertain, and only these are evaluated again, all at once.

    Use it for fits of up to some hundred parameters. It needs about d + 1 evaluations
    to begin, and often fewer than 10 (d + 1) in all. Residuals may have noise that
    differs between any two points, such as rounding or random numbers: differences
    become longer, and residuals are averaged until a budget ends the run. Errors that
    vary slowly, such as a solver makes, are no noise. Use `untuned()` if only the sum
    is known. A step takes O(m d² + d³) operations.

    A run ends if the model promises a decrease by less than a share `tolerance` of the
    value, once the Jacobian is known for short steps; or if no step leads lower. A
    start whose residuals are not finite ends it at once.

    Args:
      scale: Order of magnitude of the distance to the minimum, as in
        `radazo_jax.methods.evolution`. By default, each parameter has the size of its
        absolute value at the start, 1 if that is 0, and at most a quarter of the width
        of its bounds.
      tolerance: Share of the value by which a step must promise to decrease it,
        positive.
      loss: Loss ρ of a squared residual, as in `scipy.optimize.least_squares`:
        "linear" for squares, or against outliers "soft_l1", "huber", "cauchy" or
        "arctan". The value is then C² Σ ρ(rᵢ²/C²), twice the cost of SciPy.
      f_scale: C, the size of residuals beyond which a loss discounts them, positive.
        It has no effect on the linear loss.

    Returns:
      The method. The `fit` of a result has residuals, Jacobian and standard errors: see
      `radazo_jax.methods.Fit`.

    Raises:
      ValueError: If `tolerance` or `f_scale` is not positive, or `loss` is unknown.

    Examples:
      >>> import radazo_jax as zo
      >>> zo.methods.least_squares(loss="soft_l1", f_scale=0.1)
      LeastSquares(scale=None, tolerance=1e-10, loss='soft_l1', f_scale=0.1)

    References:
      Nocedal & Wright, Numerical Optimization, 2006, chapter 10; Cartis, Fiala,
      Marteau & Roberts, Improving the Flexibility and Robustness of Model-Based
      Derivative-Free Optimization Solvers, ACM Trans. Math. Softw. 2019: DFO-LS.
    """
    checks.check_positive("tolerance", tolerance)
    checks.check_positive("f_scale", f_scale)
    if loss not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}; got {loss!r}.")
    return LeastSquares(scale, tolerance, loss, f_scale)
