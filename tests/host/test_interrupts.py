"""Ends of runs from outside: callbacks, Ctrl-C, exits, full disks, kills."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import radazo_jax as zo
from radazo_jax.runs import Evaluations
from tests.helpers.host_runs import (
    METHODS,
    Function,
    assert_same,
    quiet,
    ripples,
    rows,
    run,
)
from tests.helpers.journals import full_disk
from tests.helpers.subprocesses import ROOT

MOST = 60


def whole(count=MOST):
    return run(ripples, max_evaluations=count)


def continued(error_or_result, journal):
    """The run to its end, from the result and from the file."""
    result = getattr(error_or_result, "result", error_or_result)
    given = {"evaluations": result.evaluations, "max_evaluations": MOST}
    assert_same(run(ripples, **given), whole())
    if journal.exists():
        given = {"journal": journal, "max_evaluations": MOST}
        assert_same(quiet(run, ripples, **given), whole())


# --- Callbacks --------------------------------------------------------------------


def stop(report):
    raise StopIteration


@pytest.mark.parametrize("callback", [stop, lambda report: True])
def test_a_callback_ends_the_run(callback, tmp_path):
    path = tmp_path / "run.jsonl"
    result = run(ripples, callback=callback, journal=path, max_evaluations=MOST)
    assert result.stopped == "callback" and len(result.values) == 1
    continued(result, path)


@pytest.mark.parametrize(
    "error",
    [OSError("the disk of the log is full"), KeyboardInterrupt(), SystemExit(3)],
)
def test_an_error_of_a_callback_has_the_result(error, tmp_path):
    def callback(report):
        counts.append(len(report.evaluations))
        if report.step == 12:
            raise error

    path, counts = tmp_path / "run.jsonl", []
    with pytest.raises(type(error)) as caught:
        run(ripples, callback=callback, journal=path, max_evaluations=MOST)
    assert caught.value is error and error.result.stopped == "failure"
    assert (
        len(error.result.evaluations)
        == counts[-1]
        == len(Evaluations.from_journal(path))
    )
    assert error.result.best.value == error.result.evaluations.values.min()
    continued(error, path)


# --- Signals ----------------------------------------------------------------------


class Pressed(Function):
    """Ctrl-C, so many times, in one of its calls."""

    def __init__(self, at, times):
        super().__init__()
        self.at, self.times = at, times

    def __call__(self, x):
        if len(self.calls) == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
        return super().__call__(x)


@pytest.mark.parametrize("name", ["untuned", "custom"])
def test_ctrl_c_ends_the_run_after_its_evaluation(name, tmp_path, capfd):
    """It says so at once, and the evaluation is kept."""
    path, fun = tmp_path / "run.jsonl", Pressed(22, 1)
    options = {"method": METHODS[name], "max_evaluations": MOST}
    result = run(fun, journal=path, **options)
    assert result.stopped == "interrupted"
    assert len(fun.calls) == len(result.evaluations) == result.num_evaluations == 23
    assert "Ctrl-C again aborts" in capfd.readouterr().err
    again = run(ripples, evaluations=result.evaluations, **options)
    assert_same(again, run(ripples, **options))
    assert_same(run(ripples, journal=path, **options), again)


def test_a_second_ctrl_c_has_the_result(tmp_path):
    path, fun = tmp_path / "run.jsonl", Pressed(22, 2)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(fun, journal=path, max_evaluations=MOST)
    assert signal.getsignal(signal.SIGINT) is before
    assert len(caught.value.result.evaluations) == 22
    assert rows(caught.value.result.evaluations) == rows(whole(22).evaluations)
    continued(caught.value, path)


def test_ctrl_c_keeps_what_runs_on_an_executor(tmp_path):
    def fun(x):
        value = pressed(x)
        time.sleep(0.4 if len(pressed.calls) in (9, 10, 11) else 0.0)
        return value

    path, pressed = tmp_path / "run.jsonl", Pressed(9, 1)
    method = METHODS["evolution"]
    with ThreadPoolExecutor(2) as pool:
        options = {"executor": pool, "journal": path, "max_evaluations": MOST}
        result = run(fun, method, **options)
        assert result.stopped == "interrupted"
        assert len(result.evaluations) == len(pressed.calls) < MOST
        found = run(ripples, method, **options)
    assert_same(found, run(ripples, method, max_evaluations=MOST))


def test_an_exit_in_the_function_is_a_failure_of_its_point():
    def exits(x):
        return (
            sys.exit("no license") if len(seen) == 9 else seen.append(x) or ripples(x)
        )

    seen = []
    with pytest.warns(UserWarning, match="fun failed at"):
        result = run(exits, METHODS["custom"], max_evaluations=40,
                     max_consecutive_failures=3000)  # fmt: skip
    assert set(result.evaluations.failures[9:]) == {"SystemExit: no license"}


# --- A full disk ------------------------------------------------------------------


@pytest.mark.parametrize("limit", [700, 2000, 4000])
def test_a_full_disk_ends_the_run_with_its_result(limit, tmp_path):
    """Files are limited: a line is cut, and taken back. Its value is in the result."""
    path, fun = tmp_path / "run.jsonl", Function()
    full = pytest.raises(zo.RunError, match="File too large")
    with full_disk(limit), full as caught:
        run(fun, journal=path, max_evaluations=MOST)
    result = caught.value.result
    assert 0 < len(result.evaluations) == len(fun.calls) < MOST
    assert len(Evaluations.from_journal(path)) == len(fun.calls) - 1
    continued(caught.value, path)


# --- Workers ----------------------------------------------------------------------

PARENT = """
import sys, numpy as np, radazo_jax as zo

def simulate(x, path=sys.argv[1]):
    import os, time
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.5)
    return float(np.sum((x - 1) ** 2))

zo.minimize(simulate, np.zeros(3), workers=2, max_evaluations=500, progress=False)
"""


def alive(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return state[0] != "Z"


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    """They do not keep the pipe of its output either."""
    pytest.importorskip("loky")
    path = tmp_path / "pids"
    command = [sys.executable, "-c", PARENT, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    while not path.exists() or len(path.read_text().split()) < 4:
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    pids = set(map(int, path.read_text().split()))
    try:
        process.communicate(timeout=60)  # It waits for the end of the pipe.
        process.wait()
        for _ in range(100):
            if not any(map(alive, pids)):
                break
            time.sleep(0.2)
        assert len(pids) == 2 and not any(map(alive, pids))
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
