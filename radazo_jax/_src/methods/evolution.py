"""An evolution strategy with covariance matrix adaptation (CMA-ES)."""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from radazo_jax._src.base import checks
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.methods import contract
from radazo_jax._src.methods.contract import Ask, Box, End, Method, Start, Steps
from radazo_jax._src.methods.ends import Reason, decided, guarded
from radazo_jax._src.methods.points import finite

# Up to so many parameters, the whole covariance matrix is learned; beyond, its
# diagonal.
MOST_FULL = 200

# The largest population of a restart: in first populations, and in numbers of all its
# points.
_MOST_TIMES, _MOST_NUMBERS = 16, 2**23

# The shares of the first standard deviation below and above which a run has ended.
_SMALLEST, _LARGEST = 1e-11, 1e8

# Values are equal if they differ by less than this share.
_EQUAL = 1e-12

# The largest condition number of the covariance.
_CONDITION = 1e14

# If no point has a value, the next points lie closer to the mean.
_CLOSER = 0.5

# The distance from a bound within which points are drawn closer to it: a share of the
# distance of the bounds, or of the size of a parameter with one bound.
_MARGIN = 0.05

# The least standard deviation of points on a grid, in its steps.
DEVIATION = 0.2


class Constants(NamedTuple):
    """Constants of a strategy, in the names of Hansen's tutorial, table 1.

    Attributes:
      weights: wᵢ, the best first; positive ones have a sum of 1. Shape [λ].
      c_sigma: Learning rate of p_σ.
      d_sigma: Damping of σ.
      c_c: Learning rate of p_c.
      c_1: Learning rate of C from p_c.
      c_mu: Learning rate of C from the population.
      length: Mean length of a standard normal vector.
      gap: Number of steps between two eigendecompositions.
      patience: Number of steps with equal values after which a run ends.
      stagnation: Number of steps without progress after which a run ends.
    """

    weights: np.ndarray
    c_sigma: float
    d_sigma: float
    c_c: float
    c_1: float
    c_mu: float
    length: float
    gap: int
    patience: int
    stagnation: int


class State(NamedTuple):
    """State of a strategy, in units of the parameters.

    Points are mean + σ B D z, with z ~ N(0, I).

    Attributes:
      mean: Shape [d].
      sigma: Step size σ.
      covariance: C, shape [d, d], or its diagonal, shape [d].
      basis: B, the eigenvectors of C in columns, shape [d, d], or `None` for I.
      deviations: Diagonal of D, the roots of the eigenvalues of C, shape [d].
      path_sigma: p_σ, the path that adapts σ, shape [d].
      path_c: p_c, the path that adapts C, shape [d].
      generation: Number of steps.
    """

    mean: np.ndarray
    sigma: float
    covariance: np.ndarray
    basis: np.ndarray | None
    deviations: np.ndarray
    path_sigma: np.ndarray
    path_c: np.ndarray
    generation: int

    def drawn(self, z: np.ndarray) -> np.ndarray:
        """Returns B D z for rows z."""
        y = z * self.deviations
        return y if self.basis is None else y @ self.basis.T

    def whitened(self, y: np.ndarray) -> np.ndarray:
        """Returns C^(−1/2) y for rows y."""
        if self.basis is None:
            return y / self.deviations
        return (y @ self.basis) / self.deviations @ self.basis.T


class Reflected(NamedTuple):
    """A map from unbounded g to x in a box.

    x = g, except within a margin a of a bound. At a lower bound l,
    x − l = (g − l + a)² / (4a), which is a reflection at g = l − a. A function that
    falls toward a bound has a minimum at g = l − a, to which σ can converge.

    Attributes:
      box: Bounds of x.
      margin: a, shape [d].
    """

    box: Box
    margin: np.ndarray

    def unbounded(self, x: np.ndarray) -> np.ndarray:
        """Returns the g of a point x."""
        (lower, upper), a = self
        with np.errstate(invalid="ignore"):
            above, below = np.maximum(x - lower, 0), np.maximum(upper - x, 0)
            g = np.where(above < a, lower - a + 2 * np.sqrt(a * above), x)
            return np.where(below < a, upper + a - 2 * np.sqrt(a * below), g)

    def limited(self, g: np.ndarray) -> np.ndarray:
        """Returns the closest g that is not reflected."""
        return np.clip(g, self.box.lower - self.margin, self.box.upper + self.margin)

    def inside(self, g: np.ndarray) -> np.ndarray:
        """Returns the x of each g, with the shape of `g`."""
        (lower, upper), a = self
        low, high = lower - a, upper + a
        with np.errstate(invalid="ignore", over="ignore"):
            turn = 2 * (high - low)
            there = (g - low) % turn
            folded = low + np.minimum(there, turn - there)
            from_low, from_high = low + abs(g - low), high - abs(g - high)
            one = np.where(np.isfinite(low), from_low, from_high)
            folded = np.where(np.isfinite(turn), folded, one)
            # Without a reflection, nothing is rounded.
            folded = np.where((g >= low) & (g <= high), g, folded)
            x = np.where(
                folded < lower + a, lower + (folded - low) ** 2 / 4 / a, folded
            )
            x = np.where(folded > upper - a, upper - (high - folded) ** 2 / 4 / a, x)
        return self.box.clip(x)


@dataclasses.dataclass(frozen=True)
class Evolution:
    """See `evolution`."""

    population: int | None = None
    step_size: float = 0.3
    scale: Any = 1.0

    @guarded
    def __call__(self, start: Start) -> Steps:
        x, gridded = start.params, np.any(start.step)
        # A second value says whether a point of a grid has one value.
        values = yield Ask(np.stack([x, x]), again=True) if gridded else x[None]
        value = float(finite(values)[0])
        units = contract.sizes(start, self.scale)
        noisy = bool(gridded and values[0] != values[1])
        inner = steps(start, value, units, self.step_size, self.population, noisy)
        if gridded and not noisy:
            inner = contract.Known(x, value).steps(inner)
        return (yield from inner)


@checks_names
def evolution(
    population: int | None = None, step_size: float = 0.3, scale: Any = 1.0
) -> Method:
    """An evolution strategy with covariance matrix adaptation (CMA-ES).

    In each step, λ points are drawn from a normal distribution,

        xᵢ = m + σ S B D zᵢ,    zᵢ ~ N(0, I),    C = B D² Bᵀ

    The weighted mean of the better half is the next m. The covariance C and the step
    size σ are learned from the ranks of all values: C from good steps and from bad
    ones, σ from the length of the path of m.

    Use it for functions of up to a few hundred parameters with jumps, noise or many
    local minima. Only ranks count: any increasing function of the values leads to the
    same run. It learns scales and correlations of the parameters within about 10 d
    steps. If the function is smooth, methods with differences need fewer evaluations.

    For up to 200 parameters, C is a matrix. For more parameters it is a diagonal, which
    cannot represent correlations.

    Near a bound, points are drawn closer to it, and points beyond it are reflected.
    Points without a value are the worst, and have no part in the mean. If no point has
    a value, the next points lie half as far from m.

    With a `step` of the run, standard deviations are at least a fifth of it, and no
    point is evaluated twice, unless the function is noisy.

    A run ends if all standard deviations are below 10⁻¹¹ of the first ones or below
    the rounding of m, or above 10⁸ of the first ones; if the least values of
    10 + 30 d/λ steps are equal up to 10⁻¹²; if 100 + 100 √d³/λ steps made no progress;
    or if the condition number of C exceeds 10¹⁴.

    Args:
      population: λ, the number of points per step, at least 2. More points find better
        local minima and average more noise. By default 4 + ⌊3 ln d⌋.
      step_size: First σ, in sizes of the parameters, positive. The minimum should be
        within about three of them.
      scale: Order of magnitude of the distance to the minimum: a positive number, or a
        tree like the parameters of numbers and arrays that broadcast to the leaves. The
        size of a parameter is two thirds of the distance of two finite bounds.
        Otherwise it is `scale`, times the root mean square of θ₀ / `scale` if that is
        larger than 1.

    Returns:
      The method.

    Raises:
      TypeError, ValueError: If an argument has the wrong type or is out of range.

    Examples:
      >>> import numpy as np
      >>> import radazo_jax as zo
      >>> zo.methods.evolution(population=20)
      Evolution(population=20, step_size=0.3, scale=1.0)

    References:
      Hansen, The CMA Evolution Strategy: A Tutorial, 2016,
      <https://arxiv.org/abs/1604.00772>, table 1 and figure 6, with negative weights.

      Ros & Hansen, A Simple Modification in CMA-ES Achieving Linear Time and Space
      Complexity, PPSN 2008: the diagonal.
    """
    if population is not None:
        population = checks.check_int_at_least("population", population, 2)
    checks.check_positive("step_size", step_size)
    return Evolution(population, float(step_size), scale)


def default_population(d: int) -> int:
    """Returns λ of the tutorial for d parameters."""
    return 4 + int(3 * math.log(d))


def doubled(population: int, d: int) -> int:
    """Returns the population of a restart: twice as many points, within a limit."""
    most = min(_MOST_TIMES * default_population(d), _MOST_NUMBERS // d)
    return min(2 * population, max(population, most))


def constants(d: int, size: int) -> Constants:
    """Returns the constants of a population of this size for d parameters."""
    raw = math.log((size + 1) / 2) - np.log(np.arange(1, size + 1))
    better, worse = raw[: size // 2], raw[size // 2 :]
    mass, mass_of_worse = (np.sum(w) ** 2 / np.sum(w**2) for w in (better, worse))
    # A diagonal has fewer numbers to learn than a matrix.
    faster = 1 if d <= MOST_FULL else (d + 2) / 3
    c_1 = faster * 2 / ((d + 1.3) ** 2 + mass)
    c_mu = faster * 2 * (1 / 4 + mass + 1 / mass - 2) / ((d + 2) ** 2 + mass)
    c_mu = min(1 - c_1, c_mu)
    # Such negative weights that C neither shrinks nor grows in the mean, that its
    # negative updates are not faster than positive ones, and that it stays positive.
    negative = min(
        1 + c_1 / c_mu,
        1 + 2 * mass_of_worse / (mass + 2),
        (1 - c_1 - c_mu) / (d * c_mu),
    )
    c_sigma = (mass + 2) / (d + mass + 5)
    return Constants(
        weights=np.r_[better / np.sum(better), negative * worse / np.sum(abs(worse))],
        c_sigma=c_sigma,
        d_sigma=1 + 2 * max(0, math.sqrt((mass - 1) / (d + 1)) - 1) + c_sigma,
        c_c=(4 + mass / d) / (d + 4 + 2 * mass / d),
        c_1=c_1,
        c_mu=c_mu,
        length=math.sqrt(d) * (1 - 1 / (4 * d) + 1 / (21 * d**2)),
        gap=max(1, int(1 / (10 * d * (c_1 + c_mu)))),
        patience=10 + math.ceil(30 * d / size),
        stagnation=int(100 + 100 * d**1.5 / size),
    )


def first_state(mean: np.ndarray, sigma: float) -> State:
    """Returns the state before the first step."""
    d = len(mean)
    full, zero, one = d <= MOST_FULL, np.zeros(d), np.ones(d)
    covariance, basis = (np.eye(d), np.eye(d)) if full else (one, None)
    return State(mean, sigma, covariance, basis, one, zero, zero, 0)


def adapted(
    c: Constants,
    state: State,
    y: np.ndarray,
    values: np.ndarray,
    least: np.ndarray | float = 0.0,
) -> State:
    """Returns the state after a step.

    Args:
      c: Constants.
      state: State before.
      y: Steps (x − m) / σ, the best first, shape [λ, d].
      values: Their values, ascending, infinite if they failed, shape [λ].
      least: Least standard deviations, in units: a number, or shape [d].
    """
    d = y.shape[1]
    weights = np.where(np.isfinite(values), np.maximum(c.weights, 0), 0)
    if not np.any(weights):
        return state._replace(sigma=_CLOSER * state.sigma)
    weights = weights / np.sum(weights)
    mass, step, generation = 1 / np.sum(weights**2), weights @ y, state.generation + 1
    z = state.whitened(y)

    rate = math.sqrt(c.c_sigma * (2 - c.c_sigma) * mass)
    path_sigma = (1 - c.c_sigma) * state.path_sigma + rate * (weights @ z)
    length = float(np.linalg.norm(path_sigma))
    # While σ grows fast, C must not.
    begun = math.sqrt(1 - (1 - c.c_sigma) ** (2 * generation))
    steady = length / begun < (1.4 + 2 / (d + 1)) * c.length

    rate = math.sqrt(c.c_c * (2 - c.c_c) * mass)
    path_c = (1 - c.c_c) * state.path_c + steady * rate * step
    missing = (1 - steady) * c.c_c * (2 - c.c_c)

    # The length of a bad step teaches nothing.
    lengths = np.maximum(np.sum(z**2, 1), np.finfo(float).tiny)
    negative = np.minimum(c.weights, 0)
    each = weights + negative * d / lengths
    kept = 1 + c.c_1 * missing - c.c_1 - c.c_mu * (1 + np.sum(negative))
    if state.basis is None:
        learned = c.c_1 * path_c**2 + c.c_mu * (each @ y**2)
    else:
        learned = c.c_1 * np.outer(path_c, path_c) + c.c_mu * (y.T * each) @ y
    growth = c.c_sigma / c.d_sigma * (length / c.length - 1)
    if values[0] == values[min(len(values) // 2, 1 + len(values) // 4)]:
        growth += 0.2 + c.c_sigma / c.d_sigma  # The better values are equal.
    after = State(
        mean=state.mean + state.sigma * step,
        sigma=state.sigma * math.exp(min(1, growth)),
        covariance=kept * state.covariance + learned,
        basis=state.basis,
        deviations=state.deviations,
        path_sigma=path_sigma,
        path_c=path_c,
        generation=generation,
    )
    return after if generation % c.gap else _decomposed(_widened(after, least))


def _widened(state: State, least: np.ndarray | float) -> State:
    """Returns the state with standard deviations of at least these, shape [d]."""
    least, covariance = (least / state.sigma) ** 2, state.covariance
    if state.basis is None:
        return state._replace(covariance=np.maximum(covariance, least))
    missing = np.maximum(least - np.diagonal(covariance), 0)
    return state._replace(covariance=covariance + np.diag(missing))


def _decomposed(state: State) -> State:
    """Returns the state with the eigenvectors and eigenvalues of its covariance."""
    if state.basis is None:
        variances, basis = state.covariance, None
    else:
        variances, basis = np.linalg.eigh((state.covariance + state.covariance.T) / 2)
    least = np.max(variances) / _CONDITION
    deviations = np.sqrt(np.maximum(variances, least))
    return state._replace(basis=basis, deviations=deviations)


def steps(
    start: Start,
    value: float,
    units: np.ndarray,
    sigma: float,
    population: int | None = None,
    again: bool = False,
) -> Steps:
    """Takes the steps of CMA-ES; see `evolution`.

    Args:
      start: The start, whose point is the first mean.
      value: Its value, infinite if it is not known.
      units: Sizes of the parameters, shape [d]; of a grid, at least its step.
      sigma: First step size, in units.
      population: Number of points per step.
      again: Whether known points are evaluated again.
    """
    x, box = start.params, start.box
    units, least = np.maximum(units, start.step), DEVIATION * start.step
    d, size = len(x), population or default_population(len(x))
    c, best = constants(d, size), End(x, value, "")
    width = box.upper - box.lower
    margin = _MARGIN * np.where((width > 0) & (width < np.inf), width, units)
    space = Reflected(box, margin)

    def point(mean: np.ndarray) -> np.ndarray:
        return box.clip(start.round(space.inside(units * mean)))

    state = first_state(space.unbounded(x) / units, sigma)
    history: list[tuple[float, float]] = []  # Least and median values of steps.
    while True:
        y = state.drawn(start.rng.standard_normal((size, d)))
        points = point(state.mean + state.sigma * y)
        values = yield Ask(points, point(state.mean), again)
        values = finite(values)
        order = np.argsort(values, kind="stable")
        y, values = y[order], values[order]
        if values[0] < best.value:
            best = End(points[order[0]], float(values[0]), "")
        state = adapted(c, state, y, values, least / units)
        state = state._replace(mean=space.limited(units * state.mean) / units)
        history.append((values[0], values[size // 2]))
        reason = _reason(c, state, sigma, history)
        if reason is not None:
            rises = any(median > best.value for _, median in history)
            return best._replace(reason=decided(best.value, rises, reason))


def _reason(
    c: Constants, state: State, first: float, history: list[tuple[float, float]]
) -> Reason | None:
    """Returns why the run has ended, or `None`."""
    variances = state.covariance
    if state.basis is not None:
        variances = np.diagonal(variances)
    deviations = state.sigma * np.sqrt(np.maximum(variances, 0))
    least = np.maximum(_SMALLEST * first, np.finfo(float).eps * abs(state.mean))
    if np.all(deviations < least) and np.all(state.sigma * abs(state.path_c) < least):
        return Reason.MINIMUM
    if not np.all(deviations < _LARGEST * first):
        return Reason.GROWING
    if np.max(state.deviations) >= 0.999 * math.sqrt(_CONDITION) * np.min(
        state.deviations
    ):
        return Reason.SINGULAR
    latest = [least for least, _ in history[-c.patience :]]
    highest, lowest = max(latest), min(latest)
    if len(latest) == c.patience and highest <= lowest + _EQUAL * abs(lowest):
        return Reason.EQUAL
    return Reason.STAGNANT if _stagnates(c, state, history) else None


def _stagnates(c: Constants, state: State, history: list[tuple[float, float]]) -> bool:
    """Says whether the medians of the latest values are not below earlier ones."""
    count, d, size = len(history), len(state.mean), len(c.weights)
    span = max(c.stagnation // 10, count // 10)
    if count % 10 or count <= max(100, 2 * span, d * (5 + 100 / size)):
        return False
    latest, before = np.array(history[-span:]), np.array(history[-2 * span : -span])
    return bool(np.all(np.median(latest, 0) >= np.median(before, 0)))
