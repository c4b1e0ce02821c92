"""Differences against slopes, BFGS against SciPy's, and the ends of slopes."""

import numpy as np
import pytest
from scipy.optimize import LbfgsInvHessProduct, rosen

from radazo_jax._src.methods import slopes
from radazo_jax._src.methods.contract import Box
from radazo_jax._src.methods.ends import Reason
from radazo_jax._src.methods.points import Space, central, forward
from tests.helpers.driver import completed, drive, started

D = 6
WEIGHTS = np.logspace(0, 2, D)


def quadratic(x):
    return float(WEIGHTS @ (x - 1) ** 2)


@pytest.mark.parametrize("count", [1, 3, 10])
def test_direction_is_that_of_scipy(count):
    rng = np.random.default_rng(count)
    root = rng.normal(size=(D, D))
    steps = rng.normal(size=(count, D))
    changes = steps @ (root @ root.T + np.eye(D))
    # SciPy's matrix begins as I, and here as (s·y / y·y) I of the newest pair.
    s, y = steps[-1], changes[-1]
    changes *= (s @ y) / (y @ y)
    memory = slopes.Memory(10)
    for pair in zip(steps, changes, strict=True):
        memory.add(*pair)
    gradient = rng.normal(size=D)
    expected = -LbfgsInvHessProduct(steps, changes) @ gradient
    found = memory.direction(gradient, np.ones(D, bool))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_direction_within_free_parameters_is_that_of_a_smaller_problem():
    rng = np.random.default_rng(0)
    kept = np.array([0, 2, 5])
    whole, part = slopes.Memory(10), slopes.Memory(10)
    for _ in range(4):
        s = np.zeros(D)
        s[kept] = rng.normal(size=3)
        whole.add(s, 2 * WEIGHTS * s)
        part.add(s[kept], 2 * WEIGHTS[kept] * s[kept])
    gradient, free_ = rng.normal(size=D), np.isin(np.arange(D), kept)
    found = whole.direction(gradient, free_)
    expected = part.direction(gradient[kept], np.ones(3, bool))
    np.testing.assert_allclose(found[kept], expected, rtol=1e-12)
    assert not np.any(found[~free_])


def test_memory_refuses_concave_pairs_and_forgets_old_ones():
    memory = slopes.Memory(2)
    memory.add(np.ones(D), -np.ones(D))
    assert not memory.pairs
    for k in range(4):
        memory.add(np.ones(D), (k + 1) * np.ones(D))
    assert [pair[1][0] for pair in memory.pairs] == [3, 4]


@pytest.mark.parametrize("take", [forward, central])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("box", [None, (0.0, 2.0), (-1.0, 0.5)])
def test_gradient_of_a_quadratic(take, dtype, box):
    start = started(np.full(D, 0.5), box=box, dtype=dtype)
    x = start.params
    space = Space.of(start, np.ones(D))
    length = 1e-6 if dtype == np.float64 else 1e-3
    part = take(x, quadratic(x), np.full(D, length), space)
    found, points = completed(part, quadratic)
    # A forward difference is longer by s times the half of the second derivative.
    error = WEIGHTS * found.steps if take is forward else 0
    expected = 2 * WEIGHTS * (x - 1) + error
    np.testing.assert_allclose(found.gradient, expected, rtol=1e-6)
    np.testing.assert_array_equal(points, start.round(start.box.clip(points)))


def test_differences_that_fail_are_taken_on_the_other_side():
    x = np.zeros(D)
    space = Space.of(started(x), np.ones(D))

    def fun(x):
        return quadratic(x) if np.all(x[:3] <= 0) else np.nan

    found, _ = completed(forward(x, quadratic(x), np.full(D, 1e-7), space), fun)
    np.testing.assert_allclose(found.gradient, -2 * WEIGHTS, rtol=1e-5)
    assert np.all(np.sign(found.steps) == np.r_[[-1] * 3, [1] * 3])


def test_a_length_below_the_rounding_moves_each_parameter_with_room():
    x = np.array([1e3, 1.0, 0.0, 5.0])
    box = Box(np.array([-np.inf, 0, 0, 5]), np.array([np.inf, 1, 1e-9, 5]))
    start = started(x, box=box, dtype=np.float32)
    ends = Space.of(start, np.ones(4)).ends(start.params, np.full(4, 1e-12))
    moved = ends - start.params
    assert np.all((moved != 0) == [True, True, True, False])
    assert moved[1] < 0 and np.all(abs(moved) < 1e-3)


CASES = {
    "a quadratic": (quadratic, np.zeros(D), None, 0.0),
    "Rosenbrock's function": (rosen, np.zeros(4), None, 0.0),
    "a large parameter": (
        lambda x: (x[0] - 2459123.5625) ** 2,
        [2459123.4375],
        None,
        0,
    ),
    "a bound": (lambda x: quadratic(x) + 1, np.full(D, 2.0), (1.5, 4.0), None),
    "on a bound": (quadratic, np.full(D, 5.0), (-5.0, 5.0), 0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_soon_after_the_minimum(name):
    fun, x, box, least = CASES[name]
    if least is None:
        least = fun(np.full(D, 1.5))
    run = drive(slopes.slopes(), fun, x, box=box)
    start = fun(np.asarray(x))
    assert run.value - least <= 1e-13 * (start - least)
    assert run.reason == Reason.MINIMUM
    reached = np.argmax([fun(p) - least <= 1e-13 * (start - least) for p in run.points])
    assert run.count - reached <= 20 * len(run.params) + 30


def test_slopes_without_a_way_say_so():
    alone = drive(slopes.slopes(), lambda x: 1.0, np.zeros(2), box=(0.0, 0.0))
    assert (alone.reason, alone.count) == (Reason.FIXED, 1)
    failed = drive(slopes.slopes(), lambda x: 1.0 if np.any(x) else np.nan, np.ones(2))
    assert failed.reason is not None
