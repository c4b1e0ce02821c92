"""The default method for few parameters: whole differences, BFGS and trial steps."""

import hashlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import radazo_jax as zo
from radazo_jax.estimators import Draw
from tests.helpers.tables import jit, slow

START = np.array([-1.2, 1.0])


def rosenbrock(x):
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


# Named, so that no other method follows it.
METHOD = zo.bfgs(), zo.full_difference(), zo.search.backtracking()


def run(fun=rosenbrock, start=START, most=240, **options):
    return zo.minimize_black_box(
        fun, start, *METHOD, max_evaluations=most, progress=False, **options
    )


class Counted:
    """A function that keeps the points at which it was called."""

    def __init__(self, fun):
        self.fun, self.points = fun, []

    def __call__(self, x):
        self.points.append(x.copy())
        return self.fun(x)


def _product(state, g):
    """H g by eq. (7.19) of Nocedal & Wright, as a matrix, in float64."""
    h = np.asarray(state.scale) * np.eye(len(g))
    for s, y in zip(
        *map(np.asarray, (state.displacements, state.changes)), strict=True
    ):
        if s @ y > 0:
            left = np.eye(len(g)) - np.outer(s, y) / (s @ y)
            h = left @ h @ left.T + np.outer(s, s) / (s @ y)
    return h @ g


@pytest.mark.parametrize("memory_size", [None, slow(3)])
def test_the_update_is_the_product_with_the_latest_pairs(memory_size):
    draw = np.random.default_rng(1)
    root = draw.normal(size=(6, 6))
    hessian = root @ root.T + np.eye(6)
    with jax.enable_x64(True):
        scale = zo.scale_by_bfgs(memory_size)
        state, step = scale.init(jnp.zeros(6)), jit(scale.update)
        for _ in range(8):
            x = jnp.asarray(draw.normal(size=6))
            gradient = hessian @ x
            update, state = step(gradient, state, x, value=1.0)
        s, y = np.asarray(state.displacements[-1]), np.asarray(state.changes[-1])
        assert float(state.scale) == pytest.approx(s @ y / (y @ y))
        expected = _product(state, np.asarray(gradient))
        chex.assert_trees_all_close(np.asarray(update), expected, rtol=1e-9)


def test_sizes_are_other_units():
    """The run in units of the sizes is the run without sizes, in these units."""
    draw, sizes = np.random.default_rng(2), np.array([1e-3, 1.0, 1e4])
    with jax.enable_x64(True):
        scale = zo.scale_by_bfgs()
        plain = scaled = scale.init(jnp.zeros(3))
        step = jit(scale.update)
        for i in range(5):
            x, g = draw.normal(size=3), draw.normal(size=3)
            one, plain = step(g, plain, jnp.asarray(x), value=1.0)
            arrays = jnp.asarray(g / sizes), jnp.asarray(x * sizes)
            known = {"value": 1.0, "sizes": jnp.asarray(sizes)}
            other, scaled = step(arrays[0], scaled, arrays[1], **known)
            if i and plain.scale > 0:
                chex.assert_trees_all_close(other / sizes, np.asarray(one), rtol=1e-9)


@pytest.mark.slow
def test_bfgs_finds_the_inverse_of_a_quadratic():
    """After d steps with exact line searches: theorem 6.4 of Nocedal & Wright."""
    draw = np.random.default_rng(0)
    root = draw.normal(size=(4, 4))
    hessian = root @ root.T + np.eye(4)
    with jax.enable_x64(True):
        scale = zo.scale_by_bfgs()
        x = jnp.asarray(draw.normal(size=4))
        state = scale.init(x)
        for _ in range(5):
            gradient = hessian @ x
            update, state = scale.update(gradient, state, x, value=x @ gradient / 2)
            x = x - (update @ gradient) / (update @ hessian @ update) * update
        # The fifth update has seen the fourth step.
        whole = [_product(state, unit) for unit in np.eye(4)]
        chex.assert_trees_all_close(np.array(whole), np.linalg.inv(hessian), rtol=1e-6)


def test_differences_are_those_of_a_linear_function():
    slopes = jnp.array([3.0, -1.0, 0.5])
    estimator, params = zo.full_difference(), jnp.zeros(3)

    @jit
    def gradient():
        state = estimator.init(params)
        found = zo.estimators.estimate(estimator, slopes.dot, 0, params, state)
        return found[0][1]

    found = gradient()
    # A product of two numbers, and zeros, is rounded once.
    chex.assert_trees_all_close(found, slopes, rtol=1e-6)


@pytest.mark.parametrize("at", [slow(-1.0), slow(0.0), slow(1.0), 1 - 1e-9])
def test_no_point_leaves_the_box_and_no_two_are_the_same(at):
    with jax.enable_x64(True):
        lower, upper = jnp.full(4, -1.0), jnp.array([1.0, 1.0, jnp.inf, at])
        params = jnp.full(4, at)
        lower = lower.at[3].set(at)  # Equal bounds.
        estimator = zo.full_difference()

        @jit
        def asked(lower, upper, params):
            draw = Draw.once(jax.random.key(1))._replace(bounds=(lower, upper))
            points, _ = estimator.points(draw, params, estimator.init(params))
            return zo.estimators.candidates(points, params)

        found = np.asarray(asked(lower, upper, params))
    assert np.all((found >= np.asarray(lower)) & (found <= np.asarray(upper)))
    assert len(np.unique(found, axis=0)) == 4  # θ, and three coordinates that move.


@pytest.mark.slow
def test_one_point_at_a_time_takes_the_same_steps():
    calls = Counted(rosenbrock)
    serial = run(calls, num_steps=40, most=1000)
    together = run(
        lambda xs: [rosenbrock(x) for x in xs], num_steps=40, most=1000, batched=True
    )
    chex.assert_trees_all_equal(serial.params, together.params)
    assert serial.num_evaluations == len(calls.points) < together.num_evaluations
    assert together.num_evaluations == 3 * 40
    assert serial.history.evaluations.sum() == serial.num_evaluations
    assert int(serial.state.failures.evaluations) == 0


@pytest.mark.parametrize("most", [3, 4, 57])
def test_evaluations_never_exceed_the_budget(most):
    calls = Counted(rosenbrock)
    result = run(calls, most=most)
    assert most - 2 <= len(calls.points) == result.num_evaluations <= most
    assert result.stopped == "max_evaluations"


def test_a_journal_resumes_and_rebuilds(tmp_path):
    path = tmp_path / "run.jsonl"
    whole = run(num_steps=30, most=1000)
    run(num_steps=12, most=1000, journal=path)
    resumed = run(num_steps=30, most=1000, journal=path)
    assert resumed.num_evaluations == whole.num_evaluations
    assert resumed.best.number == whole.best.number
    chex.assert_trees_all_equal(resumed.params, whole.params)
    state = zo.replay(path, START, *METHOD)
    chex.assert_trees_all_equal(state.params, whole.params)


def test_ask_and_tell_take_one_value_if_it_is_enough():
    """Without a comparison: the points that are left say whether it was."""
    whole, one = (zo.ask_tell(START, *METHOD) for _ in range(2))
    alone = 0
    for step in range(1, 31):
        whole.tell([rosenbrock(x) for x in whole.ask()])
        points = one.ask()
        one.tell([rosenbrock(points[0])])
        if int(one.state.step) == step:
            alone += 1
            continue
        left = one.ask()
        np.testing.assert_array_equal(left, points[1:])
        one.tell([rosenbrock(x) for x in left])
    assert 0 < alone < 30
    chex.assert_trees_all_equal(whole.state, one.state)
    assert one.best.value == whole.best.value


@pytest.mark.parametrize(
    "lower, upper",
    [
        ([-2.0, -2.0], [0.5, 2.0]),  # The minimum is cut off.
        slow([-1.2, -np.inf], [np.inf, 1.0]),  # The start is on both bounds.
        slow([-2.0, 1.0], [2.0, 1.0]),  # Equal bounds.
        slow([-2, -2], [0, 2]),  # Integers.
    ],
)
def test_bounded_minima_are_those_of_scipy(lower, upper):
    calls = Counted(rosenbrock)
    result = run(calls, bounds=(np.array(lower), np.array(upper)), most=400)
    box = list(zip(lower, upper, strict=True))
    known = minimize(rosenbrock, START, method="L-BFGS-B", bounds=box, tol=1e-14)
    points = np.array(calls.points)
    assert np.all((points >= lower) & (points <= upper))
    assert result.best.value <= known.fun + 1e-6


def test_minimize_stays_within_bounds():
    result = zo.minimize(
        lambda x: jnp.sum((x - 3) ** 2),
        jnp.zeros(3),
        num_steps=30,
        bounds=(-1.0, jnp.array([1.0, 5.0, jnp.inf])),
        progress=False,
    )
    chex.assert_trees_all_close(result.params, jnp.array([1.0, 3.0, 3.0]), rtol=1e-3)
    assert bool(result.params[0] <= 1)


@pytest.mark.slow
def test_one_parameter():
    assert run(lambda x: (x[0] - 3) ** 2, np.zeros(1), 40).best.value < 1e-10


def test_differences_get_shorter_if_all_fail():
    def island(x):  # Nothing else has a value than a small ball.
        return float(x @ x) if x @ x < 1e-19 else np.nan

    state = run(island, np.zeros(2), num_steps=4).state
    # The distance is 1.5e-9 at first, and 1.9e-10 after three halvings.
    assert int(state.failures.skipped) == 3


def hashed(fun, share, seed, start):
    """The function without a value at a share of all points, and at the start."""

    def failing(x):
        digest = hashlib.sha256(x.tobytes() + bytes([seed])).digest()
        fails = int.from_bytes(digest[:8], "little") < share * 2**64
        at_start = share and seed % 2 == 0 and np.array_equal(x, start)
        return np.nan if fails or at_start else fun(x)

    return failing


def evaluations(fun, start, target, share, seed):
    """The evaluations until the target, of at most 200 (d + 1)."""
    calls = Counted(hashed(fun, share, seed, start))
    result = run(
        calls, start, 200 * (start.size + 1), key=seed, target=target * fun(start)
    )
    assert len(calls.points) == result.num_evaluations
    return len(calls.points) if result.stopped == "target" else np.inf


def stiff(x):
    return float(np.sum(np.logspace(0, 3, x.size) * (x - 1) ** 2))


def chained(x):
    """Trid, whose least value is -d (d + 4) (d - 1) / 6."""
    d = x.size
    neighbors = np.sum((x - 1) ** 2) - np.sum(x[1:] * x[:-1])
    return float(neighbors + d * (d + 4) * (d - 1) / 6)


def quartic(x):
    return float(np.sum((x - 1) ** 4 + 0.1 * (x - 1) ** 2))


@pytest.mark.parametrize(("d", "share"), [(2, 0.2), slow(5, 0.05)])
@pytest.mark.parametrize("fun", [slow(stiff), chained, slow(quartic)])
def test_failing_points_at_most_double_the_evaluations(fun, d, share):
    start = np.random.default_rng(d).uniform(-2, 2, d)
    clean = evaluations(fun, start, 1e-4, 0, 0)
    found = [evaluations(fun, start, 1e-4, share, seed) for seed in range(8)]
    assert np.isfinite(clean) and np.isfinite(found).all()
    # The start fails in half of the runs. A single run can be unlucky.
    assert np.median(found) <= (1.4 if share < 0.1 else 2) * clean


def test_a_gradient_is_completed_at_the_same_parameters():
    """A missing value costs an evaluation of θ and one at the other side of θ."""
    slopes, start = np.array([3.0, -1.0, 0.5, 2.0]), np.zeros(4)
    seen = []

    def fun(x):
        seen.append(x.copy())
        return np.nan if len(seen) in (1, 3) else float(x @ slopes)

    state = run(fun, start, num_steps=2, most=1000).state.estimator_state
    assert bool(state.complete) and int(state.tries) == 1 and len(seen) == 5 + 3
    first, second = np.array(seen[1:5]), np.array(seen[6:])
    # A second value along the first coordinate gives f(θ), and the missing one.
    chex.assert_trees_all_close(second, -first[:2], rtol=1e-6)
    with jax.enable_x64(True):
        found = np.asarray((state.values - state.base) / state.steps)
    chex.assert_trees_all_close(found, slopes, rtol=1e-6)


@pytest.mark.parametrize("fun", [stiff, slow(quartic)])
def test_noise_is_recognized(fun):
    """Values with noise of 1 % of the first one, which hides short differences."""
    start = np.random.default_rng(2).uniform(-2, 2, 2)
    ends, first = [], fun(start)
    for seed in range(5):
        draw, seen = np.random.default_rng(seed), []

        def noisy(x, draw=draw, seen=seen):
            seen.append(fun(x) / first)
            return fun(x) + 0.01 * first * draw.normal()

        state = run(noisy, start, 90, key=seed).state.estimator_state
        assert 0 < float(state.noise) < 0.1 * first
        assert float(state.smoothing) >= (float(state.noise) / first) ** 0.5 / 2
        ends.append(min(seen))
    assert np.median(ends) < 0.02


def test_values_that_do_not_change_have_no_noise():
    def stairs(x):
        return float(np.sum(np.round(10 * x) ** 2))

    result = run(stairs, np.full(2, 2.0), 100)
    assert float(result.state.estimator_state.noise) == 0
