"""Functions that JAX does not see, on executors: points that hang, kill or stop."""

import os
import signal
import sys
import threading
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ThreadPoolExecutor,
)

import chex
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers import workers
from tests.helpers.black_boxes import fun, reference, run, spawning


def on(kind):
    """The options of a run on processes."""
    if kind == "processes":
        return {"executor": spawning}
    pytest.importorskip("loky")
    return {"workers": 2}


def test_threads_give_the_same_run():
    with ThreadPoolExecutor(4) as threads:
        chex.assert_trees_all_equal(run(executor=threads).state, reference().state)


@pytest.mark.slow
def test_dask_gives_the_same_run_when_a_worker_is_killed():
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0"
        ) as cluster,
        distributed.Client(cluster) as client,
        client.get_executor() as executor,
    ):
        pids = list(client.run(os.getpid).values())

        def kill(report):
            if report.step == 4:
                os.kill(pids[0], signal.SIGKILL)

        chex.assert_trees_all_equal(
            run(executor=executor, callback=kill).state, reference().state
        )


def test_a_point_that_hangs_has_failed():
    stop = threading.Event()

    def hangs(x):
        if threading.current_thread().name.endswith("_0"):
            stop.wait()
        return fun(x)

    threads = ThreadPoolExecutor(4)
    try:
        result = run(hangs, executor=threads, timeout=1.0, steps=1)
    finally:
        stop.set()
        threads.shutdown()
    assert result.state.failures.evaluations == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "workers"])
def test_points_that_kill_their_worker_fail_alone(kind):
    result = run(workers.kill_some, steps=2, **on(kind))
    expected = run(lambda x: np.nan if workers.kills(x) else fun(x), steps=2)
    assert expected.state.failures.evaluations > 0
    chex.assert_trees_all_equal(result.state, expected.state)


def test_an_executor_may_break_before_any_point_returns():
    """Twice, by a point that is done before the others: alone, they return."""
    made = []

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

    chex.assert_trees_all_equal(
        run(executor=Fragile, steps=2).state, run(steps=2).state
    )
    assert len(made) == 3


def test_an_executor_that_never_works_is_not_made_again_and_again():
    with pytest.raises(zo.RunError, match='if __name__ == "__main__"'):
        run(workers.kill_all, executor=spawning)


def test_a_broken_executor_ends_the_run_with_its_state():
    with (
        spawning() as processes,
        pytest.raises(zo.RunError, match="executor is broken") as caught,
    ):
        run(workers.kill_some, executor=processes, steps=2)
    assert caught.value.state.step in (0, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda method, evaluator: zo.solver(np.sum, *method, evaluator=evaluator),
        lambda method, evaluator: zo.value_and_grad(
            np.sum, method[1], evaluator=evaluator
        ),
    ],
    ids=["solver", "value_and_grad"],
)
def test_functions_that_trace_refuse_it_in_one_line(call):
    method = zo.zo_sgd(1e-2), zo.forward_difference()
    with pytest.raises(
        TypeError, match="Pass fun and the evaluator to train"
    ) as caught:
        call(method, zo.external(workers=2))
    assert "external(workers=2)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_workers_need_loky(monkeypatch):
    monkeypatch.setitem(sys.modules, "loky", None)
    with pytest.raises(ImportError, match="workers must be None unless loky is"):
        run(workers=1)


def test_ctrl_c_keeps_the_steps_before():
    def interrupted(x):
        if len(calls) == 9:
            os.kill(os.getpid(), signal.SIGINT)
        calls.append(x)
        return fun(x)

    calls = []
    result = run(interrupted)
    assert result.stopped == "interrupted" and len(result.values) == 2
    chex.assert_trees_all_equal(result.state, run(steps=2).state)


class Data:
    """A function with data, which counts how often it is stored and read here."""

    stored = 0

    def __init__(self):
        self.center = workers.CENTER

    def __getstate__(self):
        Data.stored += 1
        return self.__dict__

    def __call__(self, x):
        # Each process reads the function once, and counts its calls in it.
        self.calls = getattr(self, "calls", 0) + 1
        return workers.distance(x), (os.getpid(), self.calls)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "workers"])
def test_processes_get_the_function_once(kind):
    seen, Data.stored = [], 0
    result = run(
        Data(), steps=4, callback=lambda r: seen.append(r.best.info), **on(kind)
    )
    assert Data.stored == 1
    assert max(calls for _, calls in seen) > 1
    chex.assert_trees_all_equal(result.state, run(steps=4).state)


@pytest.mark.slow
def test_dask_gets_the_function_once():
    distributed = pytest.importorskip("distributed")
    Data.stored = 0
    with (
        distributed.Client(
            n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0"
        ) as client,
        client.get_executor() as executor,
    ):
        result = run(Data(), executor=executor)
    assert Data.stored == 1
    chex.assert_trees_all_equal(result.state, reference().state)
