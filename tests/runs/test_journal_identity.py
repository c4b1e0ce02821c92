"""A journal is resumed by any function; another value of a point is a warning."""

import functools
import re
import threading
import warnings
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import METHOD, START, run, square, traced
from tests.helpers.tables import slow

LEVEL = 3.25


def crashing(x, calls):
    """A bug: an index that is out of range once the run has moved."""
    calls.append(x)
    return float(np.sum(x**2)) if len(calls) < 8 else calls[99]


def fixed(x):
    print("evaluated", end="")
    return float(np.sum(x**2))  # The bug is gone.


@pytest.mark.parametrize(
    ("on_failure", "failed"), [("raise", [0, 3]), ("drop", [0, 3, 5, 5])]
)
def test_a_run_that_died_of_a_bug_is_resumed_once_the_bug_is_fixed(
    on_failure, failed, tmp_path
):
    """Warnings are errors here: its values must equal the journal's."""
    path, calls = tmp_path / "run.jsonl", []
    options = {"on_failure": on_failure, "max_consecutive_failures": 2}
    with pytest.raises(zo.RunError, match="IndexError"):
        run(lambda x: crashing(x, calls), num_steps=9, journal=path, **options)
    assert zo.runs.History.from_journal(path).failed.tolist() == failed
    resumed = run(fixed, num_steps=9, journal=path, **options)
    assert resumed.history.failed.tolist() == failed + [0] * (9 - len(failed))
    # Steps in which values failed were taken without them.
    np.testing.assert_array_equal(
        zo.replay(path, START, *METHOD).params, resumed.params
    )


def scaled(x, width, *, height=1.0):
    return square(x) * np.sum(np.asarray(width, float)) * height


def by_partial(width):
    return functools.partial(scaled, width=width)


def by_default(width):
    def fun(x, width=width):
        return scaled(x, width)

    return fun


def by_keyword_default(width):
    def fun(x, *, width=width):
        return scaled(x, width)

    return fun


def by_closure(width):
    return lambda x: scaled(x, width)


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (by_default, 1.0, 3.0),
        *(slow(make, 1.0, 3.0) for make in (by_partial, by_keyword_default)),
        slow(by_partial, "1.5", "2.5"),
        (by_closure, np.ones(4), np.array([1.0, 1.0, 1.0, 2.0])),
    ],
)
def test_another_captured_value_is_a_warning(make, before, after, tmp_path):
    """It shows both values, and the run continues; an equal one is none."""
    path = tmp_path / "run.jsonl"
    run(make(before), num_steps=2, journal=path)
    again = make(before.copy() if isinstance(before, np.ndarray) else before)
    assert len(run(again, num_steps=3, journal=path).values) == 3
    (first, *_) = run(make(before), num_steps=3).values[2:]
    old, new = (np.sum(np.asarray(x, float)) for x in (before, after))
    with pytest.warns(UserWarning, match="at which fun now returns") as caught:
        assert len(run(make(after), num_steps=4, journal=path).values) == 4
    text = str(caught[0].message)
    assert f"{first:.9g}" in text and "\n" not in text
    returned = float(re.search(r"returns ([\d.]+)\. Unless", text)[1])
    assert returned == pytest.approx(first * new / old, rel=1e-6)


class Level:
    """A function with one value everywhere, so that any point shows its change."""

    def __init__(self, level):
        self.level = level

    def value(self, x):
        return self.level

    __call__ = value


def captured_function(level):
    """The number is in its closure, and its caller has none."""

    def value():
        return level

    return lambda x: value()


def captured_object(level):
    problem = Level(level)
    return lambda x: problem.value(x)


def captured_list(level):
    levels = [level]
    return lambda x: levels[0]


def of_module(x):
    return LEVEL


@pytest.mark.parametrize(
    "make",
    [
        Level,
        slow(lambda level: Level(level).value),
        slow(captured_object),
        captured_function,
        slow(captured_list),
        lambda level: of_module,
    ],
    ids=["attribute", "method", "object", "function", "list", "global"],
)
def test_another_value_of_a_journaled_point_is_a_warning(make, tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    run(make(LEVEL), num_steps=1, journal=path)
    monkeypatch.setitem(globals(), "LEVEL", 12.5)
    with pytest.warns(UserWarning, match=r"(?s)3\.25.*12\.5|12\.5.*3\.25"):
        run(make(LEVEL), num_steps=2, journal=path)


@pytest.mark.slow
def test_another_value_of_a_journaled_point_of_a_compiled_run_is_a_warning(tmp_path):
    class Traced(Level):
        def __call__(self, x):
            return self.level + 0.0 * jnp.sum(x)

    path = tmp_path / "run.jsonl"
    traced(Traced(LEVEL), num_steps=1, journal=path)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        traced(Traced(LEVEL), num_steps=2, journal=path)
        assert not found
        traced(Traced(12.5), num_steps=2, journal=path)
    (warning,) = found
    assert "3.25" in str(warning.message) and "12.5" in str(warning.message)


def test_a_worker_that_dies_at_a_journaled_point_ends_the_run(tmp_path):
    """The error has the result of the journal."""
    path = tmp_path / "run.jsonl"
    result = run(num_steps=2, journal=path)

    class Dies(ThreadPoolExecutor):
        def submit(self, *args):
            raise BrokenExecutor("a worker died")

    with Dies(1) as threads, pytest.raises(zo.RunError, match="evaluated again") as e:
        run(num_steps=3, journal=path, executor=threads)
    np.testing.assert_array_equal(e.value.result.values, result.values)
    assert e.value.result.best.value == result.best.value


class Simulator:
    """A function with what changes between calls, and changes no value."""

    def __init__(self):
        self.calls, self.known, self.lock = 0, {}, threading.Lock()

    def __call__(self, x):
        with self.lock:
            self.calls += 1
            return self.known.setdefault(x.tobytes(), square(x))


def with_a_cache():
    cached = functools.lru_cache(lambda x: square(np.frombuffer(x, np.float32)))
    return lambda x: cached(x.tobytes())


@pytest.mark.parametrize("make", [Simulator, with_a_cache])
@pytest.mark.parametrize("again", [True, False], ids=["same object", "another"])
def test_counters_caches_and_locks_do_not_prevent_resuming(make, again, tmp_path):
    path, fun = tmp_path / "run.jsonl", make()
    run(fun, num_steps=2, journal=path)
    parts = run(fun if again else make(), num_steps=4, journal=path)
    np.testing.assert_array_equal(parts.params, run(num_steps=4).params)
