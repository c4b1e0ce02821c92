"""Calls of Python functions: what they return, mistakes, failures, and executors.

One evaluator calls the function of a method's run and of an optimizer's.
"""

import copy
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers import calls
from tests.helpers.calls import Writer, square
from tests.helpers.doors import (
    EACH_DOOR,
    assert_same,
    by_method,
    by_optimizer,
    by_population,
    losing,
)
from tests.helpers.subprocesses import output_of
from tests.helpers.tables import slow


def spawning(workers=1):
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context)


def forking():
    context = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(1, mp_context=context)


def shut_down():
    threads = ThreadPoolExecutor(1)
    threads.shutdown()
    return threads


# --- What a function returns ------------------------------------------------------


UNREADABLE = {
    "three": lambda x: (1.0, x, "warn"),
    "ragged": lambda x: [[1.0], [2.0, 3.0]],
    "ragged in a pair": lambda x: ([[1.0], [2.0, 3.0]], x),
    "infinity": lambda x: np.inf,
    "text": lambda x: "text",
    "nothing": lambda x: None,
    "a dictionary": lambda x: {},
}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("run", [by_method, by_optimizer, by_population])
def test_a_value_that_cannot_be_read_is_a_failed_point(value, run):
    expected = run(losing(lambda x: np.nan))
    assert expected.history.failed.sum() > 0
    assert_same(run(losing(value)), expected)


@EACH_DOOR
def test_several_values_of_a_point_are_a_failure(run):
    assert_same(run(losing(lambda x: np.ones(2))), run(losing(lambda x: np.nan)))


def test_an_array_of_several_elements_is_described_by_its_shape():
    message = r"got an array of shape \(3,\) and dtype float64, not a number"
    with pytest.raises(zo.RunError, match=message):
        by_optimizer(lambda x: np.ones(3), on_failure="raise")
    message = r"got an array of shape \(3, 1\) and dtype float64 for 5 points"
    with pytest.raises(zo.RunError, match=message):
        by_optimizer(lambda x: np.ones((3, 1)), on_failure="raise", batched=True)


class Series:
    """An array of one element that cannot be indexed, as one of pandas."""

    shape = (1,)

    def __init__(self, value):
        self.item = lambda: value


def narrow(x):
    return np.float32(square(x))


@EACH_DOOR
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: np.full((1,), narrow(x)),
        lambda x: np.full((1, 1), narrow(x)),
        lambda x: jnp.full((1,), narrow(x)),
        lambda x: jnp.full((1, 1), narrow(x)),
        lambda x: Series(narrow(x)),
    ],
    ids=["NumPy", "NumPy 2D", "JAX", "JAX 2D", "another library"],
)
def test_an_array_of_one_element_is_a_number(fun, run):
    """Sums with `keepdims=True` return such arrays."""
    assert_same(run(fun), run(narrow))


def batch(xs):
    return [square(x) for x in xs]


@EACH_DOOR
@pytest.mark.parametrize(
    "fun",
    [
        batch,
        lambda xs: (batch(xs), list(xs)),
        lambda xs: (np.array(batch(xs)), None),
        lambda xs: (batch(xs), None),
        lambda xs: tuple(batch(xs)),
    ],
    ids=["list", "pair", "array and None", "list and None", "tuple"],
)
def test_values_of_a_batch_are_read(fun, run):
    assert_same(run(fun, batched=True), run())


def test_a_batch_that_cannot_be_read_has_failed_points():
    def sometimes(xs):
        batches.append(xs)
        return (batch(xs), None, "warn") if len(batches) == 2 else batch(xs)

    batches = []
    assert list(by_optimizer(sometimes, batched=True).history.failed) == [0, 5, 0]


X = np.linspace(-1, 1, 6, dtype=np.float32)
STARTS = [X, {"a": [X, X[:4].reshape(2, 2)], "b": {"c": X[:3]}}]


HOW = ["in turn", "threads", slow("processes"), "batch", "retries", "retries, batch"]


@EACH_DOOR
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("write", ["scale", "sort", "empty"])
def test_a_function_may_write_to_its_argument(write, how, run):
    """A pure function has the same points, and the same next tries."""
    writer, tries = Writer(write), itertools.count()
    fun = writer.batched if "batch" in how else writer

    def flaky(params):
        value = fun(params)
        if next(tries) % 3 == 0:
            raise OSError("no answer")
        return value

    for start in STARTS:
        given = copy.deepcopy(start)
        expected = run(lambda p: writer(copy.deepcopy(p)), start=start)
        with ThreadPoolExecutor(3) if how != "processes" else spawning(2) as pool:
            options = {"batched": "batch" in how, "retries": 2 * ("retries" in how)}
            if how in ("threads", "processes"):
                options["executor"] = pool
            call = flaky if "retries" in how else fun
            found = run(call, start=given, **options)
        assert_same(found, expected)
        assert str(given) == str(start)
        pure = writer(copy.deepcopy(found.best.params))
        assert found.best.value == pytest.approx(pure, rel=1e-6)


# --- Mistakes ---------------------------------------------------------------------


class Stopped(KeyError):
    """An error of the user's that is a mistake of Python's kind."""


async def _async(x):
    return 1.0


def _raising(error):
    def fun(x):
        raise error

    return fun


MISTAKES = {
    "a name": (lambda x: undefined(x), NameError),  # noqa: F821
    "an argument": (lambda: 0.0, TypeError),
    "an index": (lambda x: x[99], IndexError),
    "a module": (_raising(ModuleNotFoundError("no solver")), ImportError),
    "a subclass": (_raising(Stopped("mesh")), KeyError),
    "no return": (lambda x: None, TypeError),
    "a text": (lambda x: np.str_("1.0"), TypeError),
    "a complex number": (lambda x: np.complex128(1), TypeError),
    "complex numbers": (lambda x: np.ones(1, complex), TypeError),
    "several": (lambda x: np.ones(3), TypeError),
    "async": (_async, TypeError),
}
POOL = ThreadPoolExecutor(2)


@EACH_DOOR
@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [
        *((kind, {}, 1) for kind in MISTAKES),
        ("a name", {"retries": 2}, 3),
        ("a name", {"batched": True}, 1),
        ("a complex number", {"executor": POOL}, 5),
    ],
)
def test_a_mistake_ends_the_run_at_its_first_points(kind, options, most, run, tmp_path):
    """Nothing of it is kept: the same call begins once the function is corrected."""
    (fun, error), seen, path = MISTAKES[kind], [], tmp_path / "run.jsonl"

    def counted(*args):
        seen.append(args)
        return fun(*args)

    with pytest.raises(zo.RunError, match=r"^fun must return a number") as caught:
        run(counted, journal=path, **options)
    assert len(seen) <= most and isinstance(caught.value.__cause__, error)
    assert "continues the run" not in str(caught.value)
    assert caught.value.result.num_evaluations == 0
    assert_same(run(journal=path), run())


def test_a_mistake_in_a_process_is_shown_with_its_trace():
    pytest.importorskip("loky")
    with pytest.raises(zo.RunError, match="undefined") as caught:
        by_method(MISTAKES["a name"][0], workers=1)
    assert isinstance(caught.value.__cause__, NameError)
    assert "in <lambda>" in caught.value.__cause__.__notes__[0]


@pytest.mark.parametrize(
    "start", [ValueError("mesh"), FloatingPointError(), RuntimeError(), OSError(), None]
)
def test_a_start_that_fails_as_simulators_do_goes_on(start):
    def fun(x):
        seen.append(x)
        if len(seen) > 10:
            return square(x)
        if start is not None:
            raise start
        return np.nan

    seen = []
    assert by_optimizer(fun, num_steps=4).best.value < np.inf


@EACH_DOOR
def test_a_mistake_after_a_number_fails_its_point(run):
    assert_same(run(losing(lambda x: {}["mesh"])), run(losing(lambda x: np.nan)))


# --- Failures ---------------------------------------------------------------------


@EACH_DOOR
@pytest.mark.parametrize("make", [None, ThreadPoolExecutor, slow(spawning)])
@pytest.mark.parametrize("fun", [calls.exits, calls.stops, calls.raises])
def test_a_point_that_ends_its_worker_alone_has_failed(fun, make, run):
    """`sys.exit` in a function is a failure in turn, too."""
    if make is None:
        if fun is calls.stops:
            with pytest.raises(calls.Stop):
                run(fun)
            return
        found = run(fun)
    else:
        with make(1) as executor:
            found = run(fun, executor=executor)
    assert_same(found, run(losing(lambda x: np.nan)))


@EACH_DOOR
def test_retries_evaluate_the_same_point_again(run):
    failed = {}

    def flaky(x):
        if failed.setdefault(x.tobytes(), 0) < 2:
            failed[x.tobytes()] += 1
            raise OSError("no answer")
        return square(x)

    found = run(flaky, retries=2)
    assert_same(found, run())
    assert sum(failed.values()) == 2 * len(failed) > 20


def test_raise_ends_the_run_at_the_first_failure():
    def broken(x):
        seen.append(x)
        return "text" if len(seen) == 7 else square(x)

    for run, count in ((by_method, 7), (by_optimizer, 10)):  # The step is complete.
        seen = []
        with pytest.raises(zo.RunError, match="returned 'text' of type str"):
            run(broken, on_failure="raise")
        assert len(seen) == count


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (by_method, {"max_evaluations": 30, "max_consecutive_failures": 99}),
        (by_optimizer, {"num_steps": 6}),
    ],
)
def test_a_function_that_fails_at_most_points_is_warned_about(run, options):
    def fails(x):
        if next(count) % 6 >= 2:
            raise OSError("no license")
        return square(x)

    count = itertools.count()
    with pytest.warns(UserWarning, match="fun failed at 20 of 30 points.*OSError"):
        run(fails, **options)


# --- Executors --------------------------------------------------------------------


@EACH_DOOR
def test_threads_give_the_same_run(run):
    with ThreadPoolExecutor(4) as threads:
        assert_same(run(executor=threads), run())


@EACH_DOOR
def test_a_point_that_hangs_has_failed_and_its_later_value_is_dropped(run):
    """Its thread is replaced, so that all other points have their values."""

    def hangs(x):
        if next(count) == 3:
            late.wait(20)
        return square(x)

    def callback(report):
        if report.step == 2:
            late.set()
            time.sleep(0.3)

    count, late = itertools.count(), threading.Event()
    make = functools.partial(ThreadPoolExecutor, 1)
    found = run(hangs, executor=make, timeout=0.5, callback=callback)
    seen = itertools.count()
    expected = run(lambda x: np.nan if next(seen) == 3 else square(x))
    assert_same(found, expected)
    if run is by_method:
        failures = found.evaluations.failures
        assert failures[3] == "no result within 0.5 s"
        assert not any(np.delete(failures, 3))


def test_an_executor_that_hangs_ends_the_run_and_the_message_helps():
    """It belongs to the caller, and cannot be repaired from outside."""

    def hangs(x):
        if next(count) == 5:
            late.wait()
        return square(x)

    count, late, threads = itertools.count(), threading.Event(), ThreadPoolExecutor(1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            result = by_optimizer(hangs, executor=threads, timeout=0.5)
        except zo.RunError as error:
            found.append(error)
            result = getattr(error, "result", None)
        finally:
            late.set()
            threads.shutdown(wait=False)
    assert "workers=" in " ".join(map(str, found))
    assert result.best.value <= square(np.ones(3))


def test_a_thread_that_hangs_leaves_the_others_to_the_run():
    """The caller has four threads. Nothing is lost if none hangs."""

    def hangs(x):
        if threading.current_thread().name.endswith("_0"):
            late.wait()
        return square(x)

    late, threads = threading.Event(), ThreadPoolExecutor(4)
    try:
        result = by_optimizer(hangs, executor=threads, timeout=1.0, num_steps=1)
    finally:
        late.set()
        threads.shutdown()
    assert result.state.failures.evaluations == 1
    with ThreadPoolExecutor(1) as threads:
        assert_same(by_optimizer(executor=threads, timeout=60), by_optimizer())


# The program ends by itself only if nothing that hangs is waited for.
PROGRAM = """
import functools, multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import radazo_jax as zo
from tests.helpers import calls
from tests.helpers.short_runs import run

kind, folder = sys.argv[1:]
spawn = multiprocessing.get_context("spawn")
options = {
    "threads": {"executor": lambda: ThreadPoolExecutor(1)},
    "processes": {"executor": lambda: ProcessPoolExecutor(1, mp_context=spawn)},
    "workers": {"workers": 1},
}[kind]
try:
    result = run(functools.partial(calls.hangs, folder=folder), timeout=10, **options)
    print("failed", result.history.failed.astype(int).tolist(), flush=True)
except zo.RunError as error:
    print("RunError", error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes", "workers"])
def test_a_program_ends_although_a_call_hangs(kind, tmp_path):
    output = output_of(PROGRAM, kind, tmp_path, timeout=300)
    assert output.splitlines()[-1].endswith(", 0, 0]")


@pytest.mark.parametrize(
    "fun", [calls.raises_unreadable, slow(calls.raises_unsendable)]
)
def test_an_error_that_cannot_be_sent_breaks_no_executor(fun):
    def make():
        made.append(spawning())
        return made[-1]

    made = []
    assert_same(by_optimizer(fun, executor=make), by_optimizer(calls.raises))
    assert len(made) == 1


def test_an_executor_may_break_before_any_point_returns():
    """Twice, by a point that is done before the others: alone, they return."""

    class Fragile(Executor):
        def __init__(self):
            made.append(self)

        def submit(self, fn, /, *args):
            future = Future()
            if len(made) <= 2:
                future.set_exception(BrokenExecutor("a worker died"))
            else:
                future.set_result(fn(*args))
            return future

    made = []
    assert_same(by_optimizer(executor=Fragile), by_optimizer())
    assert len(made) == 3


def test_an_executor_that_never_works_is_not_made_again_and_again():
    with pytest.raises(zo.RunError, match='if __name__ == "__main__"'):
        by_optimizer(calls.kill_all, executor=spawning)


def test_a_broken_executor_ends_the_run_with_its_state():
    """Its script is not blamed if it worked before."""

    class Dies(Executor):
        calls = 0

        def submit(self, fn, /, *args):
            self.calls += 1
            if self.calls > 10:
                raise BrokenExecutor("a worker died")
            future = Future()
            future.set_result(fn(*args))
            return future

    with pytest.raises(zo.RunError, match=r"executor is broken.*a worker died") as e:
        by_optimizer(executor=Dies())
    assert e.value.state.step == 2 and "__main__" not in str(e.value)


def on(kind):
    """The options of a run on processes."""
    if kind == "processes":
        return {"executor": functools.partial(spawning, 2)}
    pytest.importorskip("loky")
    return {"workers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "workers"])
def test_points_that_kill_their_worker_fail_alone(kind):
    expected = by_optimizer(losing(lambda x: np.nan), num_steps=2)
    assert_same(by_optimizer(calls.kills, num_steps=2, **on(kind)), expected)


class Data:
    """A function with data, which counts how often it is stored and read here."""

    stored = 0

    def __getstate__(self):
        Data.stored += 1
        return self.__dict__

    def __call__(self, x):
        # Each process reads the function once, and counts its calls in it.
        self.calls = getattr(self, "calls", 0) + 1
        return square(x), (os.getpid(), self.calls)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "workers"])
def test_processes_get_the_function_once(kind):
    seen, Data.stored = [], 0
    result = by_optimizer(
        Data(), callback=lambda report: seen.append(report.best.info), **on(kind)
    )
    assert Data.stored == 1
    assert max(count for _, count in seen) > 1
    assert_same(result, by_optimizer())


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False])
def test_dask_gives_the_same_run(is_killed):
    """Its workers get the function once; one of them is killed in the third step."""
    distributed = pytest.importorskip("distributed")
    options = {"threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    Data.stored = 0
    with (
        distributed.LocalCluster(n_workers=2, **options) as cluster,
        distributed.Client(cluster) as client,
        client.get_executor() as executor,
    ):
        pids = list(client.run(os.getpid).values())

        def kill(report):
            if is_killed and report.step == 3:
                os.kill(pids[0], signal.SIGKILL)

        fun = square if is_killed else Data()
        found = by_optimizer(fun, executor=executor, callback=kill, num_steps=6)
    assert_same(found, by_optimizer(num_steps=6))
    assert Data.stored == (not is_killed)


# --- Arguments --------------------------------------------------------------------


BAD = [
    ({"executor": 3}, "executor must be a concurrent.futures"),
    ({"executor": shut_down()}, "executor must be running"),
    ({"executor": forking()}, r'get_context\("spawn"\)'),
    ({"timeout": 1.0}, r"timeout must be None if .*ThreadPoolExecutor\(1\)"),
    ({"on_failure": "skip"}, "on_failure must be 'drop'"),
    ({"max_consecutive_failures": 0}, "max_consecutive_failures must be an int ≥ 1"),
    ({"retries": -1}, "retries must be an int ≥ 0"),
    ({"workers": 0}, "workers must be an int ≥ 1"),
    ({"workers": 1, "executor": map}, "workers must be None if"),
    ({"batched": 1}, "batched must be True or False"),
    ({"fun": 3}, "must be a function"),
    ({"max_evaluations": 0}, "max_evaluations must be an int ≥ 1; got 0"),
    ({"max_evaluations": np.nan}, "max_evaluations must be an int ≥ 1; got nan"),
    ({"max_seconds": 0.0}, "max_seconds must be a finite number > 0; got 0.0"),
    ({"target": np.nan}, "target must be a finite number; got nan"),
    ({"patience": 0}, "patience must be an int ≥ 1; got 0"),
    ({"patience": 1.5}, "patience must be an int ≥ 1; got 1.5"),
    ({"bounds": (1.5, 2)}, "params must lie within bounds"),
    ({"bounds": (2, -2)}, "lower 2.0 and upper -2.0 at params"),
    ({"bounds": (np.nan, 2)}, "got lower nan and upper"),
    ({"bounds": (-1, np.array([1, 1, -3.0]))}, r"-3.0.*\[2\]"),
    ({"bounds": 3.0}, "bounds must be a tuple"),
    ({"bounds": (-1, {"a": 2})}, "bounds must be a tuple"),
]


@EACH_DOOR
@pytest.mark.parametrize(("options", "message"), BAD, ids=[x[1][:24] for x in BAD])
def test_bad_input_is_named_in_a_line(options, message, run):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        run(**options)
    assert "\n" not in str(caught.value)


def test_a_function_that_cannot_be_pickled_is_referred_to_threads():
    with spawning() as processes, pytest.raises(TypeError, match="ThreadPoolExecutor"):
        by_optimizer(lambda x: 0.0, executor=processes)


def test_workers_need_loky(monkeypatch):
    monkeypatch.setitem(sys.modules, "loky", None)
    with pytest.raises(ImportError, match="workers must be None unless loky is"):
        by_method(workers=1)


@pytest.mark.parametrize("name", ["solver", "value_and_grad"])
def test_functions_that_trace_refuse_it_in_one_line(name):
    method = zo.zo_sgd(1e-2), zo.forward_difference()
    given = method if name == "solver" else method[1:]
    message = "Pass fun and the evaluator to train"
    with pytest.raises(TypeError, match=message) as caught:
        getattr(zo, name)(np.sum, *given, evaluator=zo.external(workers=2))
    assert "external(workers=2)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ctrl_c_keeps_the_steps_before():
    def interrupted(x):
        if len(seen) == 11:
            os.kill(os.getpid(), signal.SIGINT)
        seen.append(x)
        return square(x)

    seen = []
    result = by_optimizer(interrupted)
    assert result.stopped == "interrupted" and len(result.values) == 2
    assert_same(result, by_optimizer(num_steps=2))
