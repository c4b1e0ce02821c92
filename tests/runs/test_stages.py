"""Stages of the default method: what follows what, and that runs are the same again."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.tables import slow

START = np.array([0.4, -1.3, 2.2])
CMA = "cma(step_size=0.3)"


def bowl(x):
    return float(np.sum(np.array([1.0, 4.0, 9.0]) * (x - 1.0) ** 2) + 1)


def stairs(x):
    return float(np.sum(np.floor(3 * np.abs(x - 1.0))))


def waves(x):
    return float(np.sum((x - 1) ** 2 + 5 * (1 - np.cos(2 * np.pi * (x - 1)))))


def kinked(x):
    return float(np.sum(np.abs(x - 1.0)))


def torn(x):
    """A bowl of which one coordinate is rounded, too."""
    return float(np.sum((x - 0.3) ** 2) + 0.2 * abs(round(10 * float(x[2])) - 7))


def noisy():
    draws = np.random.default_rng(0)
    return lambda x: bowl(x) + 0.1 * float(draws.standard_normal())


def run(fun, most=None, **options):
    options = {"progress": False, "max_evaluations": most} | options
    return zo.minimize_black_box(fun, START, **options)


def methods(result):
    return [stage.method for stage in result.stages]


@pytest.mark.parametrize(
    "fun, second, reason, below",
    [
        (stairs, CMA, "the function is one of steps", 1.0),
        (noisy(), CMA, "the value at one point changed", 1.5),
        slow(bowl, CMA, "gradients ended at a minimum", 1.0 + 1e-12),
        slow(kinked, "cma(step_size=0.03)", "gradients led nowhere", 1e-3),
        (torn, "cma(step_size=0.1)", "gradients led to a jump", 0.2),
    ],
)
def test_what_the_values_say_chooses_the_next_method(fun, second, reason, below):
    result = run(fun, 400)
    assert methods(result)[:2] == ["full_difference()", second]
    assert result.stages[1].reason == reason
    assert result.best.value < below
    assert result.num_evaluations <= 400


def test_a_named_method_has_no_stages():
    result = run(stairs, 100, estimator=zo.full_difference(), optimizer=zo.bfgs())
    assert result.stages == ()


def test_a_run_without_a_budget_ends_at_the_minimum():
    result = run(bowl)
    assert result.stopped == "converged"
    assert methods(result) == ["full_difference()"]
    chex.assert_trees_all_close(result.params, np.ones(3), atol=1e-6)


@pytest.mark.slow
def test_a_target_is_no_budget():
    assert run(bowl, target=-1.0).stopped == "converged"


@pytest.mark.parametrize(
    "fun, options, stages",
    [
        (bowl, {"restarts": 0, "max_evaluations": 400}, ["full_difference()"]),
        slow(bowl, {"restarts": 1}, ["full_difference()", CMA]),
        slow(
            stairs,
            {"restarts": 1},
            ["full_difference()", CMA, "cma(population_size=14, step_size=0.3)"],
        ),
    ],
)
def test_a_run_ends_after_its_restarts(fun, options, stages):
    result = run(fun, **options)
    assert result.stopped == "converged"
    assert methods(result) == stages


def banana(x):
    return float(np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2) + 1)


def test_a_tolerance_ends_the_first_step_that_moves_nothing_beyond_it(tmp_path):
    """Steps with several values have a gradient, at the start of the step after."""
    path, tolerance, found = tmp_path / "run.jsonl", 0.01, []

    def see(report):
        if len(report.values) > 1:
            found.append((report.values[0], report.state.search_state.before))

    result = run(banana, tolerance=tolerance, callback=see, journal=path)
    values, points = (np.array(x) for x in zip(*found, strict=True))
    highest = np.maximum(values[1:], banana(START))
    moves = np.diff(points, axis=0)
    level = abs(np.diff(values)) <= tolerance * highest
    near = abs(moves) <= tolerance * np.maximum(abs(points[1:]), 1)
    ends = level & near.all(1) & (moves != 0).any(1)
    assert np.flatnonzero(ends).tolist() == [len(ends) - 1]
    assert result.stopped == "converged"
    np.testing.assert_array_equal(result.params, points[-1])
    # The tolerance is in the journal, which another one does not continue.
    assert int(zo.replay(path, START).step) == len(result.values)
    with pytest.raises(
        ValueError, match=r"its estimator is .full_difference.tolerance=0\.01"
    ):
        run(banana, tolerance=0.1, journal=path)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tolerance": 1}, r"tolerance must be a number in \[0, 1\); got 1."),
        ({"tolerance": -0.1}, r"tolerance must be a number in \[0, 1\); got -0.1."),
        ({"tolerance": np.nan}, r"tolerance must be a number in \[0, 1\); got nan."),
        ({"tolerance": "low"}, r"tolerance must be a number in \[0, 1\); got 'low'"),
        ({"restarts": -1}, "restarts must be an int ≥ 0; got -1."),
        ({"restarts": 1.0}, "restarts must be an int ≥ 0; got 1.0"),
        ({"restarts": True}, "restarts must be an int ≥ 0; got True"),
        (
            {"tolerance": 0.1, "estimator": zo.full_difference()},
            "tolerance must be None unless the default method runs",
        ),
        (
            {"restarts": 1, "search": zo.search.backtracking()},
            "restarts must be None unless the default method runs",
        ),
    ],
)
def test_what_is_out_of_range_is_named_in_one_line(options, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        run(bowl, **options)
    assert "\n" not in str(error.value)


def test_stages_need_few_parameters():
    with pytest.raises(ValueError, match="with at most 100 parameters; got 2"):
        zo.minimize_black_box(bowl, np.zeros(101), restarts=2)


@pytest.mark.slow
def test_restarts_have_twice_the_population():
    result = run(waves, 4000, key=3)
    sizes = [stage.method for stage in result.stages if "population" in stage.method]
    assert sizes[:2] == [
        "cma(population_size=14, step_size=0.3)",
        "cma(population_size=28, step_size=0.3)",
    ]
    # Another minimum is lower than the one at which slopes ended.
    assert result.best.value < result.values[result.stages[1].step - 1] - 1


def test_a_journal_goes_on_in_any_stage_and_rebuilds_the_run(tmp_path):
    path = tmp_path / "run.jsonl"
    whole = run(stairs, 150)
    for steps in (1, 4, 26):
        part = run(stairs, 1000, num_steps=steps, journal=path)
    assert len(part.stages) == 2
    resumed = run(stairs, 150, journal=path)
    chex.assert_trees_all_equal(resumed.params, whole.params)
    assert resumed.best.number == whole.best.number
    assert resumed.stages == whole.stages
    state = zo.replay(path, START)
    chex.assert_trees_all_equal(state.params, whole.params)
    with pytest.raises(ValueError, match="journal .*its staged is True"):
        zo.replay(path, START, *zo.default_method(START))


@pytest.mark.parametrize("done", [slow(2), 26])
def test_a_state_goes_on_in_its_stage(done):
    whole = run(stairs, num_steps=30)
    first = run(stairs, num_steps=done)
    rest = run(stairs, num_steps=30 - done, state=first.state)
    chex.assert_trees_all_equal(rest.params, whole.params)
    assert int(rest.state.step) == 30


def traced(weights):
    """Stairs and a bowl whose least value is 1, by weights: they share programs."""
    of_stairs, of_bowl = jnp.asarray(weights)

    def fun(x):
        away = jnp.abs(x - 1)
        stairs, bowl = jnp.sum(jnp.floor(3 * away)), jnp.sum(away**2) + 1
        return of_stairs * stairs + of_bowl * bowl

    return fun


@pytest.mark.parametrize("chunk_size", [slow(1), slow(3), None])
def test_a_compiled_run_takes_the_same_steps(chunk_size):
    with jax.enable_x64(True):
        compiled = zo.minimize(
            traced([1.0, 0.0]),
            jnp.asarray(START),
            num_steps=27,
            chunk_size=chunk_size,
            progress=False,
        )
    called = run(stairs, num_steps=27)
    assert compiled.stages == called.stages
    # Of the value at the mean, which is no point, there is none in a called run.
    chex.assert_trees_all_close(
        compiled.state.params, called.state.params, rtol=1e-12, atol=1e-12
    )


def test_a_compiled_run_returns_the_best_end_of_a_stage():
    with jax.enable_x64(True):
        fun = traced([0.0, 1.0])
        result = zo.minimize(
            fun, jnp.asarray(START), max_evaluations=200, progress=False
        )
        value = float(fun(result.params))
    assert len(result.stages) == 2  # The strategy is still far from the minimum.
    assert value == pytest.approx(1.0, abs=1e-12)
    assert result.num_evaluations <= 200


def test_a_state_of_a_later_stage_knows_the_best_end_of_earlier_ones():
    fun, start = traced([0.0, 1.0]), START.astype(np.float32)

    def part(**options):
        return zo.minimize(fun, start, progress=False, **options)

    first = part(num_steps=12)
    rest = part(num_steps=3, state=first.state)
    whole = part(num_steps=15)
    chex.assert_trees_all_equal(rest.params, whole.params)
    chex.assert_trees_all_equal(rest.state, whole.state)
    assert fun(rest.params) < fun(rest.state.params)
    assert first.stages == whole.stages
    [stage] = rest.stages
    assert stage.step == whole.stages[1].step


def test_a_constant_function_is_warned_of_once_and_ends():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(lambda x: 3.0)
    assert [str(x.message)[:20] for x in caught] == ["fun returned 3 at al"]
    assert result.stopped == "converged"


@pytest.mark.parametrize("most", [None, 100])
def test_equal_bounds_end_a_run_at_its_start(most):
    result = run(bowl, most, bounds=(START, START))
    assert result.stopped == "converged" and result.num_evaluations <= 4
    np.testing.assert_array_equal(result.params, START)


@pytest.mark.slow
@pytest.mark.parametrize(
    "start, bounds, end",
    [
        ([0.0], None, [3.0]),
        ([0.0], (-np.inf, 2.0), [2.0]),
        ([0.0, 1.0], ([-np.inf, 1.0], [np.inf, 1.0]), [3.0, 1.0]),
        ([0.0, 1.0], (-np.inf, np.inf), [3.0, 3.0]),
    ],
)
def test_one_parameter_is_enough_and_bounds_may_be_infinite_or_equal(
    start, bounds, end
):
    def fun(x):
        return float(np.sum((x - 3) ** 2))

    result = zo.minimize_black_box(fun, np.array(start), bounds=bounds, progress=False)
    assert result.stopped == "converged"
    np.testing.assert_allclose(result.params, end, atol=1e-6)


@pytest.mark.slow
def test_bounds_scale_a_strategy():
    """The first points lie within a fifth of the widths."""
    lower, upper = np.array([-1.0, -1e3, -1e-3]), np.array([1.0, 1e3, 1e-3])
    points = []

    def fun(x):
        points.append(x.copy())
        return float(np.sum(np.floor(3 * x / upper)))

    zo.minimize_black_box(
        fun,
        np.zeros(3),
        bounds=(lower, upper),
        num_steps=4,
        progress=False,
    )
    spread = np.std(np.array(points[-8:]), axis=0) / (upper - lower)
    assert np.all((spread > 0.05) & (spread < 0.6))
