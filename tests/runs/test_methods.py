"""Runs of methods: their contract, budgets, journals, executors, noise and ends."""

import itertools
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax.methods import Ask, End

CENTER = np.array([1.0, -2.0, 0.5])
START = np.zeros(3)


def bowl(x):
    return float(np.sum((np.asarray(x, float) - CENTER) ** 2))


def ripples(x):
    return bowl(x) + float(np.sum(np.sin(9 * np.asarray(x, float)) ** 2))


def noisy(seed=0):
    draws = np.random.default_rng(seed)
    return lambda x: bowl(x) + 0.1 * float(draws.standard_normal())


def run(fun=bowl, method=None, start=START, **options):
    return zo.minimize_black_box(fun, start, method, progress=False, **options)


def random_search(size=4, steps=5):
    """The best of normal points around the best, `size` a step."""

    def method(start):
        best, lowest = start.params, np.inf
        for _ in range(steps):
            moves = start.rng.normal(size=(size, len(best)))
            points = start.round(start.box.clip(best + moves))
            values = yield points
            i = int(np.nanargmin(values))
            if values[i] < lowest:
                best, lowest = points[i], values[i]
        return End(best, lowest, "five steps were taken")

    return method


def ask_center(start):
    """A population of 5, with its mean as an estimate."""
    values = yield start.params[None].repeat(2, 0)
    for t in range(1000):
        moves = start.rng.normal(size=(5, len(values[:1]) * len(start.params)))
        points = start.round(start.box.clip(CENTER + moves / (1 + t)))
        values = yield Ask(points, center=points.mean(0))


METHODS = {
    "untuned": zo.methods.untuned(),
    "slopes": zo.methods.slopes(),
    "many": zo.methods.many(),
    "evolution": zo.methods.evolution(),
    "custom": random_search(steps=30),
}
EACH = pytest.mark.parametrize("name", METHODS)


def assert_same(found, expected):
    for a, b in zip(
        jax.tree.leaves((found.params, found.best.params)),
        jax.tree.leaves((expected.params, expected.best.params)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(found.state.values, expected.state.values)
    assert found.best[1:3] == expected.best[1:3]
    assert found.best.num_values == expected.best.num_values
    assert found.num_evaluations == expected.num_evaluations
    assert (found.stopped, found.reason) == (expected.stopped, expected.reason)


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


def test_failures_are_nan_for_a_method_and_are_counted():
    def method(start):
        values = yield np.arange(9.0).reshape(3, 3)
        assert np.isnan(values[1]) and np.isfinite(values[[0, 2]]).all()
        return End(start.params, 0.0, "")

    result = run(lambda x: 1 / (x[0] - 3), method)
    assert result.state.failures.evaluations == result.history.failed.sum() == 1


BOUNDS = np.full(3, -0.1), np.array([0.7, 0.3, 0.1])


@EACH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_points_are_rounded_and_within_bounds(name, dtype):
    start, seen = np.zeros(3, jnp.dtype(dtype)), []
    result = run(
        lambda x: seen.append(x) or bowl(x),
        METHODS[name],
        start,
        bounds=BOUNDS,
        max_evaluations=40,
    )
    points = np.stack([*seen, result.params])
    assert points.dtype == dtype
    points = points.astype(float)
    assert np.all((points >= BOUNDS[0]) & (points <= BOUNDS[1]))
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
        (yielding(np.zeros((2, 4))), r"got \(2, 4\)", 1),
        (yielding(np.zeros((0, 3))), "with n of at least 1", 1),
        (yielding("abc"), "got str", 1),
        (yielding(None), "got NoneType", 1),
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
    path = tmp_path / "run.jsonl"
    start, options = START.astype(np.float32), {"bounds": (-9, 9), "journal": path}
    name = method.__name__
    for _ in range(2):  # From the journal, too.
        with pytest.raises(
            zo.RunError,
            match=rf"^the method \S*{name} {message}|"
            rf"^the method \S*{name} .*{message}",
        ) as caught:
            run(bowl, method, start, **options)
        assert "\n" not in str(caught.value)
        result = caught.value.result
        assert result.stopped == "failure" and result.num_evaluations == count
        assert result.best.value == (bowl(START) if count else np.inf)
    told = zo.ask_tell(start, method, bounds=(-9, 9))
    if count:
        told.tell([bowl(START)] * len(told.ask()))
    with pytest.raises(zo.RunError, match=name):
        told.ask()


def test_what_is_no_generator_is_named():
    with pytest.raises(TypeError, match=r"optimizer must be a generator function.*int"):
        run(method=lambda start: 3)


def test_a_method_that_ends_at_once_returns_the_start():
    def method(start):
        return End(start.params, np.inf, "there is nothing to do")
        yield

    result = run(method=method)
    assert (result.stopped, result.num_evaluations) == ("converged", 0)
    np.testing.assert_array_equal(result.params, START)


def test_a_mistake_in_the_function_ends_the_run_at_its_first_points():
    calls = []
    with pytest.raises(zo.RunError, match=r"^fun must return a number") as caught:
        run(lambda x: calls.append(x) or undefined)  # noqa: F821
    assert len(calls) <= 2 and isinstance(caught.value.__cause__, NameError)
    assert caught.value.result.num_evaluations == 0


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
        (3, r"to use in any of the run's 1 steps\. "),
        (300, r"to use in 10 steps in a row \(max_consecutive_failures\), up to "),
    ],
)
def test_a_function_without_a_value_ends_the_run(fun, most, message):
    with pytest.raises(zo.RunError, match="no finite value " + message):
        run(fun, zo.methods.evolution(population=37), max_evaluations=most)


# --- Budgets ----------------------------------------------------------------------


@EACH
def test_any_number_of_evaluations_is_met_exactly(name):
    whole = run(ripples, METHODS[name], max_evaluations=60)
    for most in (1, 2, 3, 5, 7, 11, 23, 59):
        calls = []
        result = run(
            lambda x, calls=calls: calls.append(x) or ripples(x),
            METHODS[name],
            max_evaluations=most,
        )
        assert len(calls) == result.num_evaluations == most
        assert result.stopped == "max_evaluations"
        np.testing.assert_array_equal(result.state.values, whole.state.values[:most])
        assert result.best.value == result.state.values.min()
        assert result.best.value == ripples(result.params)


@EACH
def test_a_target_ends_the_run_within_a_step(name):
    values = run(ripples, METHODS[name], max_evaluations=60).state.values
    for target in np.sort(values)[[0, 5, 20]]:
        result = run(ripples, METHODS[name], target=target, max_evaluations=60)
        assert result.stopped == "target"
        assert result.num_evaluations == 1 + np.argmax(values <= target)


def repeating(start):
    """Evaluates points twice in steps of seven, as a check for noise does."""
    best = start.params
    while True:
        points = start.round(best + start.rng.normal(size=(5, len(best))))
        asked = np.concatenate([points, points[:2]])
        best = asked[np.nanargmin(np.nan_to_num((yield asked), nan=np.inf))]


def each_time_another(seed):
    """A function of the point and of how often it was evaluated, if there is a seed."""
    counts = {}

    def fun(x):
        count = counts[x.tobytes()] = counts.get(x.tobytes(), -1) + 1
        noise = np.random.default_rng([count, *x.view(np.uint32)]).normal()
        return np.nan if bowl(x) % 1 < 0.3 else ripples(x) + seed * noise

    return fun


@pytest.mark.parametrize(
    ("budget", "name", "noise"),
    [
        ({"max_evaluations": 47, "target": 0.5}, "untuned", 0),
        ({"max_evaluations": 47, "target": 0.5}, repeating, 0.1),
        ({"num_steps": 9}, "untuned", 0.1),
        ({"num_steps": 9}, repeating, 0),
        ({"patience": 3, "max_evaluations": 300}, "untuned", 0.1),
        ({"patience": 3, "max_evaluations": 300}, repeating, 0),
        ({"max_consecutive_failures": 1, "max_evaluations": 200}, "untuned", 0),
        ({"max_consecutive_failures": 1, "max_evaluations": 200}, repeating, 0.1),
    ],
)
def test_steps_do_not_depend_on_the_parts_in_which_they_are_told(
    name, noise, budget, monkeypatch, tmp_path
):
    """A part ends after a second, of a clock that goes as the case says."""
    method, path, times = METHODS.get(name, name), tmp_path / "run.jsonl", [0.0]

    def columns(history):
        names = "step", "value", "value_std", "evaluations", "failed"
        return repr([getattr(history, name).tolist() for name in names])

    def taken(step, **options):
        def clock():
            times[0] += step
            return times[0]

        def callback(report):
            values, points = report.values.tolist(), report.points.tolist()
            told.append(repr((report.step, values, points, report.best[1:3])))

        monkeypatch.setattr("time.perf_counter", clock)
        told = []
        one = each_time_another(noise)
        options = {"batched": False, **budget, **options}

        def fun(points):
            return [one(x) for x in points] if options["batched"] else one(points)

        try:
            result = run(fun, method, callback=callback, **options)
        except zo.RunError as error:
            result = error.result
            told.append(str(error))
        told.append(columns(result.history))
        return repr((result.state[3:], result.best, result[6:9], told[-1])), told

    expected = taken(0.0)
    for step in (0.3, 0.6):
        assert taken(step) == expected
        assert taken(step, batched=True) == expected
        with ThreadPoolExecutor(1) as pool:
            assert taken(step, executor=pool) == expected
        path.unlink(missing_ok=True)
        assert taken(step, journal=path) == expected
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[: len(lines) // 2 + 1]))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*at which fun now returns")
            found, told = taken(0.1, journal=path)
        if not noise:
            assert found == expected[0] and len(told) < len(expected[1])
            assert columns(zo.runs.History.from_journal(path)) == told[-1]


def test_steps_seconds_and_patience_end_a_run(monkeypatch):
    assert len(run(num_steps=3).values) == 3
    found = run(lambda x: 1.0 + (np.abs(x).max() > 0), METHODS["evolution"], patience=4)
    assert (found.stopped, len(found.values)) == ("patience", 5)
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    assert run(ripples, METHODS["evolution"], max_seconds=50).stopped == "max_seconds"


@EACH
def test_a_state_continues(name):
    whole = run(ripples, METHODS[name], max_evaluations=50)
    for first in (1, 7, 30):
        part = run(ripples, METHODS[name], max_evaluations=first)
        rest = run(ripples, METHODS[name], max_evaluations=50 - first, state=part.state)
        np.testing.assert_array_equal(rest.state.values, whole.state.values)
        np.testing.assert_array_equal(rest.params, whole.params)


def test_a_state_of_a_run_with_a_budget_continues_without_one():
    """The run without a budget would have ended before."""
    part = run(max_evaluations=200).state
    result = run(state=part, target=-1.0, num_steps=5)
    same = run(state=part, callback=lambda report: len(report.state.values) >= 240)
    done = len(result.state.values)
    np.testing.assert_array_equal(same.state.values[:done], result.state.values)


def test_a_state_of_another_method_is_refused():
    state = run(method=random_search(), max_evaluations=20).state
    with pytest.raises(ValueError, match=r"state must be of the method .*method"):
        run(method=random_search(steps=2), state=state)
    with pytest.raises(TypeError, match="state must be the state of a run with a meth"):
        other = zo.ask_tell(START, zo.zo_sgd(1e-2), zo.forward_difference())
        run(state=other.state)


# --- Journals ---------------------------------------------------------------------


@EACH
def test_a_run_that_is_killed_anywhere_resumes_to_the_same_end(name, tmp_path):
    """The file ends after any number of its bytes; 12 of them, in each method."""
    path, method = tmp_path / "run.jsonl", METHODS[name]
    options = {"max_evaluations": 60, "journal": path}
    whole = run(ripples, method, **options)
    content = path.read_bytes()
    for size in np.linspace(0, len(content), 12, dtype=int):
        path.write_bytes(content[:size])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*its last line was not complete")
            assert_same(run(ripples, method, **options), whole)
    state = zo.replay(path, START, method)
    np.testing.assert_array_equal(state.values, whole.state.values)


def test_other_budgets_read_a_journal_in_part(tmp_path):
    path, whole = tmp_path / "run.jsonl", run(max_evaluations=200)
    run(journal=path, max_evaluations=60)
    content = path.read_bytes()
    for most in (1, 5, 6, 23, 59):
        result = run(journal=path, max_evaluations=most)
        assert result.num_evaluations == most
        np.testing.assert_array_equal(result.state.values, whole.state.values[:most])
        assert path.read_bytes() == content
    assert_same(run(journal=path, max_evaluations=200), whole)
    # Without a budget, the run ends at its first minimum, before the file does.
    alone = run(journal=path)
    assert_same(alone, run())
    assert alone.stopped == "converged" and alone.num_evaluations < 200


def test_a_run_without_a_budget_is_rebuilt_and_goes_on_with_one(tmp_path):
    path = tmp_path / "run.jsonl"
    first = run(ripples, journal=path)
    np.testing.assert_array_equal(zo.replay(path, START).values, first.state.values)
    again = run(ripples, journal=path, max_evaluations=300)
    assert again.num_evaluations == 300
    np.testing.assert_array_equal(
        again.state.values[: len(first.state.values)], first.state.values
    )


def test_another_value_of_a_journaled_point_is_a_warning(tmp_path):
    path = tmp_path / "run.jsonl"
    run(journal=path, max_evaluations=9)
    with pytest.warns(UserWarning, match="at which fun now returns"):
        run(lambda x: bowl(x) + 1, journal=path, max_evaluations=12)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"method": zo.methods.evolution()}, "method"),
        ({"tolerance": 0.1}, "method"),
        ({"key": 1}, "key"),
        ({"start": START + 1}, "start"),
        ({"start": START.astype(np.float32)}, "params"),
        ({"bounds": (-9, 9)}, "bounds"),
    ],
)
def test_a_journal_of_another_run_is_refused(change, name, tmp_path):
    path = tmp_path / "run.jsonl"
    run(journal=path, max_evaluations=9)
    with pytest.raises(ValueError, match=f"must be of this run; its {name} is"):
        run(journal=path, max_evaluations=9, **change)


# --- Executors, and functions that JAX traces -------------------------------------


class Pickling(ThreadPoolExecutor):
    """Threads that get what a process would get."""

    def submit(self, fun, *args):
        return super().submit(*pickle.loads(pickle.dumps((fun, *args))))


@EACH
@pytest.mark.parametrize("executor", [ThreadPoolExecutor, Pickling])
def test_workers_change_nothing(name, executor):
    """Nothing of a method is pickled."""
    expected = run(ripples, METHODS[name], max_evaluations=50)
    with executor(8) as pool:
        found = run(ripples, METHODS[name], max_evaluations=50, executor=pool)
    assert_same(found, expected)
    batched = run(
        lambda xs: [ripples(x) for x in xs],
        METHODS[name],
        max_evaluations=50,
        batched=True,
    )
    assert_same(batched, expected)


def test_a_value_does_not_depend_on_the_number_of_points_of_its_step():
    points = np.random.default_rng(0).normal(size=(65, 20)).astype(np.float32)
    points = points.astype(float)

    def fun(x):
        return jnp.sum(jnp.sin(x[:, None] * x[None, :]) @ jnp.cos(3 * x))

    def values(size):
        def method(start):
            for first in range(0, 65, size):
                yield points[first : first + size]
            return End(start.params, 0.0, "")

        result = zo.minimize(fun, jnp.zeros(20), method, progress=False)
        return result.state.values

    for size in (7, 64, 65):
        np.testing.assert_array_equal(values(size), values(1))


@pytest.mark.parametrize("x64", [False, True])
def test_functions_that_jax_traces_take_the_steps_of_python_functions(x64):
    """Values are exact in both: sums of few multiples of 1/64."""

    def steps(x, xp):
        return xp.sum(xp.abs(xp.round((x - CENTER.astype(x.dtype)) * 64))) / 64

    method = METHODS["evolution"]
    with jax.enable_x64(x64):
        start = jnp.zeros(3)
        traced = zo.minimize(
            lambda x: steps(x, jnp), start, method, max_evaluations=40, progress=False
        )
    called = run(
        lambda x: float(steps(x, np)), method, np.asarray(start), max_evaluations=40
    )
    np.testing.assert_array_equal(traced.state.values, called.state.values)
    np.testing.assert_array_equal(traced.params, called.params)
    assert traced.params.dtype == (np.float64 if x64 else np.float32)


def test_ask_and_tell_take_the_same_steps_also_in_parts():
    whole = run(ripples, METHODS["evolution"], max_evaluations=40)
    told = zo.ask_tell(START, METHODS["evolution"])
    rng = np.random.default_rng(0)
    while len(told.state.values) < 40:
        points = told.ask()[: rng.integers(1, 5)]
        told.tell([ripples(x) for x in points[: 40 - len(told.state.values)]])
    np.testing.assert_array_equal(told.state.values, whole.state.values)
    assert told.best.value == whole.best.value and not told.ended
    again = zo.ask_tell(START, METHODS["evolution"], state=told.state)
    np.testing.assert_array_equal(again.ask(), told.ask())


# --- Noise ------------------------------------------------------------------------


@pytest.mark.parametrize("method", [zo.methods.untuned(), ask_center])
@pytest.mark.parametrize("most", [12, 20, 47, 200])
def test_the_best_of_a_noisy_run_is_a_mean_within_the_budget(method, most, tmp_path):
    path, calls = tmp_path / "run.jsonl", []
    fun = noisy()

    def counted(x):
        calls.append((x.tobytes(), fun(x)))
        return calls[-1][1]

    result = run(counted, method, max_evaluations=most, journal=path)
    assert len(calls) == result.num_evaluations <= most
    assert result.stopped == "max_evaluations"
    assert result.best.num_values >= 1 + (most > 20)
    at_best = [v for x, v in calls if x == result.params.tobytes()]
    again = at_best[-result.best.num_values :]
    assert result.best.value == pytest.approx(np.mean(again), rel=1e-12)
    # The file has all of it: nothing but one point is evaluated again.
    before = len(calls)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*at which fun now returns")
        assert_same(run(counted, method, max_evaluations=most, journal=path), result)
    assert len(calls) == before + 1


def test_a_noisy_run_that_is_killed_keeps_what_was_compared(tmp_path):
    path, most = tmp_path / "run.jsonl", 60
    whole = run(noisy(), max_evaluations=most, journal=path)
    content = path.read_bytes().splitlines(keepends=True)
    for lines in range(3, len(content), 2):
        path.write_bytes(b"".join(content[:lines]))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*at which fun now returns")
            found = run(noisy(lines), max_evaluations=most, journal=path)
        kept = len([x for x in content[1:lines] if b'"again"' not in x])
        done = int(found.history.evaluations[:kept].sum())
        expected = whole.state.values[:done]
        np.testing.assert_array_equal(found.state.values[:done], expected)
        assert found.num_evaluations <= most and found.best.num_values > 1


def test_a_noisy_target_is_met_by_a_mean():
    result = run(noisy(), target=0.3)
    assert result.stopped == "target" and bowl(result.params) < 0.6
    lucky = run(noisy(), target=-0.09, max_evaluations=150)
    assert lucky.state.values.min() < -0.09 and lucky.stopped == "max_evaluations"
    assert lucky.num_evaluations <= 150


def test_an_interrupted_noisy_run_has_compared_nothing():
    result = run(noisy(), callback=lambda report: report.step == 20)
    assert result.stopped == "callback" and result.best.num_values == 1


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


@pytest.mark.parametrize("method", [seeded_globally, cma_of_hansen])
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
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    assert_same(run(fun, method, journal=path, **options), whole)


@pytest.mark.parametrize(
    ("start", "options", "error", "message"),
    [
        ([1.0, np.nan], {}, ValueError, r"^params must be finite; got nan at"),
        ([1.0, 2.0], {"maximize": True}, TypeError, r"return -fun\(x\)"),
        ([1.0, 2.0], {"scale": {"a": 1}}, ValueError, "scale must be a number, or a"),
        ([1.0, 2.0], {"scale": np.ones(3)}, ValueError, r"64\[2\]; got float64\[3\]"),
    ],
    ids=["start", "sign", "scale", "shape of scale"],
)
def test_mistakes_in_what_is_given_name_it(start, options, error, message):
    with np.errstate(all="ignore"), pytest.raises(error, match=message):
        zo.minimize_black_box(
            lambda x: float(np.sum(x)), np.array(start), progress=False, **options
        )
