"""CMA-ES by pycma's formulas, and its points, bounds, failures and ends."""

import warnings

import cma
import numpy as np
import pytest
from cma.recombination_weights import RecombinationWeights
from cma.sampler import GaussDiagonalSampler
from scipy.optimize import minimize

from radazo_jax._src.methods import contract, evolution
from radazo_jax._src.methods.contract import Box
from radazo_jax._src.methods.ends import Reason
from tests.helpers.driver import drive, started
from tests.helpers.tables import slow

D = 6
ORTHOGONAL = np.linalg.qr(np.random.default_rng(0).normal(size=(D, D)))[0]
UNITS = np.logspace(-6, 6, D)


def sphere(x):
    return float(np.sum((x - 1) ** 2))


def rosenbrock(x):
    return float(np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2))


def stairs(x):
    return float(np.sum(np.floor(4 * np.abs(x - 1))))


def rotated(x):
    return float(np.logspace(0, 3, D) @ (ORTHOGONAL @ (x - 1)) ** 2)


def scaled(x):
    return rosenbrock(x / UNITS)


def a_fifth_fails(x):
    draw = np.random.default_rng(x.view(np.uint32))
    return np.nan if draw.random() < 0.2 else rosenbrock(x)


def noisy(x):
    return float(np.random.default_rng(x.view(np.uint32)).normal())


DEFAULT = evolution.evolution()


@pytest.mark.parametrize(("d", "size"), [(2, 6), (5, 8), (10, 10), (30, 14), (5, 80)])
def test_weights_and_rates_are_those_of_pycma(d, size):
    found, known = evolution.constants(d, size), RecombinationWeights(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = cma.CMAEvolutionStrategy(
            np.zeros(d), 1.0, {"popsize": size, "verbose": -9}
        )
    rates = strategy.sm.parameters(known.mueff, size)
    known.finalize_negative_weights(d, rates["c1"], rates["cmu"])
    np.testing.assert_allclose(found.weights, known, rtol=1e-12, atol=1e-15)
    rates_here = found.c_1, found.c_mu, found.c_c
    theirs = rates["c1"], rates["cmu"], strategy.sp.cc
    np.testing.assert_allclose(rates_here, theirs, rtol=1e-12)


@pytest.mark.parametrize("d", [2, 40, 300])
def test_the_size_of_a_population_is_that_of_pycma(d):
    known = cma.CMAEvolutionStrategy(np.zeros(d), 1.0, {"verbose": -9})
    assert evolution.default_population(d) == known.popsize


class Pycma:
    """pycma's strategy, with the tutorial's rates of σ and its start."""

    def __init__(self, d, constants, monkeypatch):
        options = {"verbose": -9, "seed": 1, "popsize": len(constants.weights)}
        self.es = cma.CMAEvolutionStrategy(np.zeros(d), 0.3, options)
        self.es.adapt_sigma.initialize(self.es)
        self.es.adapt_sigma.cs = constants.c_sigma
        self.es.adapt_sigma.damps = constants.d_sigma
        self.es.sm.C, self.es.sm.B = np.eye(d), np.eye(d)
        self.es.sm.D = np.ones(d)
        # The mean length of a normal vector, of which the tutorial has an
        # approximation.
        length = staticmethod(lambda _: constants.length)
        monkeypatch.setattr(cma.sigma_adaptation.Mh, "chiN", length)

    def tell(self, points, values):
        self.es.ask()  # It decomposes C then.
        self.es.tell(list(points), values, check_points=False)
        return self.es.mean, self.es.sigma, self.es.sm.C, self.es.pc


@pytest.mark.parametrize(("d", "size"), [(5, None), (5, 21), slow(12, None)])
def test_steps_are_those_of_pycma(d, size, monkeypatch):
    """The start is so close that h_σ is 1; pycma has another threshold for it."""

    def ellipsoid(x):
        return float(np.logspace(0, 2, d) @ (x - 0.2) ** 2)

    size = size or evolution.default_population(d)
    constants, rng = evolution.constants(d, size), np.random.default_rng(0)
    known = Pycma(d, constants, monkeypatch)
    state = evolution.first_state(np.zeros(d), 0.3)
    for _ in range(60):
        y = state.drawn(rng.standard_normal((size, d)))
        points = state.mean + state.sigma * y
        values = np.array([ellipsoid(x) for x in points])
        order = np.argsort(values)
        state = evolution.adapted(constants, state, y[order], values[order])
        found = state.mean, state.sigma, state.covariance, state.path_c
        for here, there in zip(found, known.tell(points, values), strict=True):
            # It adds 1e-9 to the lengths of bad steps.
            np.testing.assert_allclose(here, there, rtol=1e-6, atol=1e-8)


def test_the_diagonal_is_that_of_pycma():
    d, size = 201, 19
    c, rng = evolution.constants(d, size), np.random.default_rng(0)
    full = evolution.constants(200, size)
    state, known = evolution.first_state(np.zeros(d), 0.3), GaussDiagonalSampler(d)
    # Ros & Hansen learn (d + 2) / 3 times as fast.
    mass = 1 / np.sum(c.weights[: size // 2] ** 2)
    np.testing.assert_allclose(c.c_1, 2 / ((d + 1.3) ** 2 + mass) * (d + 2) / 3)
    assert c.c_mu > 50 * full.c_mu
    for _ in range(30):
        y = state.drawn(rng.standard_normal((size, d)))
        values = np.sum(np.logspace(0, 2, d) * (state.mean + state.sigma * y) ** 2, 1)
        order = np.argsort(values)
        # It has scaled C when it takes the lengths of bad steps; the tutorial has not.
        deviations = np.sqrt(known.C)
        known.norm = lambda step, by=deviations: np.linalg.norm(step / by)
        before, state = state, evolution.adapted(c, state, y[order], values[order])
        decayed = (1 - c.c_c) * before.path_c
        stalled = np.array_equal(state.path_c, decayed)  # h_σ is 0.
        rates = np.r_[c.c_1, c.c_mu * c.weights]
        missing = c.c_1 * stalled * c.c_c * (2 - c.c_c)
        known.update(np.vstack([state.path_c, y[order]]), rates, missing)
        np.testing.assert_allclose(state.covariance, known.C, rtol=1e-9)
        np.testing.assert_allclose(state.deviations**2, known.C, rtol=1e-9)


def test_a_fast_step_size_delays_the_covariance():
    """If h_σ is 0, the formula of figure 6 has no path, and makes up for it."""
    d, size = 4, 8
    c = evolution.constants(d, size)
    state = evolution.first_state(np.zeros(d), 1.0)
    state = state._replace(path_sigma=np.full(d, 9.0), path_c=np.arange(4.0))
    y, values = np.random.default_rng(0).normal(size=(size, d)), np.arange(8.0)
    after = evolution.adapted(c, state, y, values)
    path = (1 - c.c_c) * np.arange(4.0)
    np.testing.assert_allclose(after.path_c, path)
    each = np.where(c.weights < 0, c.weights * d / np.sum(y**2, 1), c.weights)
    kept = 1 + c.c_1 * c.c_c * (2 - c.c_c) - c.c_1 - c.c_mu * np.sum(c.weights)
    expected = kept * np.eye(d) + c.c_1 * np.outer(path, path)
    expected += c.c_mu * np.einsum("i,ij,ik->jk", each, y, y)
    np.testing.assert_allclose(after.covariance, expected)


@pytest.mark.parametrize(
    ("fun", "x", "most", "reached"),
    [
        (sphere, np.zeros(1), 400, 1e-12),
        (stairs, np.zeros(D), 1500, 0.0),
        (rosenbrock, np.zeros(D), 4000, 1e-12),
        slow(sphere, np.zeros(D), 2500, 1e-18),
        slow(rotated, np.zeros(D), 4000, 1e-12),
        slow(scaled, np.zeros(D), 5000, 1e-12),
        slow(a_fifth_fails, np.zeros(D), 5000, 1e-10),
        slow(sphere, np.zeros(250), 15_000, 1e-3),
    ],
)
def test_it_converges(fun, x, most, reached):
    scale = UNITS if fun is scaled else 1.0
    method = evolution.evolution(scale=scale)
    runs = [drive(method, fun, x, most, seed=seed) for seed in range(3)]
    assert np.median([run.value for run in runs]) <= reached


@pytest.mark.parametrize(
    ("fun", "lower", "upper"),
    [
        # The minimum is a corner.
        (sphere, np.full(D, 2.0), np.full(D, 4.0)),
        (rosenbrock, np.full(D, -1.0), np.full(D, 0.5)),
        slow(rotated, np.full(D, -np.inf), np.full(D, 0.8)),
        slow(rotated, np.full(D, 0.3), np.r_[np.full(D - 1, np.inf), 0.3]),
    ],
)
def test_bounded_minima_are_those_of_scipy(fun, lower, upper):
    start = np.clip(np.full(D, 0.25), lower, upper)
    found = drive(DEFAULT, fun, start, box=(lower, upper))
    bounds = np.stack([lower, upper], 1)
    known = minimize(fun, start, method="SLSQP", bounds=bounds, tol=1e-15)
    assert found.value <= known.fun + 1e-7 * abs(known.fun) + 1e-12


def test_the_map_into_a_box_and_back():
    lower, upper = (
        np.array([-1.0, -1.0, -np.inf, 2.0]),
        np.array([1.0, np.inf, 3.0, 2.0]),
    )
    space = evolution.Reflected(Box(lower, upper), np.full(4, 0.1))
    g = np.random.default_rng(0).normal(size=(200, 4)) * 5
    x = space.inside(g)
    assert np.all((x >= lower) & (x <= upper))
    # Points that differ stay different, except for what cannot move.
    assert [len(np.unique(column)) for column in x.T] == [200, 200, 200, 1]
    np.testing.assert_allclose(space.inside(space.unbounded(x)), x, atol=1e-12)
    # A whole turn leads back.
    turn = 2 * (2 + 2 * 0.1)
    np.testing.assert_allclose(space.inside(g + turn)[:, 0], x[:, 0], atol=1e-12)
    # Far from the bounds, nothing is changed or rounded.
    inside = np.all((g[:, :3] > lower[:3] + 0.1) & (g[:, :3] < upper[:3] - 0.1), 1)
    assert inside.sum() > 5
    np.testing.assert_array_equal(x[inside, :3], g[inside, :3])


def test_bounds_and_the_start_give_sizes():
    box = Box(np.array([-1.0, 0.0, 0.0]), np.array([1.0, 9e5, np.inf]))
    start = started(np.array([0.0, 4e5, 3e5]), box)
    typical = 5e5 / np.sqrt(3)
    np.testing.assert_allclose(contract.sizes(start, 1.0), [4 / 3, 6e5, typical])
    np.testing.assert_allclose(contract.sizes(start, 1e6), [4 / 3, 6e5, 1e6])
    with pytest.raises(ValueError, match="scale must be positive"):
        contract.sizes(start, 0.0)


def test_points_are_those_of_float32():
    eps = np.finfo(np.float32).eps
    kind = dict(dtype=np.float32, resolution=eps)
    run = drive(DEFAULT, lambda x: sphere(x - 0.1), np.zeros(D), **kind)
    np.testing.assert_array_equal(run.params, np.full(D, np.float32(1.1)))
    assert run.reason == Reason.STAGNANT and run.count < 3000


def test_failures_come_last_and_have_no_part_in_the_mean():
    c, state = evolution.constants(2, 8), evolution.first_state(np.zeros(2), 1.0)
    y = np.random.default_rng(0).normal(size=(8, 2))
    values = np.r_[1.0, 2.0, np.full(6, np.inf)]
    after = evolution.adapted(c, state, y, values)
    weights = c.weights[:2] / c.weights[:2].sum()
    np.testing.assert_allclose(after.mean, weights @ y[:2])
    nothing = evolution.adapted(c, state, y, np.full(8, np.inf))
    np.testing.assert_array_equal(nothing.mean, state.mean)
    assert nothing.sigma == 0.5 * state.sigma


@pytest.mark.parametrize(
    ("fun", "reason", "most"),
    [
        (sphere, Reason.MINIMUM, 4000),
        (lambda x: 1 + sphere(x), Reason.EQUAL, 2500),
        (lambda x: 0.0, Reason.FLAT, 1000),
        (lambda x: float(x[0]), Reason.GROWING, 2000),
        slow(noisy, Reason.STAGNANT, 10_000),
        (lambda x: x[0] ** 2 + 1e16 * np.sum(x[1:] ** 2), Reason.SINGULAR, 5000),
    ],
)
def test_it_ends_by_itself(fun, reason, most):
    run = drive(DEFAULT, fun, np.zeros(D) if fun is noisy else np.ones(D) * 2)
    assert (run.reason, run.count < most) == (reason, True)


def test_only_ranks_count():
    def harder(x):
        return np.exp(rosenbrock(x) / 1e3) - 1e6

    one, other = (drive(DEFAULT, f, np.zeros(D), 900) for f in (rosenbrock, harder))
    np.testing.assert_array_equal(one.points, other.points)


def test_the_center_converges_to_the_minimum():
    steps = DEFAULT(started(np.zeros(2)))
    next(steps)
    ask = steps.send(np.array([sphere(np.zeros(2))]))
    np.testing.assert_array_equal(ask.center, [0, 0])
    for _ in range(60):
        ask = steps.send(np.array([sphere(x) for x in ask.points]))
    np.testing.assert_allclose(ask.center, [1, 1], atol=1e-4)


def test_populations_of_restarts_have_limits():
    size, d = evolution.default_population(50), 50
    for _ in range(30):
        size = evolution.doubled(size, d)
    assert size == 16 * evolution.default_population(d)
    assert evolution.doubled(400, 10**5) == 400
    assert evolution.doubled(20, 10) == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"population": 1}, "population must be .*got 1"),
        ({"population": 2.5}, "population must be .*got 2.5"),
        ({"step_size": 0.0}, "step_size must be .*got 0"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        evolution.evolution(**arguments)
