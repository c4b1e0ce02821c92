"""Runs of methods: their contract, budgets, executors, noise and failures."""

import itertools
import pickle
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax.methods import Ask, End
from tests.helpers.host_runs import (
    CENTER,
    METHODS,
    START,
    Function,
    assert_same,
    bowl,
    columns,
    noisy,
    quiet,
    random_search,
    ripples,
    run,
)
from tests.helpers.tables import slow

EACH = pytest.mark.parametrize("name", METHODS)


def ask_center(start):
    """A population of 5, with its mean as an estimate."""
    yield start.params[None].repeat(2, 0)
    for t in range(1000):
        points = start.round(CENTER + start.rng.normal(size=(5, 3)) / (1 + t))
        yield Ask(points, center=points.mean(0))


# --- The contract -----------------------------------------------------------------


def test_a_method_of_a_user_gets_values_and_ends_the_run():
    seen = []

    def method(start):
        for points in (start.params[None], start.params + np.eye(3)):
            seen.append((points, (yield points)))
        return End(start.params, 0.0, "enough was seen")

    result = run(method=method)
    assert (result.stopped, result.reason) == ("converged", "enough was seen")
    assert result.num_evaluations == 4 and result.history.evaluations.tolist() == [1, 3]
    for points, values in seen:
        np.testing.assert_array_equal(values, [bowl(x) for x in points])
    assert result.best.value == min(bowl(START + row) for row in [START, *np.eye(3)])
    found = result.evaluations
    np.testing.assert_array_equal(found.points, np.eye(4, 3, -1))
    np.testing.assert_array_equal(found.values, [bowl(x) for x in found.points])
    assert found.used.all() and not any(found.failures) and (found.seconds >= 0).all()


def test_failures_are_nan_for_a_method_and_are_counted():
    def method(start):
        values = yield np.arange(9.0).reshape(3, 3)
        assert np.isnan(values[1]) and np.isfinite(values[[0, 2]]).all()
        return End(start.params, 0.0, "")

    with pytest.warns(UserWarning, match="ZeroDivisionError.*The run continues"):
        result = run(lambda x: 1 / float(x[0] - 3), lambda start: failing_first(start))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = run(lambda x: 1 / (x[0] - 3), method)
    assert result.history.failed.tolist() == [1]
    assert result.evaluations.failures.tolist() == ["", "returned inf", ""]


def failing_first(start):
    yield start.params[None] + 3.0
    yield start.params[None]
    return End(start.params, 0.0, "")


@EACH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_points_are_rounded_and_within_bounds(name, dtype):
    bounds = np.full(3, -0.1), np.array([0.7, 0.3, 0.1])
    start, seen = np.zeros(3, jnp.dtype(dtype)), []
    options = {"bounds": bounds, "max_evaluations": 40}
    result = run(lambda x: seen.append(x) or bowl(x), METHODS[name], start, **options)
    points = np.stack([*seen, result.params])
    assert points.dtype == dtype and isinstance(result.params, np.ndarray)
    points = points.astype(float)
    assert np.all((points >= bounds[0]) & (points <= bounds[1]))
    assert result.best.value < bowl(START)


def test_trees_of_several_leaves_and_dtypes():
    start = {"a": np.zeros((2, 1)), "b": [np.zeros((), np.float32), np.zeros(0)]}

    def fun(p):
        assert p["a"].shape == (2, 1) and p["b"][1].shape == (0,)
        assert p["b"][0].dtype == np.float32
        return bowl(np.append(p["a"].ravel(), p["b"][0]))

    result = run(fun, start=start, bounds=({"a": -5, "b": [-9.0, -9.0]}, 9.0))
    np.testing.assert_allclose(result.params["a"].ravel(), CENTER[:2], atol=1e-5)
    np.testing.assert_allclose(result.params["b"][0], CENTER[2], atol=1e-3)
    # Numbers of Python are float64, whose digits are kept.
    dates, seen = {"t0": [2459123.44, 0.1]}, []
    run(lambda p: seen.append(p) or p["t0"][1], start=dates, max_evaluations=1)
    assert [float(x) for x in seen[0]["t0"]] == dates["t0"]


def yielding(points):
    def method(start):
        yield start.params[None]
        yield points

    return method


def raising(start):
    yield start.params[None]
    raise ValueError("two\nlines.")


def returning(start):
    yield start.params[None]


def at_first(start):
    raise KeyError("first")
    yield


@pytest.mark.parametrize(
    ("method", "message", "count"),
    [
        (yielding(np.zeros(3)), r"must yield points of shape \(n, 3\)", 1),
        (yielding(np.zeros((2, 4))), r"must yield .*got \(2, 4\)", 1),
        (yielding(np.zeros((0, 3))), "must yield .*with n of at least 1", 1),
        (yielding("abc"), "must yield .*got str", 1),
        (yielding(None), "must yield .*got NoneType", 1),
        (yielding(Ask(np.full((1, 3), np.nan))), "must yield finite points", 1),
        (yielding(np.full((1, 3), 10.0)), "must yield points within the bounds", 1),
        (yielding(np.full((1, 3), 0.1)), "must yield rounded points", 1),
        (raising, "raised ValueError: two lines. The error's", 1),
        (returning, "must return an End; got NoneType", 1),
        (at_first, "raised KeyError: 'first'", 0),
    ],
)
def test_a_method_that_breaks_its_contract_is_named_with_the_result_so_far(
    method, message, count, tmp_path
):
    start, path = START.astype(np.float32), tmp_path / "run.jsonl"
    for _ in range(2):  # From the journal, too.
        match = rf"^the method \S*{method.__name__} {message}"
        with pytest.raises(zo.RunError, match=match) as caught:
            run(bowl, method, start, bounds=(-9, 9), journal=path)
        assert "\n" not in str(caught.value)
        result = caught.value.result
        assert result.stopped == "failure" and result.num_evaluations == count
        assert result.best.value == (bowl(START) if count else np.inf)
    told = zo.ask_tell(start, method, bounds=(-9, 9))
    if count:
        told.tell([bowl(START)] * len(told.ask()))
    with pytest.raises(zo.RunError, match=method.__name__):
        told.ask()
    assert told.best[1:3] == result.best[1:3]


def test_what_is_no_generator_is_named():
    message = "^method must be .*a generator function; got .*returned int"
    with pytest.raises(TypeError, match=message):
        run(bowl, lambda start: 3)


def test_a_method_that_ends_at_once_returns_the_start():
    def method(start):
        return End(start.params, np.inf, "there is nothing to do")
        yield

    result = run(method=method)
    assert (result.stopped, result.num_evaluations) == ("converged", 0)
    np.testing.assert_array_equal(result.params, START)


# --- Budgets ----------------------------------------------------------------------


@EACH
def test_any_number_of_evaluations_is_met_exactly(name):
    whole = run(ripples, METHODS[name], max_evaluations=60).evaluations.values
    for most in (1, 2, 3, 5, 7, 11, 23, 59):
        fun = Function()
        result = run(fun, METHODS[name], max_evaluations=most)
        assert len(fun.calls) == result.num_evaluations == most
        assert result.stopped == "max_evaluations"
        np.testing.assert_array_equal(result.evaluations.values, whole[:most])
        assert result.best.value == whole[:most].min() == ripples(result.params)
        assert result.best.number == np.argmin(whole[:most])


@EACH
def test_a_target_ends_the_run_at_its_evaluation(name):
    values = run(ripples, METHODS[name], max_evaluations=60).evaluations.values
    for target in np.sort(values)[[0, 5, 20]]:
        fun = Function()
        result = run(fun, METHODS[name], target=target, max_evaluations=60)
        assert result.stopped == "target"
        count = 1 + np.argmax(values <= target)
        assert result.num_evaluations == count == len(fun.calls)


@pytest.mark.parametrize(
    ("name", "budget", "noise"),
    [
        ("untuned", {"max_evaluations": 47, "target": 0.5}, 0),
        ("repeating", {"max_evaluations": 47, "target": 0.5}, 0.1),
        ("untuned", {"patience": 3, "max_evaluations": 300}, 0.1),
        ("repeating", {"patience": 3, "max_evaluations": 300}, 0),
        ("untuned", {"max_consecutive_failures": 1, "max_evaluations": 200}, 0),
        ("repeating", {"max_consecutive_failures": 1, "max_evaluations": 200}, 0.1),
    ],
)
def test_a_step_does_not_depend_on_how_its_points_are_evaluated(name, budget, noise):
    """Neither do the reports of a callback, and the error of too many failures."""

    def taken(how):
        fun, told, counts = Function(noise, fails=True), [], []

        def callback(report):
            counts.append(len(report.values))
            values, points = report.values.tolist(), report.points.tolist()
            told.append(repr((report.step, values, points, report.best[1:3])))
            assert len(report.evaluations) == len(fun.calls)

        options = {"callback": callback, **budget}
        with ThreadPoolExecutor(1) as pool:
            if how == "threads":
                options["executor"] = pool
            try:
                if how == "batched":
                    many = lambda xs: [fun(x) for x in xs]  # noqa: E731
                    result = quiet(run, many, METHODS[name], batched=True, **options)
                else:
                    result = quiet(run, fun, METHODS[name], **options)
            except zo.RunError as error:
                result = error.result
                told.append(str(error))
        if result.stopped != "failure":
            assert sum(counts) == result.num_evaluations
        return [*told, columns(result.history), repr(result.best), result[6:9]]

    expected = taken("in turn")
    assert taken("threads") == expected
    if "target" not in budget:  # A batch has values after the target.
        assert taken("batched") == expected


def test_seconds_and_patience_end_a_run(monkeypatch):
    def flat(x):
        return 1.0 + (np.abs(x).max() > 0)

    found = run(flat, METHODS["evolution"], patience=4)
    assert (found.stopped, len(found.values)) == ("patience", 5)
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    found = run(ripples, random_search(40, 9), max_seconds=50)
    assert found.stopped == "max_seconds" and 1 <= found.num_evaluations < 40


def test_an_infinite_value_reaches_no_target():
    found = quiet(
        run, lambda x: -np.inf if x[0] > 0.45 else bowl(x), target=-1.0,
        max_evaluations=50,
    )  # fmt: skip
    assert found.stopped == "max_evaluations" and found.history.failed.sum() > 0


BAD = [
    ({"fun": 3}, "fun must be a function"),
    ({"evaluations": [1.0]}, "evaluations must be the evaluations of an earlier"),
    ({"start": [1.0, np.nan]}, "params must be finite; got nan at"),
    ({"maximize": True}, "minimize .*maximize"),
    ({"method": zo.methods.untuned(scale={"a": 1})}, ".*scale must be a number, or a"),
    ({"method": zo.methods.untuned(scale=np.ones(2))}, r".*64\[3\]; got float64\[2\]"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[x[1][:24] for x in BAD])
def test_bad_input_is_named_in_a_line(options, message):
    with (
        np.errstate(all="ignore"),
        pytest.raises((TypeError, ValueError, zo.RunError)) as caught,
    ):
        run(**options)
    assert re.search(message, str(caught.value)) and "\n" not in str(caught.value)


# --- Executors, and what functions return -----------------------------------------


class Pickling(ThreadPoolExecutor):
    """Threads that get what a process would get."""

    def submit(self, fun, *args):
        return super().submit(*pickle.loads(pickle.dumps((fun, *args))))


@EACH
def test_workers_change_nothing(name):
    """Nothing of a method is pickled."""
    expected = run(ripples, METHODS[name], max_evaluations=50)
    with Pickling(8) as pool:
        found = run(ripples, METHODS[name], max_evaluations=50, executor=pool)
    assert_same(found, expected)
    assert len(found.evaluations) == 50  # Nothing is evaluated ahead.


def test_a_function_of_jax_takes_the_steps_of_a_python_function():
    """Values are exact in both: sums of few multiples of 1/64."""

    def steps(x, xp):
        return xp.sum(xp.abs(xp.round((x - CENTER.astype(x.dtype)) * 64))) / 64

    method, start = METHODS["evolution"], np.zeros(3, np.float32)
    expected = run(lambda x: steps(x, np), method, start, max_evaluations=40)
    one = jax.jit(lambda x: steps(x, jnp))
    assert_same(run(one, method, start, max_evaluations=40), expected)
    many = jax.jit(jax.vmap(one))
    assert_same(run(many, method, start, max_evaluations=40, batched=True), expected)
    with pytest.raises(zo.RunError, match=r"pass jax\.jit\(fun\)"):
        run(lambda x: x.at[0].set(1.0).sum())


def test_values_in_float32_are_compared_as_such():
    """The method begins anew by the values that it has; steps count from 0."""
    fun = Function(dtype=np.float32)
    result = run(fun, max_evaluations=30)
    assert len(fun.calls) == result.num_evaluations == 30
    names = [x.point for x in result.evaluations.rows[:3]]
    assert names.count(START.tobytes()) == 1 and result.history.step[0] == 0
    assert np.all(np.diff(result.history.step) >= 0)
    # 0.1 in float32 is above 0.1.
    assert run(lambda x: 0.1, target=0.1).stopped == "target"


def test_a_failure_says_nothing_of_the_resolution():
    def method(start):
        seen.append(start.resolution)
        yield np.eye(3)
        return End(start.params, 0.0, "a step was taken")

    seen = []
    quiet(run, lambda x: np.nan if x[0] else np.float32(bowl(x)), method)
    assert seen[-1] == np.finfo(np.float32).eps
    with pytest.raises(zo.RunError, match="no finite value"):
        run(lambda x: np.nan, method)
    assert seen[-1] == np.finfo(np.float64).eps


@EACH
def test_a_point_is_evaluated_once_unless_a_method_asks_twice(name):
    fun = Function()
    run(fun, METHODS[name], max_evaluations=150)
    again = sum(fun.counts.values()) - len(fun.counts)
    # The start, and one point or two at which methods look for noise.
    assert again <= {"untuned": 2, "slopes": 1, "repeating": 300}.get(name, 0)


# --- Noise ------------------------------------------------------------------------


@pytest.mark.parametrize("method", [zo.methods.untuned(), ask_center])
@pytest.mark.parametrize("most", [12, 20, 47, 200])
def test_the_best_of_a_noisy_run_is_a_mean_within_the_budget(method, most):
    """It has the object of one of its values, and all values are reported."""
    fun, called, told = noisy(), [], []

    def counted(x):
        called.append((x.tobytes(), fun(x)))
        return called[-1][1], {"at": x.copy(), "value": called[-1][1]}

    def callback(report):
        told.extend(report.values)

    result = run(counted, method, max_evaluations=most, callback=callback)
    assert len(called) == result.num_evaluations == len(told) <= most
    assert len(called) == len(result.evaluations) == result.history.evaluations.sum()
    assert result.stopped == "max_evaluations"
    assert result.best.num_values >= 1 + (most > 20)
    at_best = [v for x, v in called if x == result.params.tobytes()]
    again = at_best[-result.best.num_values :]
    assert result.best.value == pytest.approx(np.mean(again), rel=1e-12)
    if result.best.number >= 0:
        np.testing.assert_array_equal(result.best.info["at"], result.params)
        assert result.best.info["value"] in at_best


def test_a_noisy_target_is_met_by_a_mean():
    result = run(noisy(), target=0.3)
    assert result.stopped == "target" and bowl(result.params) < 0.6
    lucky = run(noisy(), target=-0.09, max_evaluations=150)
    assert lucky.evaluations.values.min() < -0.09 and lucky.stopped == "max_evaluations"
    assert lucky.num_evaluations == 150


def test_a_lucky_value_does_not_ask_for_its_step_again():
    """The points of a step keep their first values if the target was not met."""
    got, values = [], iter([5.0, 6.0, *[1.0, -1.0, 2.0, -3.0], *[9.0] * 40])

    def method(start):
        yield start.params[None].repeat(2, 0)
        got.extend((yield np.arange(12.0).reshape(4, 3)))
        yield np.ones((1, 3))
        return End(start.params, 0.0, "two steps were taken")

    result = run(lambda x: next(values), method, target=-0.5)
    # Four further values at the best point are 2, -3, 9 and 9, whatever the target.
    assert result.history.evaluations[:3].tolist() == [2, 6, 2]
    assert got == [1.0, -1.0, 9.0, 9.0] and result.stopped == "converged"


def test_an_interrupted_noisy_run_has_compared_nothing():
    result = run(noisy(), callback=lambda report: report.step == 20)
    assert result.stopped == "callback" and result.best.num_values == 1


# --- Failures ---------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["journal", "evaluations"])
def test_ten_mistakes_in_a_row_end_a_run_which_continues_once_it_is_mended(
    memory, tmp_path
):
    """The first one in between is told at once."""
    count = [0]

    def wrong(x):
        count[0] += 1
        return ripples(x) if count[0] < 25 else undefined  # noqa: F821

    told, given = [], {"journal": tmp_path / "run.jsonl", "max_evaluations": 60}
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *more: told.append(
            (count[0], str(message))
        )
        with pytest.raises(zo.RunError, match="by mistakes at 10 points in a row") as e:
            run(wrong, **given)
    assert "NameError" in str(e.value) and count[0] == 34
    assert told[0][0] == 25 and "NameError: name 'undefined'" in told[0][1]
    if memory == "evaluations":
        given = {"evaluations": e.value.result.evaluations, "max_evaluations": 60}
    with pytest.warns(UserWarning, match="are evaluated again, once,"):
        found = run(ripples, **given)
    assert_same(found, run(ripples, max_evaluations=60))


@pytest.mark.parametrize("d", [3, 20])
def test_a_simulator_that_is_not_there_is_told_at_once(d):
    """Ten failures in a row end a run that has no value yet."""
    count, told = [0], []

    def missing(x):
        count[0] += 1
        raise FileNotFoundError("no_such_simulator")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *more: told.append(count[0])
        with pytest.raises(zo.RunError, match=r"at the first 10 points .*FileNot") as e:
            run(missing, start=np.zeros(d))
    assert told[0] == 1 and count[0] == 10
    assert e.value.result.num_evaluations == 10


def test_too_many_failures_end_the_run():
    def fails(x):
        if x.any():
            raise OSError("no license")
        return bowl(x)

    with pytest.raises(zo.RunError, match=r"OSError: no license") as caught:
        run(fails, max_consecutive_failures=3)
    # Three times d + 1 in a row, up to the end of a step.
    assert 12 <= caught.value.result.num_evaluations <= 12 + 20
    assert caught.value.result.best.value == bowl(START)


@pytest.mark.parametrize("fun", [lambda x: x @ x * np.nan, lambda x: np.inf])
@pytest.mark.parametrize(
    ("most", "message"),
    [
        (30, r"to use in any of the run's \d+ steps\. "),
        (3, r"to use in any of the run's 2 steps\. "),
        (300, r"to use in 10 steps in a row \(max_consecutive_failures\), up to "),
    ],
)
def test_a_function_without_a_value_ends_the_run(fun, most, message):
    with pytest.raises(zo.RunError, match="no finite value " + message):
        run(fun, zo.methods.evolution(population=37), max_evaluations=most)


def test_a_constant_is_warned_about_once():
    with pytest.warns(UserWarning, match="fun returned 1 at all") as caught:
        run(lambda x: 1.0, METHODS["evolution"], max_evaluations=400)
    assert len(caught) == 1 and "scale" in str(caught[0].message)
    assert "estimator" not in str(caught[0].message)


# --- What is shown ----------------------------------------------------------------


def test_reports_and_results_have_numbers_to_read():
    reports = []
    result = run(ripples, max_evaluations=30, callback=reports.append)
    assert [report.step for report in reports] == list(range(1, len(reports) + 1))
    for report in reports:
        values = [ripples(x) for x in report.points]
        np.testing.assert_array_equal(report.values, values)
    assert str(reports[-1].best) == str(result.best) and reports[-1].state is None
    counts = [len(report.evaluations) for report in reports]
    np.testing.assert_array_equal(counts, np.cumsum(result.history.evaluations))
    best = f"{result.best.value:.6g}"
    for text in (str(result), str(result.evaluations), str(result.best)):
        assert len(text) < 1000 and (best in text or text.startswith("Eval"))


def test_the_bar_counts_evaluations_and_tells_the_best(capsys):
    run(ripples, max_evaluations=40, progress=True)
    shown = capsys.readouterr().err
    [*_, last] = re.findall(r"(\d+)/(\d+) \[", shown)
    assert 20 < int(last[0]) <= int(last[1]) == 40
    assert all(f"{name}=" in shown for name in ("best", "evaluations/s", "stage"))


# --- Methods of other packages ----------------------------------------------------


def seeded_globally(start):
    """Draws as packages do that use the global generator of NumPy."""
    np.random.seed(3)
    best = End(start.params, np.inf, "twenty steps were taken")
    for _ in range(20):
        points = start.round(start.params + np.random.normal(size=(3, 3)))
        values = yield points
        i = int(np.argmin(values))
        if values[i] < best.value:
            best = best._replace(params=points[i], value=values[i])
    return best


def cma_of_hansen(start):
    cma = pytest.importorskip("cma")
    options = {"seed": 5, "verbose": -9}
    strategy = cma.CMAEvolutionStrategy(start.params, 0.5, options)
    while not strategy.stop():
        points = np.array(strategy.ask())
        strategy.tell(points, (yield points))
    found = strategy.result
    return End(found.xbest, found.fbest, "pycma has ended")


@pytest.mark.parametrize("method", [seeded_globally, slow(cma_of_hansen)])
def test_global_generators_are_the_methods_own(method, tmp_path):
    """The function's are its own, too."""

    def fun(x):
        np.random.normal(size=5)
        return ripples(x)

    path, options = tmp_path / "run.jsonl", {"max_evaluations": 50}
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    whole = run(ripples, method, journal=path, **options)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:15]))
    assert_same(run(fun, method, journal=path, **options), whole)


def test_a_method_that_asks_for_nothing_new_ends(monkeypatch):
    def method(start):
        while True:
            yield start.params[None]

    monkeypatch.setattr("radazo_jax._src.host.minimize._MOST_IDLE", 1000)
    with pytest.raises(zo.RunError, match="must ask for new points; got 1,000 steps"):
        run(lambda x: 1.0, method)


def test_parameters_that_change_nothing_stay_and_are_listed():
    start = {"a": np.array([0.0, 5.0]), "b": np.array(3.0)}
    result = zo.minimize(lambda p: (p["a"][0] - 1) ** 2, start, progress=False)
    assert result.unused == ("params['a'][1]", "params['b']")
    for found in (result.params, result.best.params):
        assert (found["a"][1], found["b"]) == (5, 3)


@pytest.mark.slow
def test_a_second_result_that_cannot_be_pickled_is_named():
    def fun(x):
        return float(x @ x), threading.Lock()

    with pytest.raises(zo.RunError, match="the second one must be picklable"):
        zo.minimize(fun, np.ones(2), workers=1, progress=False)
