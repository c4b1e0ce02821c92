"""The level of noise of constructed values, and sizes by closed forms."""

import numpy as np
import pytest

from radazo_jax._src.methods import noise
from radazo_jax._src.methods.points import Space, forward
from tests.helpers.driver import completed, started

D = 5
SIZES = np.logspace(-4, 4, D)


@pytest.mark.parametrize("spread", [1e-12, 1e-8, 1e-4])
def test_level_of_a_smooth_function_with_noise(spread):
    t = 1e-6 * np.arange(7) * (spread / 1e-8) ** 0.5
    found = []
    for seed in range(100):
        draws = spread * np.random.default_rng(seed).normal(size=7)
        level = noise.level(np.exp(t) + draws)
        found.append(np.nan if level is None else level)
    assert np.mean(np.isfinite(found)) > 0.5
    assert 0.5 * spread < np.nanmedian(found) < 2 * spread


def test_a_smooth_function_has_no_level():
    assert noise.level(np.exp(np.linspace(0, 1, 7))) is None


def rounded_to(digits):
    return lambda x: float(f"{3 + np.sum((x - 1) ** 2):.{digits - 1}e}")


RELATIVE = {
    "seven digits": (rounded_to(7), 1e-7 / 12**0.5),
    "five digits": (rounded_to(5), 1e-5 / 12**0.5),
    "float32": (lambda x: float(np.float32(3 + np.sum((x - 1) ** 2))), 6e-8 / 12**0.5),
    "waves": (lambda x: 8 + np.sum((x - 1) ** 2) + 1e-5 * np.sin(1e9 * x[0]), 8e-7),
}


@pytest.mark.parametrize("name", RELATIVE)
def test_relative_noise(name):
    fun, expected = RELATIVE[name]
    x = np.full(D, 0.3)
    space = Space.of(started(x), np.ones(D))
    found, points = completed(noise.measured(x, fun(x), 1e-3, space), fun)
    assert expected / 10 < found < 10 * expected
    assert len(points) <= 12


def test_a_function_without_noise_has_none():
    x = np.full(D, 0.3)
    space = Space.of(started(x), np.ones(D))
    fun = lambda x: float(np.sum(np.cosh(x)))  # noqa: E731
    found, _ = completed(noise.measured(x, fun(x), 1e-3, space), fun)
    assert found is None


def test_sizes_change_the_value_by_a_hundredth():
    x = np.zeros(D)
    space = Space.of(started(x), np.ones(D))

    def fun(x):
        return 1 + float(np.sum(np.expm1(x / SIZES)))

    first, _ = completed(forward(x, fun(x), 1.5e-9 * np.ones(D), space), fun)
    assert noise.are_needed(first, fun(x))
    found, points = completed(noise.measured_sizes(x, fun(x), first, space), fun)
    share = found / (1e-2 * SIZES)
    assert np.all((share > 0.05) & (share < 20))
    assert len(points) <= 10 * D
