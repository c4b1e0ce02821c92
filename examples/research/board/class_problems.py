"""Smooth functions of a vector, made from a seed, and their minima.

A family is `family(draw, d)`: it draws rotations, data, a start and a minimum. Each
seed of `draw` gives another function. Functions are plain NumPy in float64 and take
microseconds, because tools evaluate them one point after another.

A family's docstring has the least value f* if there is a closed form. Otherwise,
`fitted` and `polished` find f* by long runs from the parameters that made the data.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.fft import dct, idct
from scipy.optimize import least_squares, minimize

Map = Callable[[np.ndarray], np.ndarray]
Value = Callable[[np.ndarray], float]
_DENSE = 100  # Above this number of parameters, rotations are cosine transforms.


# Compared by identity, because it holds arrays.
@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A function with its start and its minimum.

    Attributes:
      fun: The function of a point, float64 [d].
      start: The start of all methods, [d].
      least: The value that gaps are measured from.
      best: A point of this value, [d].
      bounds: The lower and the upper bounds, [d] each; `None` without.
      noise: The standard deviation of noise that is added, as a share of `gap`.
      relative: The standard deviation of noise, as a share of the value.
      residuals: The residuals of a fit, whose mean square is the function.
      step: The step that a tool for whole numbers is told; `None` without. The function
        itself rounds because of the others.
    """

    fun: Value
    start: np.ndarray
    least: float
    best: np.ndarray
    bounds: tuple[np.ndarray, np.ndarray] | None = None
    noise: float = 0.0
    relative: float = 0.0
    residuals: Map | None = None
    step: float | None = None

    @property
    def dimension(self) -> int:
        return self.start.size

    @functools.cached_property
    def gap(self) -> float:
        """The value at the start minus the least value."""
        return float(self.fun(self.start)) - self.least

    def changed(self, fun: Value, **fields: Any) -> "Function":
        """Returns another function with this start, minimum and bounds."""
        return dataclasses.replace(self, fun=fun, residuals=None, **fields)


Family = Callable[[np.random.Generator, int], Function]


def rotation(draw: np.random.Generator, d: int) -> tuple[Map, Map]:
    """Returns a random orthogonal map and its inverse."""
    if d <= _DENSE:
        matrix = np.linalg.qr(draw.normal(size=(d, d)))[0]
        back = np.ascontiguousarray(matrix.T)
        return (lambda x: matrix @ x), (lambda x: back @ x)
    signs, order = draw.choice([-1.0, 1.0], d), draw.permutation(d)
    inverse = np.argsort(order)
    return (
        lambda x: dct(signs * x, norm="ortho")[order],
        lambda x: signs * idct(x[inverse], norm="ortho"),
    )


def known(fun: Value, start: np.ndarray, best: np.ndarray) -> Function:
    """Returns a function whose minimum is the given point."""
    return Function(fun, start, float(fun(best)), best)


def polished(
    fun: Value,
    start: np.ndarray,
    points: Sequence[np.ndarray],
    bounds: tuple[np.ndarray, np.ndarray] | None = None,
    slope: Map | None = None,
) -> Function:
    """Returns a function whose minimum is the end of a long run, the best of some.

    Args:
      fun: The function.
      start: The start of the methods, [d].
      points: Starts of the runs, [d] each. The best of their ends is polished.
      bounds: The lower and the upper bounds, [d] each; `None` without.
      slope: The gradient; by default, it is made of central differences.
    """
    box = None if bounds is None else np.stack(bounds, axis=1)

    def end(point: np.ndarray, method: str, **options: Any) -> np.ndarray:
        at = point if bounds is None else np.clip(point, *bounds)
        with np.errstate(all="ignore"):
            found = minimize(
                *(fun, at),
                jac=slope or "3-point",
                method=method,
                bounds=box,
                options=options,
            )
        return found.x if found.fun <= fun(at) else at

    best = min((end(point, "L-BFGS-B", maxfun=10**6) for point in points), key=fun)
    best = end(best, "L-BFGS-B", ftol=1e-15, gtol=1e-10, maxfun=10**6, maxiter=500)
    if bounds is None:
        best = end(best, "BFGS", gtol=1e-10)
    return Function(fun, start, float(fun(best)), best, bounds)


def fitted(
    residuals: Map, start: np.ndarray, truth: np.ndarray, *others: np.ndarray
) -> Function:
    """Returns a mean of squares; Gauss-Newton steps from some points find f*.

    Args:
      residuals: The residuals of a point.
      start: The start of the methods, [d].
      truth: The parameters that made the data, [d].
      others: More points, for a fit whose least minimum is not next to the truth.
    """

    def fun(x: np.ndarray) -> float:
        r = residuals(x)
        return float(r @ r) / r.size

    tight: dict[str, Any] = dict.fromkeys(("ftol", "xtol", "gtol"), 1e-15)
    tight |= {"jac": "3-point", "x_scale": "jac"}
    found = least_squares(residuals, truth, max_nfev=100, **tight)
    best = found.x if fun(found.x) < fun(truth) else truth
    for other in others:
        end = least_squares(residuals, other, max_nfev=1000, **tight).x
        # Minima whose values differ by rounding are one.
        best = end if fun(end) < fun(best) - 1e-7 * fun(start) else best
    return dataclasses.replace(known(fun, start, best), residuals=residuals)


def quadratic(draw: np.random.Generator, d: int) -> Function:
    """A rotated quadratic form with a condition of 10 to 10⁴; f* is its constant."""
    turn, _ = rotation(draw, d)
    weights = np.logspace(0, draw.uniform(1, 4), d)
    best, least = draw.normal(size=d), draw.normal()

    def fun(x: np.ndarray) -> float:
        z = turn(x - best)
        return least + 0.5 * float(weights @ (z * z))

    return known(fun, best + draw.normal(size=d), best)


def chain(draw: np.random.Generator, d: int) -> Function:
    """A rotated chain of Rosenbrock's valleys; f* is its constant."""
    turn, back = rotation(draw, d)
    steep, best, least = 10 ** draw.uniform(1, 2), draw.normal(size=d), draw.normal()
    first = np.where(np.arange(d) % 2, 1.0, -1.2) + 0.2 * draw.normal(size=d)

    def fun(x: np.ndarray) -> float:
        y = 1 + turn(x - best)
        ahead, rest = y[1:] - y[:-1] ** 2, 1 - y[:-1]
        return least + float(steep * (ahead @ ahead) + rest @ rest)

    return known(fun, best + back(first - 1), best)


def quartic(draw: np.random.Generator, d: int) -> Function:
    """Fourth powers of linear forms and a weak square; f* is the constant."""
    turn, _ = rotation(draw, d)
    weights = draw.uniform(0.3, 3, d)
    best, least = draw.normal(size=d), draw.normal()

    def fun(x: np.ndarray) -> float:
        z = x - best
        squares = (weights * turn(z)) ** 2
        return least + float(squares @ squares + 0.05 * (z @ z))

    return known(fun, best + draw.normal(size=d), best)


def trigonometric(draw: np.random.Generator, d: int) -> Function:
    """Least squares of sums of sines and cosines, with residuals 0 at the minimum.

    References:
      Fletcher & Powell, A rapidly convergent descent method for minimization, The
      Computer Journal 1963.
    """
    of_sine, of_cosine = draw.uniform(-1, 1, size=(2, d, d))
    best = draw.uniform(-np.pi, np.pi, d)
    target = of_sine @ np.sin(best) + of_cosine @ np.cos(best)

    def fun(x: np.ndarray) -> float:
        r = of_sine @ np.sin(x) + of_cosine @ np.cos(x) - target
        return float(r @ r)

    return known(fun, best + 0.2 * np.pi * draw.uniform(-1, 1, d), best)


def equations(draw: np.random.Generator, d: int) -> Function:
    """Tridiagonal nonlinear equations in a rotated space; the squares are 0 at best."""
    turn, _ = rotation(draw, d)
    bend, best = draw.uniform(0.3, 1), draw.normal(size=d)

    def sides(x: np.ndarray) -> np.ndarray:
        y = turn(x)
        r = (3 + bend * y) * y
        r[1:] -= y[:-1]
        r[:-1] -= 2 * np.sin(y[1:])
        return r

    right = sides(best)

    def fun(x: np.ndarray) -> float:
        r = sides(x) - right
        return float(r @ r)

    return known(fun, best + 0.5 * draw.normal(size=d), best)


def compartments(draw: np.random.Generator, d: int) -> Function:
    """The calibration of a chain of d compartments; exact measurements, so f* is 0.

    The parameters are logarithms of rates. Steps are Heun's.
    """
    truth, width = draw.uniform(-0.5, 0.5, d), 0.1

    def states(x: np.ndarray) -> np.ndarray:
        rates = np.exp(np.clip(x, -5, 2.5))
        matrix = np.diag(rates[:-1], -1) - np.diag(rates)
        step = width * matrix
        ten_steps = np.linalg.matrix_power(np.eye(d) + step + 0.5 * (step @ step), 10)
        found = [ten_steps @ np.ones(d)]
        for _ in range(3):
            found.append(ten_steps @ found[-1])
        return np.array(found)

    measured = states(truth)

    def fun(x: np.ndarray) -> float:
        r = (states(x) - measured).ravel()
        return float(r @ r) / r.size

    return known(fun, truth + 0.5 * draw.normal(size=d), truth)


def predators(draw: np.random.Generator, d: int) -> Function:
    """Lotka and Volterra's four rates and first prey, d = 5, from noisy data."""
    truth = np.log([0.8, 0.7, 0.9, 0.6, 1.2]) + 0.2 * draw.normal(size=d)
    width, count = 0.2, 40

    def states(x: np.ndarray) -> np.ndarray:
        a, b, c, e, u = np.exp(np.clip(x, -6, 3)).tolist()
        v, found = 0.8, []
        for _ in range(count):
            half_u = u * (1 + 0.5 * width * (a - b * v))
            half_v = v * (1 + 0.5 * width * (c * u - e))
            u += width * half_u * (a - b * half_v)
            v += width * half_v * (c * half_u - e)
            u, v = min(max(u, 0.0), 1e3), min(max(v, 0.0), 1e3)
            found += [u, v]
        return np.array(found)

    data = states(truth) * (1 + 0.03 * draw.normal(size=2 * count))
    start = truth + 0.3 * draw.normal(size=d)
    return fitted(lambda x: states(x) - data, start, truth)


def _tail(draw: np.random.Generator, times: np.ndarray, d: int) -> np.ndarray:
    """Powers of time for what three parameters a unit leave of d."""
    return times[:, None] ** np.arange(d % 3)


def peaks(draw: np.random.Generator, d: int) -> Function:
    """Heights, places and widths of d/3 peaks, and a baseline, from noisy data."""
    times, count = np.linspace(-1, 1, 80), d // 3
    tail = _tail(draw, times, d)

    def model(x: np.ndarray) -> np.ndarray:
        height, place, width = x[: 3 * count].reshape(3, count)
        far = (times[:, None] - place) * np.exp(-width)
        return np.exp(-0.5 * far * far) @ height + tail @ x[3 * count :]

    truth = np.concatenate(
        [
            draw.uniform(0.5, 1.5, count),
            np.linspace(-0.8, 0.8, count) + 0.1 * draw.normal(size=count),
            np.log(0.6 / (count + 1)) + 0.2 * draw.normal(size=count),
            0.3 * draw.normal(size=d % 3),
        ]
    )
    data = model(truth) + 0.02 * draw.normal(size=times.size)
    start = truth + (0.2 / count**0.5) * draw.normal(size=d)
    return fitted(lambda x: model(x) - data, start, truth)


def network(draw: np.random.Generator, d: int) -> Function:
    """A network of d/3 units that learns another one's outputs; f* is 0."""
    times, count = np.linspace(-2, 2, 60), d // 3
    tail = _tail(draw, times, d)

    def outputs(x: np.ndarray) -> np.ndarray:
        slope, shift, out = x[: 3 * count].reshape(3, count)
        return np.tanh(times[:, None] * slope + shift) @ out + tail @ x[3 * count :]

    truth = draw.normal(size=d)
    wanted = outputs(truth)

    def fun(x: np.ndarray) -> float:
        r = outputs(x) - wanted
        return float(r @ r) / r.size

    return known(fun, truth + 0.5 * draw.normal(size=d), truth)


def lattice(count: int, space: int) -> np.ndarray:
    """Returns the points of a unit lattice that are next to its middle."""
    side = np.arange(count) - count // 2 + 0.1
    side = side[np.argsort(np.abs(side))][: 2 + int(np.ceil(count ** (1 / space)))]
    points = np.stack(np.meshgrid(*[side] * space), axis=-1).reshape(-1, space)
    skew = np.eye(space)  # Triangles in the plane, a denser packing in space.
    skew[1:, 0] = 0.5
    skew[1, 1] = 0.75**0.5
    points = points @ skew
    order = np.argsort(np.sum(points**2, axis=1), kind="stable")
    return points[order[:count]]


def cluster(draw: np.random.Generator, d: int) -> Function:
    """Atoms in Morse's potential, in space (d = 15, 30, 60, …) or in a plane."""
    space = 3 if d % 3 == 0 and d >= 12 else 2
    first, second = np.triu_indices(d // space, 1)
    stiff = draw.uniform(2, 4)

    def pairs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        atoms = x.reshape(-1, space)
        apart = atoms[first] - atoms[second]
        return apart, np.sqrt(np.einsum("ij,ij->i", apart, apart))

    def fun(x: np.ndarray) -> float:
        near = np.exp(stiff * (1 - pairs(x)[1]))
        return float(near @ (near - 2))

    def slope(x: np.ndarray) -> np.ndarray:
        apart, distances = pairs(x)
        near = np.exp(stiff * (1 - distances))
        pulls = (2 * stiff * near * (1 - near) / distances)[:, None] * apart
        found = np.zeros((d // space, space))
        np.add.at(found, first, pulls)
        np.add.at(found, second, -pulls)
        return found.ravel()

    atoms = lattice(d // space, space).ravel()
    start = atoms + 0.12 * draw.normal(size=d)
    nearby = [atoms + 0.12 * draw.normal(size=d) for _ in range(8)]
    return polished(fun, start, [atoms, start, *nearby], slope=slope)


def deconvolution(draw: np.random.Generator, d: int) -> Function:
    """A blurred signal to restore, with a ridge; f* solves the normal equations."""
    kernel = np.exp(-0.5 * (np.arange(-10, 11) / draw.uniform(1.5, 3)) ** 2)
    kernel /= kernel.sum()
    blur = np.stack([np.convolve(unit, kernel, "same") for unit in np.eye(d)], axis=1)
    signal = np.cumsum(draw.normal(size=d)) / d**0.5
    seen, ridge = blur @ signal + 0.01 * draw.normal(size=d), 1e-3
    best = np.linalg.solve(blur.T @ blur + ridge * np.eye(d), blur.T @ seen)

    def fun(x: np.ndarray) -> float:
        r = np.convolve(x, kernel, "same") - seen
        return float(r @ r + ridge * (x @ x))

    return known(fun, np.zeros(d), best)
