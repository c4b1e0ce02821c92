"""Files of journals: written by two processes, or cut by the loss of power."""

import warnings

import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.subprocesses import output_of

START = np.ones(3, np.float32)
METHOD = zo.zo_sgd(1e-2), zo.forward_difference(zo.rademacher(), 1)

# The first process starts the second while it writes, and waits for its end.
TWO = """
import subprocess, sys
import numpy as np
import radazo_jax as zo

code, path, which = sys.argv[1:]

def fun(x):
    return float(np.sum(x**2))

def start_second(*info):
    if not started:
        started.append(True)
        command = [sys.executable, "-c", code, code, path, "second"]
        print(subprocess.run(command, capture_output=True, text=True).stdout)

started = [] if which == "first" else [True]
try:
    result = zo.minimize_black_box(
        fun, np.ones(3, np.float32), zo.zo_sgd(1e-2),
        zo.forward_difference(zo.rademacher(), 1), num_steps=4, key=0, journal=path,
        callback=start_second, progress=False,
    )
    print(which, "ended", result.params.tolist())
except Exception as error:
    print(which, "refused", type(error).__name__, error)
"""


def run(path, steps=4):
    return zo.minimize_black_box(
        *(lambda x: float(np.sum(x**2)), START, *METHOD),
        num_steps=steps,
        key=0,
        journal=path,
        progress=False,
    )


@pytest.mark.slow
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="a journal has no lock")
def test_a_journal_that_another_process_writes_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    output = output_of(TWO, TWO, path, "first")
    lines = [line for line in output.splitlines() if line]
    assert "second refused" in lines[0] and str(path) in lines[0]
    assert lines[-1] == f"first ended {run(None).params.tolist()}"
    numbers = [line.split(b",")[0] for line in path.read_bytes().splitlines()]
    assert numbers[1:] == [b'{"step":%d' % i for i in range(4)]


TORN = b'{"step":2,"values":[2.9'


@pytest.mark.parametrize(
    "end",
    [
        TORN,
        TORN + bytes(512),
        pytest.param(
            bytes(4096),
            marks=pytest.mark.xfail(
                strict=True,
                raises=ValueError,
                reason="what follows whole lines must begin as a line does",
            ),
        ),
    ],
    ids=["torn line", "torn line and zeros", "zeros"],
)
def test_what_a_loss_of_power_left_is_cut(end, tmp_path):
    whole = run(tmp_path / "whole.jsonl")
    path = tmp_path / "parts.jsonl"
    run(path, 2)
    path.write_bytes(path.read_bytes() + end)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        parts = run(path)
    assert ["is cut" in str(warning.message) for warning in found] == [True]
    np.testing.assert_array_equal(parts.params, whole.params)
