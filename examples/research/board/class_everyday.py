"""Functions as people bring them: fits, portfolios, controls."""

import numpy as np
from scipy.special import expit

from board.class_problems import Function, fitted, polished


def decays(draw: np.random.Generator, d: int) -> Function:
    """Amplitudes and log rates of d/2 decays, from noisy data."""
    n, times = d // 2, np.linspace(0, 3, 40)
    rates = np.log(np.sort(draw.uniform(0.3, 5, n)))
    truth = np.r_[draw.uniform(0.5, 2, n), rates]

    def model(x: np.ndarray) -> np.ndarray:
        rates = np.exp(np.clip(x[n:], -20, 20))
        return x[:n] @ np.exp(-np.outer(rates, times))

    data = model(truth) + 0.01 * draw.normal(size=times.size)
    start = truth + 0.6 * draw.normal(size=d)
    apart = np.r_[np.ones(n), np.linspace(-1, 1.5, n)]
    return fitted(lambda x: model(x) - data, start, truth, apart)


def doses(draw: np.random.Generator, d: int) -> Function:
    """Top, half dose and steepness of a response, in logarithms, from noisy data."""
    dose = np.logspace(-1, 3, 30)
    truth = np.log([draw.uniform(1, 5), draw.uniform(5, 50), draw.uniform(1, 3)])

    def model(x: np.ndarray) -> np.ndarray:
        top, steep = np.exp(np.minimum(x[[0, 2]], 5))
        return top * expit(steep * (np.log(dose) - x[1]))

    data = model(truth) + 0.02 * draw.normal(size=dose.size)
    return fitted(lambda x: model(x) - data, truth + draw.uniform(-1, 1, d), truth)


def counts(draw: np.random.Generator, d: int) -> Function:
    """A Poisson regression with a weak ridge."""
    features, weights = draw.normal(size=(60, d)), 0.5 * draw.normal(size=d)
    data = draw.poisson(np.exp(np.clip(features @ weights, -10, 5))).astype(float)

    def fun(x: np.ndarray) -> float:
        z = features @ x
        return float(np.mean(np.exp(np.minimum(z, 50)) - data * z) + 0.01 * (x @ x))

    return polished(fun, 0.7 * draw.normal(size=d), [weights])


def process(draw: np.random.Generator, d: int) -> Function:
    """Log lengths, noise and height of a Gaussian process of d − 2 inputs."""
    inputs = draw.uniform(0, 1, (25, d - 2))
    data = np.sin(3 * inputs[:, 0]) + inputs[:, -1] / 2 + 0.05 * draw.normal(size=25)
    data -= data.mean()
    squares = (inputs[:, None] - inputs) ** 2

    def fun(x: np.ndarray) -> float:
        z = np.clip(x, -8, 8)
        kernel = np.exp(z[-1] - squares @ np.exp(-2 * z[:-2]) / 2)
        kernel += (1e-3 + np.exp(2 * z[-2])) * np.eye(25)
        fit = float(data @ np.linalg.solve(kernel, data)) / 2
        return fit + float(np.linalg.slogdet(kernel)[1] / 2 + 0.05 * (x @ x))

    start = draw.normal(size=d) / 2
    return polished(fun, start, [np.zeros(d), start])


def portfolio(draw: np.random.Generator, d: int) -> Function:
    """Variance minus gain of a portfolio, whose weights are a softmax."""
    factor, gain = draw.normal(size=(d, d)), 0.15 * draw.normal(size=d)
    variance = factor @ factor.T / d + 0.1 * np.eye(d)

    def fun(x: np.ndarray) -> float:
        weights = np.exp(x - np.max(x))
        weights /= weights.sum()
        return float(weights @ variance @ weights - gain @ weights + 1e-3 * (x @ x))

    return polished(fun, draw.normal(size=d), [np.zeros(d)])


def outliers(draw: np.random.Generator, d: int) -> Function:
    """A pseudo-Huber regression, of which a sixth of the data is wrong."""
    features, weights = draw.normal(size=(50, d)), 2 * draw.normal(size=d)
    wrong = 10 * draw.normal(size=50) * (draw.random(50) < 0.15)
    data = features @ weights + 0.1 * draw.normal(size=50) + wrong

    def fun(x: np.ndarray) -> float:
        return float(np.mean(np.sqrt(1 + ((features @ x - data) / 0.2) ** 2) - 1))

    return polished(fun, np.zeros(d), [weights])


def penalty(draw: np.random.Generator, d: int) -> Function:
    """A quadratic form with a quadratic penalty for two linear constraints."""
    factor, slope = draw.normal(size=(d, d)), draw.normal(size=d)
    matrix = factor @ factor.T / d + 0.3 * np.eye(d)
    normals = draw.normal(size=(2, d))

    def fun(x: np.ndarray) -> float:
        over = np.maximum(0, normals @ x + 0.2)
        return float(x @ matrix @ x / 2 - slope @ x + 20 * (over @ over))

    return polished(fun, 2 * draw.normal(size=d), [np.zeros(d)])


def control(draw: np.random.Generator, d: int) -> Function:
    """The d pushes that bring an oscillator to rest."""
    turn, first = np.array([[1, 0.1], [-0.1, 0.95]]), 2 * draw.normal(size=2)

    def fun(x: np.ndarray) -> float:
        state, cost = first, 0.0
        for push in x:
            state = turn @ state + np.array([0, 0.2 * np.tanh(push)])
            cost += float(state @ state) + 0.05 * push**2
        return cost + 5 * float(state @ state)

    return polished(fun, np.zeros(d), [np.zeros(d)])
