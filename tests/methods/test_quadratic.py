"""Models of least change, trust-region steps by SciPy, and runs to minima."""

import numpy as np
import pytest
from scipy.optimize import NonlinearConstraint, minimize, rosen

from radazo_jax._src.methods import quadratic
from radazo_jax._src.methods.contract import Box
from radazo_jax._src.methods.ends import Reason
from tests.helpers.driver import completed, drive, free, started

QUADRATIC = quadratic.quadratic()
RNG = np.random.default_rng(0)


def symmetric(d, *eigenvalues):
    basis = np.linalg.qr(RNG.normal(size=(d, d)))[0]
    return basis * np.resize(eigenvalues, d) @ basis.T


def form(x, gradient, hessian):
    return gradient @ x + x @ hessian @ x / 2


def sphere(x):
    return float(np.sum((x - 1) ** 2))


CASES = {
    "convex": symmetric(4, 1.0, 2.0, 5.0, 30.0),
    "indefinite": symmetric(4, -3.0, 1.0, 2.0, 8.0),
    "flat": np.zeros((4, 4)),
}


@pytest.mark.parametrize("radius", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("name", CASES)
def test_a_step_in_a_ball_is_that_of_more_and_sorensen(name, radius):
    """(H + λ I) s = −g with λ ≥ 0, H + λ I ≥ 0, and λ = 0 inside of the ball."""
    gradient, hessian = RNG.normal(size=4), CASES[name]
    step = quadratic.in_ball(gradient, hessian, radius)
    length = np.linalg.norm(step)
    assert length <= radius * (1 + 1e-12)
    shift = max(0.0, -(step @ (gradient + hessian @ step)) / (step @ step))
    np.testing.assert_allclose(
        hessian @ step + shift * step, -gradient, atol=2e-2 * np.linalg.norm(gradient)
    )
    assert np.linalg.eigvalsh(hessian)[0] + shift >= -1e-9
    assert shift < 1e-9 or length > 0.998 * radius


def test_a_step_without_a_slope_follows_negative_curvature():
    step = quadratic.in_ball(np.array([1.0, 0.0]), np.diag([2.0, -1.0]), 3.0)
    np.testing.assert_allclose(abs(step[1]), np.sqrt(9 - step[0] ** 2), rtol=1e-9)
    np.testing.assert_allclose(step[0], -1 / 3, rtol=1e-9)


@pytest.mark.parametrize("name", ["convex", "flat"])
def test_a_step_in_a_box_is_that_of_scipy(name):
    hessian = CASES[name]
    for seed in range(5):
        rng = np.random.default_rng(seed)
        gradient, radius = 3 * rng.normal(size=4), 1.0
        box = Box(-rng.uniform(0, 0.7, 4), rng.uniform(0, 0.7, 4))
        box.lower[0], box.upper[1] = 0.0, np.inf
        step = quadratic.in_box(gradient, hessian, box, radius)
        assert np.all((step >= box.lower) & (step <= box.upper))
        assert np.linalg.norm(step) <= radius * (1 + 1e-9)
        known = minimize(
            form,
            np.zeros(4),
            (gradient, hessian),
            method="SLSQP",
            bounds=np.stack(box, 1),
            constraints=NonlinearConstraint(lambda x: x @ x, 0, radius**2),
        )
        # It fixes what has reached a bound: not the minimum, but nearly as low.
        assert form(step, gradient, hessian) <= 0.9 * known.fun


@pytest.mark.parametrize("m", [5, 7, 12, 15])
def test_the_hessian_changes_least(m):
    """The least of all models through m points, by SciPy's constrained minimization."""
    d = 4
    points, values = RNG.normal(size=(m, d)), RNG.normal(size=m)
    before = symmetric(d, 1.0, 2.0)
    gradient, hessian, inverse = quadratic.interpolated(points, values, before)
    constant = (values - points @ gradient) - [form(y, 0 * y, hessian) for y in points]
    np.testing.assert_allclose(constant, constant[0], atol=1e-8)
    rows, columns = np.triu_indices(d)
    weights = np.where(rows == columns, 1.0, 2.0)
    squares = points[:, rows] * points[:, columns] * np.where(rows == columns, 0.5, 1)
    equations = np.hstack([squares, points, np.ones((m, 1))])
    target = values - squares @ before[rows, columns]
    # The least norm of the weighted change, with the free parts projected out.
    rest = np.linalg.qr(equations[:, len(rows) :], mode="complete")[0][:, d + 1 :]
    change = np.zeros(len(rows))
    if rest.size:
        scaled = (rest.T @ squares) / np.sqrt(weights)
        change = np.linalg.lstsq(scaled, rest.T @ target)[0] / np.sqrt(weights)
    found = (hessian - before)[rows, columns]
    np.testing.assert_allclose(found, change, atol=1e-7)
    # The columns of the inverse are Lagrange polynomials: 1 at their point, else 0.
    basis = np.hstack([(points @ points.T) ** 2 / 2, np.ones((m, 1)), points])
    np.testing.assert_allclose(basis @ inverse[:, :m], np.eye(m), atol=1e-7)


@pytest.mark.parametrize(
    ("fun", "x", "most"),
    [
        (sphere, np.zeros(1), 30),
        (sphere, np.zeros(6), 20),
        (rosen, np.array([-1.2, 1.0]), 150),
        (rosen, np.zeros(5), 300),  # 231 to 270 with seven kernels of OpenBLAS.
        (lambda x: float(np.logspace(0, 4, 4) @ (x - 0.3) ** 2), np.zeros(4), 120),
    ],
)
def test_it_converges(fun, x, most):
    run = drive(QUADRATIC, fun, x)
    assert min(map(fun, run.points[:most])) < 1e-10 * fun(x)
    assert run.reason == Reason.MINIMUM and run.count < 2 * most + 200


@pytest.mark.parametrize(
    ("fun", "lower", "upper"),
    [
        (sphere, np.full(5, 2.0), np.full(5, 4.0)),
        (rosen, np.full(5, -1.0), np.full(5, 0.5)),
        (rosen, np.full(5, -np.inf), np.full(5, 0.8)),
        (sphere, np.full(5, 0.3), np.r_[np.full(4, np.inf), 0.3]),
    ],
)
def test_bounded_minima_are_those_of_scipy(fun, lower, upper):
    start = np.clip(np.full(5, 0.25), lower, upper)
    run = drive(QUADRATIC, fun, start, box=Box(lower, upper))
    known = minimize(
        fun, start, method="SLSQP", bounds=np.stack([lower, upper], 1), tol=1e-15
    )
    assert run.value <= known.fun + 1e-7 * abs(known.fun) + 1e-12


def test_failures_are_high_values():
    run = drive(QUADRATIC, lambda x: np.nan if x[0] > 0.9 else sphere(x), np.zeros(3))
    assert run.value < 0.02 and run.reason == Reason.MINIMUM
    steps = QUADRATIC(started(np.zeros(3)))
    next(steps)
    with pytest.raises(StopIteration) as stop:
        steps.send(np.array([np.nan]))
    assert stop.value.value.reason == Reason.FAILED


def test_points_are_those_of_float32():
    run = drive(QUADRATIC, lambda x: sphere(x - 0.1), np.zeros(4), dtype=np.float32)
    assert run.value < 1e-12 and run.count < 200


@pytest.mark.parametrize("kind", ["constant", "noise", "steps", "a slope"])
def test_it_ends_by_itself(kind):
    def fun(x):
        draw = np.random.default_rng(x.view(np.uint32))
        return {
            "constant": 3.0,
            "noise": sphere(x) + 0.1 * draw.normal(),
            "steps": float(np.sum(np.floor(3 * abs(x - 1)))),
            "a slope": float(x[0]),
        }[kind]

    box = Box(np.full(5, -1e3), np.full(5, 1e3)) if kind == "a slope" else free(5)
    run = drive(QUADRATIC, fun, np.zeros(5), box=box)
    expected = Reason.FLAT if kind == "constant" else Reason.MINIMUM
    assert run.reason == expected and run.count < 1000
    assert kind != "a slope" or run.value == -1e3


def test_nothing_can_move():
    run = drive(QUADRATIC, sphere, np.ones(2), box=Box(np.ones(2), np.ones(2)))
    assert (run.count, run.reason) == (1, "no parameter can move")


def first_steps(fun, x, units=None):
    start = started(x)
    units = np.ones(len(x)) if units is None else units
    value = fun(start.params)
    end, points = completed(quadratic.first(start, value, units), fun)
    assert end.value == fun(end.params) <= value
    return end, 1 + len(points)


@pytest.mark.parametrize(
    ("fun", "most"),
    [
        (sphere, 40),
        (lambda x: float(np.sum(abs(x - 1))), 15 * 6),
        # Nothing changes; nothing falls.
        (lambda x: 3.0, 6 * 6),
        (lambda x: float(np.max(abs(x))), 6 * 6),
        # One of the first points fails, and the first changes are far apart.
        (lambda x: np.nan if x[1] > 0 else sphere(x), 6),
        (lambda x: float(np.logspace(0, 4, 5) @ (x - 1) ** 2), 6),
    ],
)
def test_models_come_first_as_long_as_they_are_worth_it(fun, most):
    _, count = first_steps(fun, np.zeros(5))
    assert count <= most


def test_models_that_come_first_come_close():
    end, _ = first_steps(sphere, np.zeros(5))
    assert end.value < 1e-9
    units = np.logspace(-2, 0, 5)
    end, count = first_steps(lambda x: sphere(x / units), np.zeros(5), units)
    assert end.value < 1e-9 and count < 60
