"""Runs of several processes."""

import socket
import subprocess
import sys

import pytest

TWO_PROCESSES = """
import sys
import jax
import numpy as np

port, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
import radazo_jax as zo

zo.random.check_same_key(jax.random.key(7))
zo.estimate_gradient(zo.forward_difference(), key=3)
try:
    zo.train(
        lambda p: p @ p, np.ones(3, np.float32), zo.radazo(1e-2),
        zo.forward_difference(), num_steps=1, key=process, progress=False,
    )
except ValueError as error:
    print(error)
"""


# The methods of two processes draw other points, and their functions are noisy, but
# process 0 decides. Each prints what it has found.
TWO_METHODS = """
import sys
import jax
import jax.numpy as jnp
import numpy as np

port, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
import radazo_jax as zo
from radazo_jax.methods import Ask, End

def method(start):
    start.report(f"stage of {process}", "it begins")
    rng, values = np.random.default_rng(process), np.ones(1)
    while values.min() > 0.3:
        points = start.round(rng.normal(size=(3 + process, 2)))
        values = yield Ask(points, center=points.mean(0) + process)
    if process_fails:
        raise ValueError(f"of process {process}")
    return End(points[0], values[0], f"process {process} has ended")

draws = np.random.default_rng(process)

def noisy(x):
    return float(x @ x) + 0.01 * draws.standard_normal()

def found(result):
    given = result.params, result.best[1:], result.stopped, result.reason
    print(given, result.stages, result.state.values, result.history.value)

def traced(x):
    return jnp.sum((x - 1) ** 2)

for process_fails in (False, True):
    for options in (
        {"fun": noisy, "evaluator": zo.external()},
        {"fun": noisy, "evaluator": zo.external(), "max_evaluations": 7},
        {"fun": traced, "evaluator": zo.sharded("k")},
    ):
        mesh = jax.make_mesh((8,), ("k",))
        with jax.set_mesh(mesh):
            try:
                found(zo.minimize(params=np.zeros(2, np.float32), method=method,
                                  progress=False, **options))
            except zo.RunError as error:
                print(error)
                found(error.result)
with jax.set_mesh(mesh):
    found(zo.minimize(traced, np.zeros(2), evaluator=zo.sharded("k"), progress=False))
"""


# Gloo's threads write into the standard output of a process, also within a line.
ANSWERS = """
import sys
sys.stdout = open(sys.argv[3], "w")
"""


def of_two_processes(program, folder):
    """Returns what Python prints in each of two processes that run a program."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ANSWERS + program, port, str(i), folder / str(i)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for i, process in enumerate(processes):
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        yield (folder / str(i)).read_text()


@pytest.mark.slow
def test_the_method_of_process_0_decides_for_all(tmp_path):
    first, second = of_two_processes(TWO_METHODS, tmp_path)
    assert first == second
    assert "process 0 has ended" in first and "stage of 0" in first
    assert "raised ValueError: of process 0" in first
    assert "process 1" not in first and "stage of 1" not in first


@pytest.mark.slow
def test_processes_with_different_keys_are_told_apart(tmp_path):
    for output in of_two_processes(TWO_PROCESSES, tmp_path):
        assert output.endswith(
            "key must be the same in all processes; process 1 has [0, 1], process 0 "
            "has [0, 0].\n"
        )
