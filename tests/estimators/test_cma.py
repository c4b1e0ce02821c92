"""Covariance matrix adaptation, by the formulas of Hansen's tutorial and by pycma."""

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor

import chex
import cma
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cma.recombination_weights import RecombinationWeights
from scipy.optimize import minimize

import radazo_jax as zo
from radazo_jax._src.estimators.covariance import constants_of
from radazo_jax._src.estimators.reflected import Box
from radazo_jax.estimators import Draw
from tests.helpers.tables import every, jit, slow

D = 6  # Of runs that share their programs.
START = np.zeros(D)
ORTHOGONAL = np.linalg.qr(np.random.default_rng(0).normal(size=(D, D)))[0]


def sphere(x):
    return float(np.sum((x - 1) ** 2))


def rosenbrock(x):
    return float(np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2))


def stairs(x):
    return float(np.sum(np.floor(4 * np.abs(x - 1))))


def rotated(x):
    return float(np.logspace(0, 3, D) @ (ORTHOGONAL @ (x - 1)) ** 2)


UNITS = np.logspace(-6, 6, D)


def scaled(x):
    return rosenbrock(x / UNITS)


# One object: another optimizer of Optax would have programs of its own.
METHOD = optax.sgd(1.0), zo.estimators.cma()


def run(fun, start=START, most=4000, **options):
    return zo.minimize_black_box(
        fun, start, *METHOD, max_evaluations=most, progress=False, **options
    )


@functools.cache
def programs(estimator):
    """A step, cut at the evaluator: of known values, and outside of a run."""

    @jit
    def ask(key, params, state, bounds):
        draw = Draw(key, key)._replace(bounds=bounds)
        points, state = estimator.points(draw, params, state)
        return points, state, zo.estimators.candidates(points, params)

    @jit
    def tell(points, values, params, state):
        values = points.split(values)
        estimate, state = estimator.reduce(points, values, params, state)
        gradient = estimate.gradient.materialize(params)
        after = jax.tree.map(lambda p, g: p - g, params, gradient)
        return estimate, after, state

    return ask, tell


class Steps:
    """The estimator with a plain step, on values from NumPy."""

    def __init__(self, estimator, params, bounds=None):
        self.ask, self.tell = programs(estimator)
        self.params, self.state, self.bounds = params, estimator.init(params), bounds
        self.number = 0

    def __call__(self, fun):
        key = jax.random.fold_in(jax.random.key(7), self.number)
        points, state, at = self.ask(key, self.params, self.state, self.bounds)
        xs = np.asarray(at)
        values = np.array([fun(x) for x in xs])
        found = self.tell(points, jnp.asarray(values), self.params, state)
        self.estimate, self.params, self.state = found
        self.number += 1
        return xs, values


class Tutorial:
    """The formulas of arXiv 1604.00772, equations (5) to (37) and table 1."""

    def __init__(self, mean, sigma, size, is_full=True):
        n = len(mean)
        self.m, self.sigma, self.is_full = mean, sigma, is_full
        self.C = self.B = np.eye(n)
        self.D, self.ps, self.pc, self.g = np.ones(n), np.zeros(n), np.zeros(n), 0
        mu = size // 2
        raw = np.log((size + 1) / 2) - np.log(np.arange(1, size + 1))
        mu_eff = raw[:mu].sum() ** 2 / (raw[:mu] ** 2).sum()
        mu_eff_minus = raw[mu:].sum() ** 2 / (raw[mu:] ** 2).sum()
        factor = 1 if is_full else (n + 2) / 3  # Ros & Hansen, 2008.
        c1 = factor * 2 / ((n + 1.3) ** 2 + mu_eff)
        c_mu = 2 * (1 / 4 + mu_eff + 1 / mu_eff - 2) / ((n + 2) ** 2 + mu_eff)
        c_mu = min(1 - c1, factor * c_mu)
        alpha = min(
            1 + c1 / c_mu,
            1 + 2 * mu_eff_minus / (mu_eff + 2),
            (1 - c1 - c_mu) / (n * c_mu),
        )
        self.w = np.where(
            raw >= 0, raw / raw[raw > 0].sum(), alpha * raw / -raw[raw < 0].sum()
        )
        self.cs = (mu_eff + 2) / (n + mu_eff + 5)
        extra = 2 * max(0, np.sqrt((mu_eff - 1) / (n + 1)) - 1)
        self.ds = 1 + extra + self.cs
        self.cc = (4 + mu_eff / n) / (n + 4 + 2 * mu_eff / n)
        self.mu, self.mu_eff, self.c1, self.c_mu = mu, mu_eff, c1, c_mu
        self.chi = np.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n**2))
        self.gap = max(1, int(1 / (10 * n * (c1 + c_mu))))

    def tell(self, xs, values):
        order = np.argsort(np.where(np.isnan(values), np.inf, values), kind="stable")
        values, n = values[order], len(self.m)
        y = (xs[order] - self.m) / self.sigma
        root = self.B @ np.diag(1 / self.D) @ self.B.T
        finite = np.isfinite(values)
        weights = np.where((self.w > 0) & finite, self.w, 0)
        weights, mu_eff = weights / weights.sum(), self.mu_eff
        if not finite[: self.mu].all():
            mu_eff = 1 / np.sum(weights**2)
        step = weights @ y
        self.m, self.g = self.m + self.sigma * step, self.g + 1
        self.ps = (1 - self.cs) * self.ps
        self.ps += np.sqrt(self.cs * (2 - self.cs) * mu_eff) * root @ step
        length = np.linalg.norm(self.ps)
        begun = np.sqrt(1 - (1 - self.cs) ** (2 * self.g))
        self.h = float(length / begun < (1.4 + 2 / (n + 1)) * self.chi)
        self.pc = (1 - self.cc) * self.pc
        self.pc += self.h * np.sqrt(self.cc * (2 - self.cc) * mu_eff) * step
        lengths = np.sum((y @ root) ** 2, 1)
        each = weights + np.where(self.w < 0, self.w * n / lengths, 0)
        delta = (1 - self.h) * self.cc * (2 - self.cc)
        total = 1 + np.minimum(self.w, 0).sum()
        self.C = (
            (1 + self.c1 * delta - self.c1 - self.c_mu * total) * self.C
            + self.c1 * np.outer(self.pc, self.pc)
            + self.c_mu * (y.T * each) @ y
        )
        self.sigma *= np.exp(min(1, self.cs / self.ds * (length / self.chi - 1)))
        if values[0] == values[min(len(values) // 2, 1 + len(values) // 4)]:
            self.sigma *= np.exp(0.2 + self.cs / self.ds)
        if not self.is_full:
            self.C = np.diag(np.diag(self.C))
            self.D = np.sqrt(np.diag(self.C))
        elif self.g % self.gap == 0:
            variances, self.B = np.linalg.eigh(self.C)
            self.D = np.sqrt(variances)


def assert_same_strategy(
    steps, mean, sigma, covariance, path, step_path, rounding=1e-9
):
    state = steps.state
    same = functools.partial(
        np.testing.assert_allclose, rtol=rounding, atol=rounding / 100
    )
    same(steps.params, mean)
    same(state.step_size, sigma)
    is_full = state.basis is not None
    same(state.covariance, covariance if is_full else np.diag(covariance))
    same(state.covariance_path, path)
    same(state.step_path, step_path)


def slope_and_valley(x):
    """A long slope, on which σ grows and h_σ is 0, and then an ellipsoid."""
    away = x - 30
    return float(np.logspace(0, 2, x.size) @ away**2)


def failing(x):
    """Half of the points have no value."""
    return np.nan if x[0] > 0 else slope_and_valley(x)


CASES = {
    "one parameter": (1, None, slope_and_valley),
    "a matrix": (5, None, slope_and_valley),
    "an odd population": (3, 9, slope_and_valley),
    "few points": (4, 2, slope_and_valley),
    "many points": (3, 40, slope_and_valley),
    "steps": (4, None, stairs),
    "failures": (4, None, failing),
    "a diagonal": (201, None, slope_and_valley),
}


@pytest.mark.parametrize("name", every(CASES, "a matrix", "failures"))
def test_formulas_are_those_of_the_tutorial(name):
    d, size, fun = CASES[name]
    with jax.enable_x64(True):
        steps = Steps(zo.estimators.cma(size, 0.3), jnp.zeros(d))
        known = Tutorial(np.zeros(d), 0.3, len(steps.state.normals), d <= 200)
        stalled = 0
        for number in range(1, 31):
            known.tell(*steps(fun))
            stalled += not known.h
            if number in (1, 5, 30):
                assert_same_strategy(
                    steps, known.m, known.sigma, known.C, known.pc, known.ps
                )
    assert stalled or fun is not slope_and_valley or d > 200


@pytest.mark.parametrize("d", [5, slow(12)])
def test_formulas_are_those_of_pycma(d, monkeypatch):
    """With the tutorial's rates of σ and its start; pycma has others.

    Its threshold of h_σ is another one, too: the start is so close that h_σ is 1.
    """

    def ellipsoid(x):
        return float(np.logspace(0, 2, d) @ (x - 0.2) ** 2)

    options = {"verbose": -9, "seed": 1}
    known = cma.CMAEvolutionStrategy(np.zeros(d), 0.3, options)
    known.adapt_sigma.initialize(known)
    constants = constants_of(d, known.popsize)
    known.adapt_sigma.cs, known.adapt_sigma.damps = constants.c_step, constants.damping
    known.sm.C, known.sm.B, known.sm.D = np.eye(d), np.eye(d), np.ones(d)
    # The mean length of a normal vector, of which the tutorial has an approximation.
    length = staticmethod(lambda _: constants.length)
    monkeypatch.setattr(cma.sigma_adaptation.Mh, "chiN", length)
    with jax.enable_x64(True):
        steps = Steps(zo.estimators.cma(step_size=0.3), jnp.zeros(d))
        for number in range(1, 31):
            xs, values = steps(ellipsoid)
            known.ask()  # It decomposes C then.
            known.tell(list(xs), values, check_points=False)
            if number in (1, 5, 30):
                found = known.sm.C, known.pc, known.adapt_sigma.ps
                # It adds 1e-9 to the lengths of bad steps.
                assert_same_strategy(
                    steps, known.mean, known.sigma, *found, rounding=1e-7
                )


@pytest.mark.parametrize(("d", "size"), [(2, 6), (5, 8), (10, 10), (30, 14), (5, 80)])
def test_weights_and_rates_are_those_of_pycma(d, size):
    found, known = constants_of(d, size), RecombinationWeights(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = cma.CMAEvolutionStrategy(
            np.zeros(d), 1.0, {"popsize": size, "verbose": -9}
        )
    rates = strategy.sm.parameters(known.mueff, size)
    known.finalize_negative_weights(d, rates["c1"], rates["cmu"])
    np.testing.assert_allclose(found.weights, known, rtol=1e-12, atol=1e-15)
    rates_here = found.c_one, found.c_rank, found.c_path
    theirs = rates["c1"], rates["cmu"], strategy.sp.cc
    np.testing.assert_allclose(rates_here, theirs, rtol=1e-12)


@pytest.mark.parametrize(
    ("fun", "most", "reached"),
    [
        (stairs, 1500, 0.0),
        slow(sphere, 2500, 1e-18),
        slow(rosenbrock, 4000, 1e-12),
        slow(rotated, 4000, 1e-12),
    ],
)
def test_it_converges(fun, most, reached):
    bests = [run(fun, most=most, key=key).best.value for key in range(3)]
    assert np.median(bests) <= reached


@pytest.mark.slow
def test_failing_points_cost_little():
    """A fifth of all points has no value."""

    def fun(x):
        draw = np.random.default_rng(x.view(np.uint32))
        return np.nan if draw.random() < 0.2 else rosenbrock(x)

    bests = [run(fun, most=5000, key=key).best.value for key in range(3)]
    assert np.median(bests) < 1e-10


@pytest.mark.parametrize("d", [slow(1), slow(250)])
def test_numbers_of_parameters(d):
    def ellipsoid(x):
        return float(np.logspace(0, 1, d) @ (x - 1) ** 2)

    most = 400 if d == 1 else 15_000
    result = run(ellipsoid, np.zeros(d), most)
    assert result.best.value < 1e-3 * ellipsoid(np.zeros(d))
    assert result.state.estimator_state.covariance.shape == ((1, 1) if d == 1 else (d,))


@pytest.mark.slow
def test_float32_converges_as_far_as_it_resolves():
    result = run(sphere, START.astype(np.float32), 2000)
    state = result.state.estimator_state
    assert result.params.dtype == state.step_size.dtype == np.float32
    assert result.best.value < 1e-12 and bool(state.exhausted)


@pytest.mark.parametrize(
    ("fun", "lower", "upper"),
    [
        # The minimum is a corner.
        (sphere, np.full(D, 2.0), np.full(D, 4.0)),
        slow(rosenbrock, np.full(D, -1.0), np.full(D, 0.5)),
        slow(rotated, np.full(D, -np.inf), np.full(D, 0.8)),
        slow(rotated, np.full(D, 0.3), np.r_[np.full(D - 1, np.inf), 0.3]),
        slow(scaled, -2 * UNITS, 0.9 * UNITS),
    ],
)
def test_bounded_minima_are_those_of_scipy(fun, lower, upper):
    is_scaled = fun is scaled
    start = np.clip(0.25 * UNITS if is_scaled else np.full(D, 0.25), lower, upper)
    points = []

    def seen(x):
        points.append(x)
        return fun(x)

    result = run(seen, start, 6000, bounds=(lower, upper))
    # SciPy's method does not find scales.
    units = UNITS if is_scaled else np.ones(D)
    known = minimize(
        lambda z: fun(units * z),
        start / units,
        method="SLSQP",
        bounds=np.stack([lower, upper], 1) / units[:, None],
        tol=1e-15,
    )
    assert result.best.value <= known.fun + 1e-7 * abs(known.fun) + 1e-12
    inside = [*points, np.asarray(result.params)]
    assert np.all((np.array(inside) >= lower) & (np.array(inside) <= upper))


def test_points_are_in_the_box_before_they_are_projected():
    lower, upper = jnp.array([-1.0, 0.5, -jnp.inf]), jnp.array([1.0, 0.5, 3.0])
    params, bounds = jnp.array([1.0, 0.5, 2.9]), (lower, upper)
    xs, _ = Steps(zo.estimators.cma(40, 5.0), params, bounds)(sphere)
    # Up to the rounding of directions.
    low, high = np.asarray(lower) - 1e-6, np.asarray(upper) + 1e-6
    assert np.all((xs >= low) & (xs <= high))
    # Each is a point of its own, except for what cannot move.
    assert [len(np.unique(column)) for column in xs.T] == [40, 1, 40]


def test_bounds_give_scales():
    lower, upper = jnp.array([-1.0, 0.0, 0.0]), jnp.array([1.0, 1e6, jnp.inf])
    params = jnp.array([0.0, 5e5, 0.0])
    estimator = zo.estimators.cma()
    ask, _ = programs(estimator)
    key, bounds = jax.random.key(0), (lower, upper)
    _, state, _ = ask(key, params, estimator.init(params), bounds)
    typical = 5e5 / np.sqrt(3)
    expected = [0.4, 2e5, 0.3 * typical]
    np.testing.assert_allclose(state.step_size * state.scale, expected, rtol=1e-6)
    # The scale is the same as at the first step.
    _, later, _ = ask(key, 2 * params, state, bounds)
    chex.assert_trees_all_equal(later.scale, state.scale)
    named = zo.estimators.cma(step_size=0.1)
    _, state, _ = programs(named)[0](key, params, named.init(params), bounds)
    chex.assert_trees_all_equal(state.scale, jnp.ones(3))


def test_the_map_into_a_box_and_back():
    box = Box.of(*(jnp.array([x]) for x in (-1.0, 1.0, 1.0)))
    at, away = jnp.linspace(-1, 1, 21), jnp.linspace(-7, 7, 41)
    rows = jax.vmap(jax.vmap(box.moved, (None, 0)), (0, None))
    moved = np.asarray(jit(rows)(at[:, None], away[:, None])[..., 0])
    found = np.asarray(at)[:, None] + moved
    assert np.all(abs(found) <= 1 + 1e-6)
    np.testing.assert_allclose(moved[:, 20], 0, atol=1e-6)
    # A whole turn leads back, also of what is near a bound.
    turn = jnp.full((1, 1), 2 * (2 + 2 * 0.1))
    np.testing.assert_allclose(jit(rows)(at[:, None], turn), 0, atol=1e-5)
    # Far from the bounds, nothing is changed or rounded.
    inside = jnp.array([[1e-9], [0.3]])
    same = jit(rows)(jnp.zeros((1, 1)), inside)[0]
    chex.assert_trees_all_equal(same, inside)


def test_only_ranks_count():
    def harder(x):
        return np.exp(rosenbrock(x) / 1e3) - 1e6

    one, other = (run(fun, most=900, key=3) for fun in (rosenbrock, harder))
    chex.assert_trees_all_equal(one.params, other.params)
    for name in ("covariance", "step_size", "step_path", "covariance_path"):
        states = (getattr(r.state.estimator_state, name) for r in (one, other))
        chex.assert_trees_all_equal(*states)


@pytest.mark.slow
def test_the_tree_does_not_count():
    def of_tree(params):
        return rosenbrock(np.r_[params["a"].ravel(), params["b"]])

    tree = {"a": np.zeros((2, 2)), "b": np.zeros(2)}
    one, other = run(rosenbrock, most=450), run(of_tree, tree, 450)
    flat = np.r_[other.params["a"].ravel(), other.params["b"]]
    chex.assert_trees_all_equal(np.asarray(one.params), flat)


def test_a_journal_resumes_and_rebuilds(tmp_path):
    path = tmp_path / "run.jsonl"
    whole = run(rosenbrock, num_steps=30)
    run(rosenbrock, num_steps=12, journal=path)
    resumed = run(rosenbrock, num_steps=30, journal=path)
    chex.assert_trees_all_equal(resumed.params, whole.params)
    state = zo.replay(path, START, *METHOD)
    chex.assert_trees_all_equal(state.params, whole.params)
    chex.assert_trees_all_equal(
        jax.tree.leaves(state.estimator_state),
        jax.tree.leaves(resumed.state.estimator_state),
    )


@pytest.mark.slow
def test_executors_and_ask_tell_take_the_same_steps():
    whole = run(rosenbrock, num_steps=20)
    with ThreadPoolExecutor(2) as executor:
        shared = run(rosenbrock, num_steps=20, executor=executor)
    chex.assert_trees_all_equal(shared.params, whole.params)
    told = zo.ask_tell(START, *METHOD)
    for _ in range(20):
        told.tell([rosenbrock(x) for x in told.ask()])
    chex.assert_trees_all_equal(told.params, np.asarray(whole.params))


def loss(x):
    return jnp.sum((x - 1) ** 2)


@pytest.mark.parametrize("evaluator", [zo.vectorized(), slow(zo.vectorized(2))])
def test_compiled_runs_evaluate_the_points_that_are_asked_for(evaluator):
    """The evaluators would store directions that have no elements yet."""
    estimator, params = zo.estimators.cma(6, 0.3), {"a": jnp.zeros((2, 2))}
    draw = Draw.once(jax.random.key(1))

    @jit
    def both():
        points, _ = estimator.points(draw, params, estimator.init(params))
        fun = lambda x: loss(x["a"])  # noqa: E731
        values, _ = evaluator.evaluate(fun, params, evaluator.cache(points), False)
        return values.along[:, 0], zo.estimators.candidates(points, params)

    values, asked = both()
    known = jnp.sum((asked["a"] - 1) ** 2, (1, 2))
    chex.assert_trees_all_close(values, known, rtol=1e-5)


@pytest.mark.slow
def test_minimize_and_a_journal_of_it_converge(tmp_path):
    options = {"num_steps": 120, "key": 0, "progress": False}
    result = zo.minimize(loss, jnp.zeros(3), *METHOD, **options)
    assert float(loss(result.params)) < 1e-9
    path = tmp_path / "run"
    written = zo.minimize(loss, jnp.zeros(3), *METHOD, journal=path, **options)
    state = zo.replay(path, jnp.zeros(3), *METHOD)
    chex.assert_trees_all_equal(state.params, written.params)


@pytest.mark.slow
def test_many_runs_under_vmap_are_those_of_each():
    init, step = zo.solver(loss, *METHOD)

    def runs(key):
        def again(_, state):
            return step(state)[0]

        return jax.lax.fori_loop(0, 5, again, init(jnp.zeros(3), key)).params

    each = jax.random.split(jax.random.key(0), 3)
    together = jit(jax.vmap(runs))(each)
    alone = jnp.stack([jit(runs)(key) for key in each])
    chex.assert_trees_all_close(together, alone, rtol=1e-4, atol=1e-5)


def test_a_constant_function_exhausts_it():
    """After 10 + 30 d/λ steps at the same value."""
    patience = constants_of(D, 9).patience
    estimator = zo.estimators.cma()
    with pytest.warns(UserWarning, match="fun returned 3 at all points"):
        states = [
            run(lambda x: 3.0, num_steps=n).state.estimator_state
            for n in (patience, patience + 1)
        ]
    assert [bool(estimator.exhausted(state)) for state in states] == [False, True]
    assert not zo.forward_difference().exhausted(())


@pytest.mark.slow
def test_convergence_exhausts_it():
    result = run(rosenbrock, most=10_000, key=1)
    assert result.best.value < 1e-20
    assert bool(result.state.estimator_state.exhausted)
    assert not bool(run(rosenbrock, most=900).state.estimator_state.exhausted)
    # Also after it, everything is finite.
    leaves = jax.tree.leaves(result.state.estimator_state._replace(lower=0, upper=0))
    assert all(np.isfinite(x).all() for x in leaves)


@pytest.mark.slow
def test_no_end_is_not_followed_for_ever():
    """Downhill without an end, σ grows until it cannot be computed with."""
    state = run(lambda x: float(np.sum(x)), most=9 * 200).state.estimator_state
    assert bool(state.exhausted) and np.isfinite(state.step_size)


def test_without_a_value_the_next_points_are_closer():
    def island(x):
        return sphere(x) if np.all(abs(x) < 1e-3) else np.nan

    with pytest.raises(zo.RunError, match="no finite value") as raised:
        run(island, num_steps=8)
    state = raised.value.state.estimator_state
    chex.assert_trees_all_equal(np.asarray(raised.value.state.params), START)
    np.testing.assert_allclose(float(state.step_size), 0.3 / 2**8)
    assert int(state.generation) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zo.estimators.cma(1), "population_size must be an int ≥ 2; got 1"),
        (lambda: zo.estimators.cma(2.5), "population_size must be an int ≥ 2; got"),
        (
            lambda: zo.estimators.cma(step_size=0.0),
            "step_size must be a finite number > 0; got 0.0",
        ),
        (
            lambda: zo.estimators.cma(step_size=np.nan),
            "step_size must be a finite number > 0; got nan",
        ),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
