"""The only worker of a run gives no answer."""

import pytest

from tests.helpers.subprocesses import output_of

pytest.importorskip("distributed")
pytestmark = pytest.mark.slow

# The worker is a process. It is stopped, as a machine that is suspended, or it hangs.
PROGRAM = """
import os, signal, sys, time
import distributed
import jax.numpy as jnp
import numpy as np
import radazo_jax as zo

def make_fun():
    while kind == "make_fun":
        time.sleep(60)
    return lambda p: jnp.sum(p**2)

def callback(report):
    steps.append(report)
    if kind == "params" and len(steps) == 3:
        os.kill(pid, signal.SIGSTOP)

def run(timeout):
    return zo.distribute(
        make_fun, np.ones(3, np.float32), zo.zo_sgd(1e-2),
        zo.forward_difference(zo.rademacher(), 1), client=client, num_steps=3, key=0,
        timeout=timeout, callback=callback, progress=False,
    )

cluster = distributed.LocalCluster(
    n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=100
)
client = distributed.Client(cluster)
(pid,) = client.run(os.getpid).values()
# The worker compiles its programs, however long a busy machine takes.
kind, steps = "none", []
result = run(timeout=300)
print(len(steps), "steps, params", result.params is not None, flush=True)
kind, steps = sys.argv[1], []
start = time.monotonic()
try:
    run(timeout=20)
except (RuntimeError, ValueError) as error:
    seconds = time.monotonic() - start
    has_result = getattr(error, "result", None) is not None
    print(error)
    print(
        len(steps), "steps,", type(error).__name__, "with" if has_result else "without",
        "result, in time" if seconds < 40 else f"result, after {seconds} s", flush=True,
    )
# Dask would wait for the worker.
os._exit(0)
"""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("params", "3 steps, RunError with result, in time"),
        ("make_fun", "0 steps, ValueError without result, in time"),
    ],
)
def test_the_wait_for_a_worker_ends(kind, expected):
    """Within one `timeout`: a second one would end after 40 s.

    Before, the worker answers, and sends the parameters.
    """
    answered, *_, ended = output_of(PROGRAM, kind, timeout=180).splitlines()
    assert (answered, ended) == ("3 steps, params True", expected)


HANGING_THREAD = """
import time
import distributed
import numpy as np
import radazo_jax as zo

def make_fun():
    while True:
        time.sleep(60)

cluster = distributed.LocalCluster(
    n_workers=1, processes=False, dashboard_address=None, silence_logs=100
)
client = distributed.Client(cluster)
try:
    zo.distribute(
        make_fun, np.ones(3, np.float32), zo.zo_sgd(1e-2), zo.forward_difference(),
        client=client, timeout=1, progress=False,
    )
except ValueError as error:
    print(error)
"""


def test_the_interpreter_exits_though_a_worker_thread_hangs():
    output = output_of(HANGING_THREAD, timeout=180)
    assert "it has not built the run in 1 s" in output
