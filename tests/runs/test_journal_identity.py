"""A journal is resumed by the function that wrote it, and by no other."""

import functools
import threading
import warnings
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.runs import identity
from tests.helpers.short_runs import run, square, traced, traced_square
from tests.helpers.tables import slow

LEVEL = 3.25


def scaled(x, width, *, height=1.0):
    return square(x) * np.sum(np.asarray(width, float)) * height


def by_partial(width):
    return functools.partial(scaled, width=width)


def by_partial_in_order(width):
    return functools.partial(lambda width, x: scaled(x, width), width)


def by_partial_of_a_partial(width):
    return functools.partial(by_partial(width), height=2.0)


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


NUMBERS = 1.0, 3.0
TEXTS = "1.5", "2.5"
ARRAYS = np.ones(4), np.array([1.0, 1.0, 1.0, 2.0])
of_each_capture = pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        *((make, *NUMBERS) for make in (by_partial, by_default, by_closure)),
        *(slow(by, *NUMBERS) for by in (by_partial_in_order, by_partial_of_a_partial)),
        slow(by_keyword_default, *NUMBERS),
        *(slow(by_partial, *values) for values in (TEXTS, ARRAYS)),
        *((by_closure, *values) for values in (TEXTS, ARRAYS)),
    ],
)


@of_each_capture
def test_another_captured_value_is_refused_by_name(make, before, after, tmp_path):
    path = tmp_path / "run.jsonl"
    run(make(before), num_steps=1, journal=path)
    with pytest.raises(ValueError, match=r"(?s)journal.*width"):
        run(make(after), num_steps=2, journal=path)


@of_each_capture
def test_an_equal_captured_value_resumes(make, before, after, tmp_path):
    path = tmp_path / "run.jsonl"
    run(make(before), num_steps=1, journal=path)
    again = make(before.copy() if isinstance(before, np.ndarray) else before)
    assert len(run(again, num_steps=2, journal=path).values) == 2


def by_closure_of_a_wrapper(width):
    def wrap(fun):
        return functools.wraps(fun)(lambda x: width * fun(x))

    return wrap(square)


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (by_closure_of_a_wrapper, 1.0, 3.0),
        (by_closure, (1.0, "2"), (1.0, "3")),
        (by_closure, "1" * 60 + "2", "1" * 60 + "3"),
        (by_closure, jnp.ones(3), jnp.full(3, 2.0)),
        (by_closure, None, 3.0),
    ],
    ids=["wrapper", "tuple", "long string", "JAX array", "None"],
)
def test_captured_values_of_other_kinds_are_recognized(make, before, after):
    one, again, other = (identity.captured(make(x)) for x in (before, before, after))
    assert one == again and one["width"] != other["width"]


def test_a_number_to_which_the_function_assigns_is_not_part_of_it():
    def make():
        calls = 0

        def fun(x):
            nonlocal calls
            calls += 1
            return square(x)

        return fun

    fun = make()
    before = identity.captured(fun)
    fun(np.ones(3))
    assert identity.captured(fun) == before == {}


def test_other_code_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    run(lambda x: square(x), num_steps=1, journal=path)
    with pytest.raises(ValueError, match=r"journal.*its fun is"):
        run(lambda x: 2.0 * square(x), num_steps=2, journal=path)


@pytest.mark.slow
def test_another_captured_value_of_a_traced_function_is_refused(tmp_path):
    def make(width):
        return lambda p: width * traced_square(p)

    path = tmp_path / "run.jsonl"
    traced(make(1.0), num_steps=1, journal=path)
    with pytest.raises(ValueError, match=r"(?s)journal.*width"):
        traced(make(3.0), num_steps=2, journal=path)


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
