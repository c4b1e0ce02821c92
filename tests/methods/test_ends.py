"""Ends of methods: a minimum is one, and what is none is not called so."""

import zlib

import numpy as np
import pytest
from scipy.optimize import minimize, rosen

import radazo_jax as zo
from radazo_jax._src.methods import contract, policy
from radazo_jax._src.methods.contract import Box
from radazo_jax._src.methods.ends import Reason, decided, stopped
from tests.helpers.driver import completed, drive, started
from tests.helpers.tables import slow

UNTUNED = policy.untuned()


def bowl(d, seed=5):
    """A quadratic form with its minimum 3 at 1."""
    factor = np.random.default_rng(seed).normal(size=(d, d))
    matrix = factor @ factor.T / d + np.eye(d)
    return lambda x: float(0.5 * (x - 1) @ matrix @ (x - 1) + 3)


def reported(method, fun, x, box=None, limited=False, most=20_000):
    """The run of `drive`, and the reasons of the stages."""
    reasons = []

    def watched(start):
        return method(start._replace(report=lambda _, reason: reasons.append(reason)))

    return drive(watched, fun, x, box=box, most=most), reasons


def test_reasons_are_their_texts():
    assert Reason.MINIMUM == "a minimum was found" == f"{Reason.MINIMUM}"
    assert repr(Reason.MINIMUM) == "'a minimum was found'"
    assert len(set(Reason)) == len(Reason.__members__)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("", ""),
        ("of a user's method", "converged"),
        (Reason.MINIMUM, "converged"),
        (Reason.DIVERGED, "diverged"),
        (str(Reason.GROWING), "diverged"),
    ],
)
def test_a_reason_says_how_a_run_stopped(reason, expected):
    assert stopped(reason) == expected


def test_one_function_decides():
    assert decided(1.0, True) == Reason.MINIMUM
    assert decided(1.0, False) == Reason.FLAT
    assert decided(np.inf, True) == Reason.FAILED
    assert decided(1.0, True, Reason.EQUAL) == Reason.EQUAL


METHODS = {
    "untuned": (UNTUNED, 0.5),
    "untuned from 0": (UNTUNED, 0.0),
    "slopes": (zo.methods.slopes(), 0.5),
    "quadratic": (zo.methods.quadratic(), 0.5),
    "many": (zo.methods.many(), 0.5),
    "evolution": (zo.methods.evolution(), 0.5),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("value", "reason"), [(7.0, Reason.FLAT), (np.nan, Reason.FAILED)]
)
def test_no_method_calls_a_constant_or_a_failure_a_minimum(name, value, reason):
    end, _ = completed(METHODS[name][0](started(np.ones(2))), lambda x: value)
    assert end.reason == reason


def test_a_constant_over_a_grid_has_no_minimum():
    box = Box(np.zeros(2), np.full(2, 9.0))
    start = started(np.ones(2), box)._replace(step=np.ones(2), round=np.rint)
    assert completed(UNTUNED(start), lambda x: 7.0)[0].reason == Reason.FLAT


@pytest.mark.parametrize("d", [2, 8])
@pytest.mark.parametrize("name", METHODS)
def test_a_wrong_sign_diverges_early(name, d):
    method, begun = METHODS[name]
    run = drive(method, lambda x: -float(np.sum((x - 1) ** 2)), np.full(d, begun))
    assert run.reason in (Reason.DIVERGED, Reason.GROWING)
    assert "sign of fun" in run.reason and run.count < 60 * (d + 1) + 250


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: -float(np.exp(-np.sum((x - 2) ** 2))),  # Nearly 0 at the start.
        lambda x: float(np.sum((x - 1e4) ** 2)) - 1e8,
        lambda x: -1e12 * float(np.exp(-np.sum((x - 1) ** 2))),
    ],
)
def test_a_deep_minimum_has_not_diverged(fun):
    run = drive(UNTUNED, fun, np.zeros(3))
    assert stopped(run.reason) == "converged"


def test_a_run_says_that_it_diverged():
    result = zo.minimize(
        lambda x: float(x[0] + x[1]), np.zeros(2), max_evaluations=900, progress=False
    )
    assert (result.stopped, result.reason) == ("diverged", Reason.DIVERGED)
    assert result.num_evaluations < 200


AGAIN = {
    "a quadratic form": lambda x: bowl(x.size)(x),
    "with the minimum 0": lambda x: bowl(x.size)(x) - 3,
    "fourth powers": lambda x: float(np.sum((x - 1) ** 4)) + 1,
    "a valley": lambda x: float(rosen(x)),
}


@pytest.mark.parametrize("d", [4, 8])
@pytest.mark.parametrize("name", AGAIN)
def test_a_run_from_its_own_minimum_is_short(name, d):
    """SciPy's COBYQA takes 27 to 123 evaluations."""
    fun = AGAIN[name]
    first = drive(UNTUNED, fun, np.zeros(d))
    again, reasons = reported(UNTUNED, fun, first.params)
    assert Reason.STEPS not in reasons and again.reason == Reason.MINIMUM
    assert again.count < 300


@pytest.mark.parametrize("seed", [0, 11, 17, 18, 35])
def test_failures_around_a_minimum_do_not_prolong_a_run(seed):
    fun = bowl(2, seed)

    def fails(x):
        return zlib.crc32(x.tobytes(), seed) < 0.2 * 2**32

    run = drive(UNTUNED, lambda x: np.nan if fails(x) else fun(x), np.full(2, 0.3))
    assert fun(run.params) < 3 + 1e-10
    assert run.reason == Reason.MINIMUM and run.count < 150


@pytest.mark.parametrize(
    ("d", "form", "digit"), [(4, ".4g", 1e-3), (8, ".4g", 1e-3), (8, ".2f", 1e-2)]
)
def test_printed_values_have_a_minimum(d, form, digit):
    fun = bowl(d)
    run, reasons = reported(UNTUNED, lambda x: float(format(fun(x), form)), np.zeros(d))
    peer = minimize(lambda x: float(format(fun(x), form)), np.zeros(d), method="COBYQA")
    assert run.value == 3 and fun(run.params) <= 3 + digit / 2
    assert Reason.STEPS not in reasons and run.count < 2 * peer.nfev


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_sums_in_any_order_are_not_noisy(seed):
    data, threads = np.random.default_rng(seed), np.random.default_rng(99 + seed)
    matrix = data.normal(size=(60, 5))
    target = matrix @ data.normal(size=5) + 0.3 * data.normal(size=60)

    def loss(x):
        return float(np.cumsum(threads.permutation((matrix @ x - target) ** 2))[-1])

    run, reasons = reported(UNTUNED, loss, np.zeros(5))
    least = np.sum((matrix @ np.linalg.lstsq(matrix, target)[0] - target) ** 2)
    assert run.value <= (1 + 1e-10) * least and run.count < 300
    assert Reason.NOISE not in reasons


@pytest.mark.parametrize("d", [3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_noise_that_only_shows_near_the_minimum_is_noise(d, seed):
    draw, fun = np.random.default_rng(seed), bowl(d, seed)
    x = 1 + 100 * draw.normal(size=d)
    run, reasons = reported(
        UNTUNED, lambda x: fun(x) + 1e-3 * draw.normal(), x, None, True, 100 * (d + 1)
    )
    assert Reason.NOISE in reasons and Reason.STEPS not in reasons
    assert fun(run.params) - 3 < 5e-3


def langermann(x):
    centers = [[4, 6, 3, 5], [8, 7, 9, 9], [2, 7, 8, 8], [9, 2, 6, 9], [5, 4, 1, 4]]
    squares = np.sum((np.array(centers) - x) ** 2, 1)
    waves = np.exp(-squares / np.pi) * np.cos(np.pi * squares)
    return float(np.array([6, 1, 4, 4, 8]) @ waves)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("box", [(0.0, 10.0), None])
def test_a_valley_with_tiny_gains_ends(seed, box):
    near = np.array([4.65116802, 4.42985893, 1.74720157, 4.29727392])
    x = near + 1e-3 * np.random.default_rng(seed).normal(size=4)
    run = drive(UNTUNED, langermann, x, box=box)
    assert run.value < -7.0768488 and run.count < 250


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_atoms_that_fly_apart_are_brought_back(seed):
    one, other = np.triu_indices(4, 1)

    def energy(x):
        atoms = x.reshape(4, 3)
        inverse = np.sum((atoms[one] - atoms[other]) ** 2, 1) ** -3.0
        return float(np.sum(4 * (inverse**2 - inverse)))

    x = 0.8 * np.random.default_rng(seed).normal(size=12)
    run = drive(UNTUNED, energy, x)
    np.testing.assert_allclose(run.value, -6, atol=1e-9)
    assert run.reason == Reason.MINIMUM


def test_a_step_must_lower_the_value():
    """At its minimum 0, this function once took steps of no length without end."""
    weights = np.linspace(1, 10, 10)

    def fun(x):
        return float(weights @ np.floor(abs(x - 0.3) * 3) ** 2)

    run = drive(UNTUNED, fun, np.full(10, 2.0))
    assert run.value == 0 and run.count < 3000


@pytest.mark.parametrize("d", [1, 3, 8])
def test_a_constant_is_told_after_the_first_moves(d):
    run, reasons = reported(UNTUNED, lambda x: 7.0, np.zeros(d))
    assert reasons == [Reason.STILL] and run.reason == Reason.FLAT
    assert run.count < 20 * d + 10


@pytest.mark.parametrize("d", [3, 8])
@pytest.mark.parametrize("begun", [0.0, 5.0])
@pytest.mark.parametrize("box", [None, (-10.0, 10.0)])
def test_parameters_without_influence_stay_and_are_listed(d, begun, box):
    def fun(x):
        return float((x[0] - 1) ** 2 + 0.5 * (x[1] - 2) ** 2)

    steps = UNTUNED(start := started(np.full(d, begun), box))
    asked, end = next(steps), None
    while end is None:
        try:
            points = getattr(asked, "points", asked)
            asked = steps.send(np.array([fun(x) for x in points]))
        except StopIteration as stop:
            end = stop.value
    np.testing.assert_allclose(end.params[:2], [1, 2], atol=1e-6)
    np.testing.assert_array_equal(end.params[2:], start.params[2:])
    np.testing.assert_array_equal(end.unused, np.arange(d) >= 2)


def test_a_budget_beyond_a_minimum_is_explained():
    result = zo.minimize(bowl(3), np.zeros(3), max_evaluations=300, progress=False)
    assert Reason.LOOKING in [stage.reason for stage in result.stages]


@pytest.mark.parametrize("scale", [-1.0, np.nan, [1.0, 2.0, 3.0], "auto", {"a": 1.0}])
@pytest.mark.parametrize("name", ["untuned", "slopes", "quadratic", "evolution"])
def test_a_scale_is_checked_before_the_first_call(name, scale):
    calls = []
    method = getattr(zo.methods, name)(scale=scale)
    with pytest.raises(ValueError, match="scale must be"):
        zo.minimize(calls.append, np.zeros(2), method, progress=False)
    assert not calls


def test_sizes_are_checked_by_the_methods_that_have_a_scale():
    contract.check(zo.methods.many(), started(np.zeros(2)))
    with pytest.raises(ValueError, match=r"scale must be positive.*got -1"):
        contract.check(zo.methods.untuned(scale=-1.0), started(np.zeros(2)))
