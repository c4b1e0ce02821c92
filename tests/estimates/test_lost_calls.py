"""Python functions on executors: calls that hang, and errors that cannot be sent."""

import multiprocessing
import threading
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

import radazo_jax as zo
from tests.helpers import calls
from tests.helpers.short_runs import START, run, square
from tests.helpers.subprocesses import output_of
from tests.helpers.tables import slow


class Hangs:
    """A function of which one call hangs until the test ends."""

    def __init__(self, call):
        self.call, self.calls, self.stop = call, 0, threading.Event()

    def __call__(self, x):
        self.calls += 1
        if self.calls == self.call:
            self.stop.wait()
        return square(x)


@pytest.fixture
def hanging():
    made = []
    yield lambda call: made.append(Hangs(call)) or made[-1]
    for fun in made:
        fun.stop.set()


def test_a_thread_that_hangs_is_replaced(hanging):
    """No value of the steps after is lost."""
    result = run(hanging(1), executor=lambda: ThreadPoolExecutor(1), timeout=1.0)
    assert list(result.history.failed[1:]) == [0, 0]


def test_an_executor_that_hangs_ends_the_run_and_the_message_helps(hanging):
    """It belongs to the caller, and cannot be repaired from outside."""
    threads = ThreadPoolExecutor(1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            result = run(hanging(6), executor=threads, timeout=0.5)
        except zo.RunError as error:
            found.append(error)
            result = getattr(error, "result", None)
        finally:
            threads.shutdown(wait=False)
    assert "workers=" in " ".join(map(str, found))
    assert result.best.value <= square(START)


def test_an_executor_that_does_not_hang_loses_nothing(hanging):
    with ThreadPoolExecutor(1) as threads:
        result = run(hanging(0), executor=threads, timeout=60)
    assert list(result.history.failed) == [0, 0, 0]


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
        made.append(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
        return made[-1]

    made = []
    assert run(fun, executor=make).history.failed.sum() > 0
    assert len(made) == 1
