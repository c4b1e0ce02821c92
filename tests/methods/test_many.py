"""Descent along few directions: formulas by NumPy and SciPy, and its ends."""

import itertools
import math

import numpy as np
import pytest
from scipy.fft import dct
from scipy.optimize import rosen

from radazo_jax._src.methods import many
from radazo_jax._src.methods.contract import Ask, Box
from radazo_jax._src.methods.ends import Reason
from tests.helpers.driver import completed, drive, started

EPS = np.finfo(np.float64).eps


def quadratic(x):
    return float(np.linspace(1, 50, len(x)) @ (x - 1) ** 2)


@pytest.mark.parametrize(("d", "count"), [(1, 1), (7, 3), (64, 10), (101, 32)])
def test_directions_of_a_cycle_are_a_basis(d, count):
    blocks = many.directions(d, count, np.random.default_rng(0))
    cycles = []
    for _ in range(2):
        cycle = list(itertools.islice(blocks, math.ceil(d / count)))
        assert max(map(len, cycle)) <= count
        rows = np.concatenate(cycle)
        np.testing.assert_allclose(rows @ rows.T, np.eye(d), atol=1e-12)
        cycles.append(rows)
    # They are rows of the cosine transform, up to order and signs of columns.
    known = np.sort(abs(dct(np.eye(d), axis=0, norm="ortho")), axis=None)
    np.testing.assert_allclose(np.sort(abs(cycles[0]), axis=None), known, atol=1e-12)
    assert d == 1 or not np.allclose(cycles[0], cycles[1])


def test_the_step_size_is_the_minimum_of_the_parabola():
    """Along −g from y, f(y − η g) = c₀ − c₁ η + c₂ η², fitted by NumPy."""
    rng = np.random.default_rng(0)
    y, gradient = rng.normal(size=(2, 30))
    before = quadratic(y)
    gradient = 2 * np.linspace(1, 50, 30) * (y - 1) + 0 * gradient

    def along(size):
        return quadratic(y - size * gradient)

    sizes = np.array([0.0, 0.01, 0.02])
    fitted = np.polynomial.polynomial.polyfit(sizes, [along(s) for s in sizes], 2)
    minimum = -fitted[1] / (2 * fitted[2])
    square = gradient @ gradient
    for size in (minimum / 50, minimum / 2, 1.5 * minimum):
        parabola = many.Parabola(size * square, before, along(size), size**2 * square)
        state, is_taken = many.adapted_size(many.StepSize(size), parabola, before, EPS)
        np.testing.assert_allclose(state.size, minimum, rtol=1e-9)
        assert is_taken
    assert not state.searching
    # Averages of two measurements, and at most a factor of two.
    other = state.size
    parabola = many.Parabola(other * square, before, along(other), other**2 * square)
    twice, _ = many.adapted_size(state, parabola, before, EPS)
    np.testing.assert_allclose(twice.size, minimum, rtol=1e-9)
    flat = many.Parabola(fall=2.0, before=0.0, after=-2.0, square=state.size)
    assert many.adapted_size(state, flat, 0.0, EPS)[0].size == 2 * state.size


@pytest.mark.parametrize(
    ("parabola", "highest", "taken", "factor", "searching"),
    [
        # A failure, or a surprising curvature: it is not taken.
        ((1.0, 0.0, np.nan, 1.0), 10.0, False, 1 / 10, True),
        ((1.0, 0.0, 9.0, 1.0), 10.0, False, 1 / 20, True),
        # The curvature is not surprising, but the value is above the highest.
        ((1.0, 0.0, 0.1, 1.0), 0.05, False, 1 / 2.2, False),
        ((1.0, 0.0, 0.1, 1.0), 10.0, True, 1 / 1.24, False),
        # Differences within rounding.
        ((1e-17, 1.0, 1.0, 1.0), 10.0, True, 1.25, False),
    ],
)
def test_steps_that_are_measured(parabola, highest, taken, factor, searching):
    """The known curvature is 1, by five measurements at η = 1."""
    state = many.StepSize(1.0, 1.0, 1.0, 5, False)
    after, is_taken = many.adapted_size(state, many.Parabola(*parabola), highest, EPS)
    assert (is_taken, after.searching) == (taken, searching)
    np.testing.assert_allclose(after.size, factor, rtol=1e-9)


def test_the_momentum_is_that_of_fercoq_and_richtarik():
    rng = np.random.default_rng(0)
    x, z, step = rng.normal(size=(3, 5))
    a, first = 0.3, 0.5
    y = (1 - a) * x + a * z
    new = y + step * np.sign(step @ (y + step - x))
    after = many.Lookahead(z, a).moved(x, y, new, first)
    np.testing.assert_allclose(many.Lookahead(z, a).point(x), y)
    np.testing.assert_allclose(after.z, z + first / a * (new - y))
    # θₜ₊₁ solves (1 − θₜ₊₁)/θₜ₊₁² = 1/θₜ².
    np.testing.assert_allclose((1 - after.share) / after.share**2, 1 / a**2)
    back = many.Lookahead(z, a).moved(x, y, y - 0.9 * (y - x), first)
    np.testing.assert_array_equal(back.z, y - 0.9 * (y - x))
    assert back.share == first


def test_differences_become_shorter_if_they_are_curved():
    changes = np.array([1.0, 1.1, 0.9, 1.2])
    state = many.Distance()
    for _ in range(3):
        state = state.adapted(changes, 1e-9)
    # Three shares of nearly 1 at a decay rate of 0.9: the average exceeds 0.2.
    share = changes.mean() / np.sqrt(np.mean(changes**2))
    assert state.factor == 0.5
    np.testing.assert_allclose(state.curved, 0.5 * share * (1 - 0.9**3))
    assert many.Distance(0.5).adapted(np.array([1.0, -1.0]), 1e-9).factor == 0.525
    assert many.Distance(0.5).adapted(np.zeros(0), 1e-9).factor == 0.25
    assert many.Distance(0.5, 0.9).adapted(changes, 10.0).factor == 0.525


@pytest.mark.parametrize(
    ("fun", "x", "most", "reached"),
    [
        (quadratic, np.zeros(1), 50, 1e-12),
        (quadratic, np.zeros(4), 300, 1e-9),
        (quadratic, np.zeros(200), 6000, 1e-6),
        (rosen, np.linspace(-1, 1, 150), 6000, 0.05),
    ],
)
def test_it_converges(fun, x, most, reached):
    assert drive(many.many(), fun, x, most).value <= reached * fun(x)


def test_points_are_in_the_box():
    d = 120
    box = Box(np.r_[np.full(60, -np.inf), np.full(60, 1.5)], np.full(d, 2.0))
    box.upper[0] = box.lower[-1] = 2.0
    run = drive(many.many(), quadratic, box.clip(np.zeros(d)), 8000, box=box)
    known = quadratic(box.clip(np.ones(d)))
    assert run.value - known < 1e-4 * known


def test_points_are_those_of_float32():
    kind = dict(dtype=np.float32, resolution=float(np.finfo(np.float32).eps))
    run = drive(many.many(), lambda x: quadratic(x) + 1.0, np.full(150, 0.1), **kind)
    assert run.value - 1 < 1e-4 and run.reason == Reason.MINIMUM


def test_failures():
    """A tenth of all points has no value; and a failing lookahead point."""

    def fun(x):
        draw = np.random.default_rng(x.view(np.uint32))
        return np.nan if draw.random() < 0.1 else quadratic(x)

    run = drive(many.many(), fun, np.zeros(120), 6000)
    assert run.value < 1e-3 * quadratic(np.zeros(120))
    nothing, points = completed(many.many()(started(np.zeros(120))), lambda x: np.nan)
    assert nothing.reason == Reason.FAILED and len(points) < 2000


@pytest.mark.parametrize(
    ("fun", "most"),
    [
        (lambda x: 3.0, 1000),
        (lambda x: 1 + quadratic(x), 20_000),
        (lambda x: 1e-300 * (1 + quadratic(x)), 20_000),
        (lambda x: 1e200 * (quadratic(x) - 5), 20_000),
    ],
)
def test_it_ends_by_itself(fun, most):
    run = drive(many.many(), fun, np.zeros(60), most)
    flat = fun(np.zeros(60)) == 3.0
    assert run.reason == (Reason.FLAT if flat else Reason.MINIMUM)
    assert run.count < most
    least = fun(np.ones(60))
    assert run.value <= least + 1e-9 * abs(least)


def test_memory_and_time_of_a_step_are_linear():
    d = 20_000
    steps = many.many()(started(np.zeros(d)))
    ask = next(steps)
    for _ in range(4):
        points = ask.points if isinstance(ask, Ask) else ask
        assert points.shape[0] <= 33 and points.nbytes <= 33 * d * 8
        ask = steps.send(np.array([np.sum((x - 1) ** 2) for x in points]))


def test_errors():
    with pytest.raises(ValueError, match=r"num_directions must be .*got 0"):
        many.many(0)
