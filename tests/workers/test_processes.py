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
    zo.minimize(
        lambda p: p @ p, np.ones(3, np.float32), zo.radazo(1e-2),
        zo.forward_difference(), num_steps=1, key=process, progress=False,
    )
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_processes_with_different_keys_are_told_apart():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, port, str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for process in processes:
        output, errors = process.communicate(timeout=240)
        assert output.endswith(
            "key must be the same in all processes; process 1 has [0, 1], process 0 "
            "has [0, 0].\n"
        ), errors
