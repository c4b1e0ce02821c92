"""The untuned default on kinds of functions that have misled minimizers."""

import functools

import ml_dtypes
import numpy as np
import pytest
from scipy.optimize import rosen

from radazo_jax import minimize
from radazo_jax._src.methods import policy
from radazo_jax._src.methods.ends import Reason
from tests.helpers.driver import drive, started

RNG = np.random.default_rng(0)
DATA = RNG.normal(size=(50, 8))
TARGET = DATA @ RNG.normal(size=8) + 0.1 * RNG.normal(size=50)
FIT = np.linalg.lstsq(DATA, TARGET, rcond=None)[0]
SCALES = np.geomspace(1e-3, 1e3, 8)
UNTUNED = policy.untuned()


def squares(x, dtype=np.float64):
    r = DATA.astype(dtype) @ np.asarray(x, dtype) - TARGET.astype(dtype)
    return float(r @ r)


def sphere(x):
    return float(np.sum((x - 1) ** 2))


def coupled(y):
    """A quadratic form with its minimum 0 at 3, 1, −2, 2, 0.5, …"""
    z = y - np.resize([3.0, 1.0, -2.0, 2.0, 0.5], y.size)
    return float(np.linspace(1, 4, y.size) @ z**2 + 0.1 * np.sum(z) ** 2)


def dead(kind, k):
    """`coupled` whose short moves of the first k parameters change nothing."""

    def fun(x):
        y = x.copy()
        head = x[:k]
        if kind == "rounded":
            y[:k] = np.round(head)
        elif kind == "saturated":  # The minimum is within, and the start is outside.
            best = np.resize([3.0, 1.0, -2.0, 2.0, 0.5], x.size)[:k]
            y[:k] = best + np.clip(head - best, -1.5, 1.5)
        elif kind == "with a dead zone":  # From −0.5 to 0.5.
            y[:k] = head - np.clip(head, -0.5, 0.5)
        elif kind == "in a table":  # Cells with a width of a half.
            y[:k] = np.floor(2 * head) / 2
        return coupled(y)

    return fun


@pytest.mark.parametrize("d, k", [(2, 1), (5, 1), (5, 2), (5, 5), (10, 4), (40, 1)])
@pytest.mark.parametrize(
    "kind", ["rounded", "saturated", "with a dead zone", "in a table"]
)
def test_a_parameter_without_an_effect_is_tried_far_away(kind, d, k):
    fun = dead(kind, k)
    run = drive(UNTUNED, fun, np.zeros(d), most=min(60 * (d + 1) + 200, 1400))
    assert run.value < 0.05 * fun(np.zeros(d))


VALUES = {
    "float64": (squares, 1e-12),
    "float32": (lambda x: squares(x, np.float32), 1e-6),
    "seven digits": (lambda x: float(f"{squares(x):.6e}"), 1e-6),
    "five digits": (lambda x: float(f"{squares(x):.4e}"), 1e-4),
    "solved to 1e-4": (
        lambda x: squares(x) * (1 + 1e-4 * np.sin(1e7 * np.sum(x))),
        1e-2,
    ),
    "solved to 1e-6": (
        lambda x: squares(x) * (1 + 1e-6 * np.sin(1e9 * np.sum(x))),
        1e-5,
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_resolution_of_values_is_measured(name):
    fun, gap = VALUES[name]
    run = drive(UNTUNED, fun, np.zeros(8), most=1000)
    least = squares(FIT)
    # The last of them needs 236 to 253 evaluations with six kernels of OpenBLAS.
    reached = min(squares(x) for x in run.points[:300]) - least
    assert reached <= gap * least


def jittery(x, level=1e-3):
    return squares(x) * (1 + level * np.sin(1e9 * (x @ np.sqrt(np.arange(2, 10)))))


@pytest.mark.parametrize("level", [1e-3, 1e-4])
def test_jitter_leads_to_models(level):
    """Short differences say nothing there, and models of long moves come close."""
    fun = functools.partial(jittery, level=level)
    run = drive(UNTUNED, fun, np.zeros(8), most=90)
    assert min(map(squares, run.points)) <= 1.2 * squares(FIT)


def test_a_function_in_float32_ends_at_its_minimum():
    run = drive(UNTUNED, VALUES["float32"][0], np.zeros(8))
    assert run.reason == Reason.MINIMUM and run.count < 400


@pytest.mark.parametrize("power", [-300, -60, -36, 0, 38, 60, 300])
def test_values_of_any_magnitude(power):
    unit = 10.0**power
    run = drive(UNTUNED, lambda x: unit * sphere(x), np.zeros(2))
    one = drive(UNTUNED, sphere, np.zeros(2))
    assert run.value <= 1e-14 * unit and run.reason == Reason.MINIMUM
    assert abs(run.count - one.count) <= 12


@pytest.mark.parametrize("power", [0, 3, 8, 16, 45, 100])
def test_finite_bounds_are_sizes(power):
    unit = 10.0**-power
    box = (0.0, 10 * unit)
    run = drive(UNTUNED, lambda x: sphere(x / unit), np.full(2, 3 * unit), box=box)
    assert run.value < 1e-14 and run.count < 100


def bowl(x):
    return float((x[0] - 1) ** 2 + (x[1] + 1) ** 2 + 0.5 * (x[2] - 0.3) ** 2 + 1)


ENDS = {
    "a minimum inside": (bowl, np.full(3, 0.5), (-5.0, 5.0), 1.0, 60),
    "a minimum on a bound": (bowl, np.full(3, 0.5), (0.0, 5.0), 2.0, 70),
    "a start on a bound": (sphere, np.array([0.0, 5.0]), (0.0, 5.0), 0.0, 50),
    "a corner": (lambda x: float(x @ [1, -2, 3]), np.zeros(3), (-1.0, 1.0), -6.0, 60),
    "one parameter": (lambda x: float((x[0] - 3) ** 2), np.zeros(1), None, 0.0, 30),
    "an unused parameter": (lambda x: sphere(x[:2]), np.zeros(3), None, 0.0, 120),
    "a large parameter": (
        lambda x: float((x[0] - 2459123.5625) ** 2),
        np.array([2459123.4375]),
        None,
        *(0.0, 40),
    ),
    "equal bounds of one": (
        lambda x: sphere(x) - 1,
        np.zeros(2),
        (0.0, np.array([0.0, 5.0])),
        *(0.0, 40),
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends_by_itself(name):
    fun, x, box, least, most = ENDS[name]
    run = drive(UNTUNED, fun, x, box=box)
    assert run.value - least <= 1e-9
    assert run.reason == Reason.MINIMUM and run.count <= most


def test_nothing_to_move():
    run = drive(UNTUNED, sphere, np.zeros(2), box=(0.0, 0.0))
    assert run.reason == Reason.FIXED and run.count == 2


@pytest.mark.parametrize("value", [0.0, 1.0, -1e300])
def test_a_constant_ends(value):
    run = drive(UNTUNED, lambda x: value, np.zeros(2))
    assert run.reason is not None and run.count < 300
    assert np.max(abs(run.points)) < 1e5


BACK = {
    "a saddle": (lambda x: float(np.sum((x**2 - 1) ** 2)), np.zeros(4), None),
    "a region without values": (
        lambda x: sphere(x) if x[0] > 0.1 else np.nan,
        np.zeros(3),
        None,
    ),
    "a hidden hollow": (
        lambda x: float(1 - np.exp(-np.sum((x - 1) ** 2) / 2)),
        np.full(4, -1.2),
        None,
    ),
}


@pytest.mark.parametrize("name", BACK)
def test_leads_back_to_slopes(name):
    fun, x, box = BACK[name]
    run = drive(UNTUNED, fun, x, box=box, most=400)
    assert run.value < 1e-9


FAR = {
    "an unused parameter": (lambda x: sphere(x[:2]), np.zeros(3)),
    "dead at the start": (
        lambda x: (x[0] - 1) ** 2 + max(0, x[0] - 0.5) * (x[1] - 3) ** 2,
        np.zeros(2),
    ),
    "flat far out": (
        lambda x: float(1 - np.exp(-0.5 * np.sum(x**2))),
        np.full(6, 6**0.5),
    ),
    "a clipped start": (lambda x: sphere(np.clip(x, -1, 1)), np.array([0.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("name", FAR)
def test_no_point_is_far_outside_of_what_matters(name):
    fun, x = FAR[name]
    run = drive(UNTUNED, fun, x, most=700)
    assert np.max(abs(run.points)) < 1e9


def test_noise_leads_to_a_strategy_with_a_center():
    rng = np.random.default_rng(0)
    method = UNTUNED(start := started(np.zeros(3), limited=True))
    asked, centers = next(method), 0
    for _ in range(120):  # Models come first, with 60 points at most.
        points = getattr(asked, "points", asked)
        centers += getattr(asked, "center", None) is not None
        asked = method.send(np.array([sphere(x) + 0.1 * rng.normal() for x in points]))
    assert centers >= 55 and sphere(asked.center) < 0.3 * sphere(start.params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fun", [sphere, rosen])
def test_points_are_rounded(dtype, fun):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    run = drive(UNTUNED, fun, np.zeros(4) + 0.1, dtype=kind, most=500)
    assert run.value < 0.02 * fun(np.zeros(4))


def test_restarts_are_counted():
    counts = [
        drive(policy.untuned(restarts=n), rosen, np.zeros(2)).count for n in range(2)
    ]
    assert counts == sorted(set(counts))


def test_a_tolerance_ends_earlier():
    full = drive(UNTUNED, rosen, np.zeros(4))
    loose = drive(policy.untuned(tolerance=1e-2), rosen, np.zeros(4))
    assert loose.reason == Reason.WITHIN and loose.count < full.count


def test_a_scale_changes_the_first_moves():
    plain = drive(UNTUNED, lambda x: sphere(x / 1e-8), np.zeros(3), most=300)
    scale = drive(
        policy.untuned(scale=1e-8), lambda x: sphere(x / 1e-8), np.zeros(3), most=300
    )
    assert scale.value < 1e-12 and scale.number <= plain.number


def test_many_parameters():
    run = drive(UNTUNED, sphere, np.zeros(150), most=3000)
    assert run.value < 1e-6 * 150
    scaled_ = drive(
        policy.untuned(scale=1e-3), lambda x: sphere(1e3 * x), np.zeros(150), most=3000
    )
    assert scaled_.value < 1e-6 * 150


def test_the_factory_is_its_arguments():
    assert policy.untuned() == policy.untuned(None, None)
    assert repr(policy.untuned(1e-3)) == (
        "Untuned(tolerance=0.001, restarts=None, scale=1.0)"
    )
    for name, value in [("tolerance", -1.0), ("tolerance", 1.0), ("restarts", -1)]:
        with pytest.raises((TypeError, ValueError), match=name):
            policy.untuned(**{name: value})


@pytest.mark.parametrize(
    "fun, start, step, reasons",
    [
        (sphere, np.zeros(3), None, [Reason.FEW, Reason.SMOOTH]),
        (sphere, np.zeros(8), None, [Reason.SMOOTH]),
        (sphere, np.zeros(101), None, [Reason.MANY]),
        (lambda x: round(sphere(x), 7), np.zeros(8), None, [Reason.DIGITS]),
        (jittery, np.zeros(8), None, [Reason.JITTER, Reason.JITTER]),
        (lambda x: sphere(x / SCALES), np.zeros(8), None, [Reason.APART]),
        (
            lambda x: float(np.sum(np.round(abs(x)))),
            np.ones(8),
            None,
            [Reason.STILL, Reason.STEPS],
        ),
        (sphere, np.zeros(3), 0.25, [Reason.GRID]),
        (sphere, np.zeros(101), 0.25, [Reason.MANY]),
    ],
)
def test_each_stage_has_a_reason(fun, start, step, reasons):
    options = {"max_evaluations": 300, "step": step, "progress": False}
    result = minimize(fun, start, **options)
    found = [stage.reason for stage in result.stages]
    assert found[: len(reasons)] == reasons and all(found)
