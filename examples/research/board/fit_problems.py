"""Fits, made from a seed: models of NIST's data sets, Moré and Wild's functions, jobs.

A family is `family(draw)`. Each seed has other data and another start. Data of NIST's
models are made by their certified parameters, rounded, with noise.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from board import class_everyday, class_problems
from board.class_problems import Function, Map, fitted

Model = Callable[[np.ndarray, np.ndarray], np.ndarray]
Family = Callable[[np.random.Generator], Function]


class Data(NamedTuple):
    """A model of a data set, places, certified parameters, and NIST's first start."""

    model: Model
    x: np.ndarray
    truth: tuple[float, ...]
    start: tuple[float, ...]


def _gauss(b: np.ndarray, x: np.ndarray) -> np.ndarray:
    peaks = [b[i] * np.exp(-(((x - b[i + 1]) / b[i + 2]) ** 2)) for i in (2, 5)]
    return b[0] * np.exp(-b[1] * x) + sum(peaks)


def _rational(b: np.ndarray, x: np.ndarray) -> np.ndarray:
    above = b[0] + b[1] * x + b[2] * x**2
    return above / (1 + b[3] * x + b[4] * x**2)


NIST = {
    "Misra1a": Data(
        lambda b, x: b[0] * (1 - np.exp(-b[1] * x)),
        np.linspace(77, 760, 14),
        (238.9, 5.5e-4),
        (500, 1e-4),
    ),
    "Chwirut2": Data(
        lambda b, x: np.exp(-b[0] * x) / (b[1] + b[2] * x),
        np.linspace(0.5, 6, 54),
        (0.1666, 0.00517, 0.01215),
        (0.1, 0.01, 0.02),
    ),
    "Rat43": Data(
        lambda b, x: b[0] / (1 + np.exp(b[1] - b[2] * x)) ** (1 / b[3]),
        np.arange(1.0, 16),
        (699.6, 5.277, 0.7596, 1.279),
        (100, 10, 1, 1),
    ),
    "Eckerle4": Data(
        lambda b, x: b[0] / b[1] * np.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
        np.linspace(400, 500, 35),
        (1.5544, 4.0888, 451.54),
        (1, 10, 500),
    ),
    "BoxBOD": Data(
        lambda b, x: b[0] * (1 - np.exp(-b[1] * x)),
        np.array([1, 2, 3, 5, 7, 10.0]),
        (213.8, 0.5472),
        (1, 1),
    ),
    "MGH17": Data(
        lambda b, x: b[0] + b[1] * np.exp(-x * b[3]) + b[2] * np.exp(-x * b[4]),
        np.linspace(0, 320, 33),
        (0.3754, 1.9358, -1.4647, 0.01287, 0.02212),
        (0.5, 1.5, -1, 0.01, 0.02),
    ),
    "Kirby2": Data(
        _rational,
        np.linspace(9, 370, 151),
        (1.6745, -0.1393, 0.0026, -0.00172, 2.17e-5),
        (2, -0.1, 0.003, -0.001, 1e-5),
    ),
    "Gauss1": Data(
        _gauss,
        np.arange(1.0, 251),
        (98.8, 0.0105, 100.5, 67.5, 23.1, 72.0, 178.8, 18.4),
        (97, 0.009, 100, 65, 20, 70, 178, 16.5),
    ),
}


def of_data(data: Data, draw: np.random.Generator) -> Function:
    """A fit of noisy data, from a start within a fifth of NIST's."""
    truth = np.array(data.truth)
    y = data.model(truth, data.x)
    y = y * (1 + 1e-3 * draw.normal(size=y.size))
    start = np.array(data.start, float) * draw.uniform(0.8, 1.2, truth.size)
    return fitted(lambda b: data.model(b, data.x) - y, start, truth)


def _rosenbrock(x: np.ndarray) -> np.ndarray:
    return np.concatenate([10 * (x[1::2] - x[::2] ** 2), 1 - x[::2]])


def _powell(x: np.ndarray) -> np.ndarray:
    a, b, c, d = x
    squares = (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2
    return np.array([a + 10 * b, 5**0.5 * (c - d), *squares])


def _tridiagonal(x: np.ndarray) -> np.ndarray:
    ends = np.concatenate([[0], x, [0]])
    return (3 - 2 * x) * x - ends[:-2] - 2 * ends[2:] + 1


def _brown_dennis(x: np.ndarray) -> np.ndarray:
    t = np.arange(1, 21) / 5
    first = x[0] + t * x[1] - np.exp(t)
    return first**2 + (x[2] + x[3] * np.sin(t) - np.cos(t)) ** 2


def _chebyquad(x: np.ndarray) -> np.ndarray:
    k = np.arange(1, x.size + 1)
    means = np.polynomial.chebyshev.chebvander(2 * x - 1, x.size)[:, 1:].mean(0)
    return means + np.where(k % 2 == 0, 1 / (k**2 - 1.0 + (k == 1)), 0)


# Residuals and standard starts.
MORE_WILD: dict[str, tuple[Map, np.ndarray]] = {
    "Rosenbrock": (_rosenbrock, np.array([-1.2, 1.0, -1.2, 1.0])),
    "Powell": (_powell, np.array([3.0, -1, 0, 1])),
    "Broyden": (_tridiagonal, -np.ones(10)),
    "Brown-Dennis": (_brown_dennis, np.array([25.0, 5, -5, -1])),
    "Chebyquad": (_chebyquad, np.arange(1, 7) / 7),
}


def of_function(fun: Map, start: np.ndarray, draw: np.random.Generator) -> Function:
    """A function of Moré and Wild's, started within a fifth of its start."""
    return fitted(fun, start * draw.uniform(0.8, 1.2, start.size), start)


_JOBS = {
    "predators": (class_problems.predators, 5),
    "peaks": (class_problems.peaks, 10),
    "decays": (class_everyday.decays, 6),
    "doses": (class_everyday.doses, 3),
}

GROUPS: dict[str, dict[str, Family]] = {
    "NIST's models": {k: functools.partial(of_data, v) for k, v in NIST.items()},
    "Moré and Wild's": {
        k: functools.partial(of_function, *v) for k, v in MORE_WILD.items()
    },
    "jobs": {
        k: functools.partial(lambda family, d, draw: family(draw, d), family, d)
        for k, (family, d) in _JOBS.items()
    },
}
