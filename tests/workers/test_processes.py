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
    zo.minimize(np.sum, np.ones(3), progress=False)
except ValueError as error:
    print(error)
try:
    zo.train(
        lambda p: p @ p, np.ones(3, np.float32), zo.radazo(1e-2),
        zo.forward_difference(), num_steps=1, key=process, progress=False,
    )
except ValueError as error:
    print(error)
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
def test_methods_and_different_keys_are_refused_in_several_processes(tmp_path):
    for output in of_two_processes(TWO_PROCESSES, tmp_path):
        assert output.startswith("minimize must run in one process; got a run of 2 ")
        assert output.endswith(
            "key must be the same in all processes; process 1 has [0, 1], process 0 "
            "has [0, 0].\n"
        )
