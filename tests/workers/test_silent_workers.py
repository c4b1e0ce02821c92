"""The only worker of a run gives no answer."""

import pytest

from tests.helpers.short_runs import fails
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

kind, steps = sys.argv[1], []

def make_fun():
    while kind == "make_fun":
        time.sleep(60)
    return lambda p: jnp.sum(p**2)

def callback(report):
    steps.append(report)
    if kind == "params" and len(steps) == 3:
        os.kill(pid, signal.SIGSTOP)

cluster = distributed.LocalCluster(
    n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=100
)
client = distributed.Client(cluster)
(pid,) = client.run(os.getpid).values()
try:
    result = zo.distribute(
        make_fun, np.ones(3, np.float32), zo.zo_sgd(1e-2),
        zo.forward_difference(zo.rademacher(), 1), client=client, num_steps=3, key=0,
        timeout=10, callback=callback, progress=False,
    )
    print(len(steps), "steps, params", result.params is not None, flush=True)
except (RuntimeError, ValueError) as error:
    print(len(steps), "steps,", type(error).__name__, error, flush=True)
# Dask would wait for the worker.
os._exit(0)
"""


@fails(AssertionError, "the answer is waited for without end")
@pytest.mark.parametrize(("kind", "steps"), [("params", 3), ("make_fun", 0)])
def test_the_wait_for_a_worker_ends(kind, steps):
    output = output_of(PROGRAM, kind, timeout=50)
    assert output.splitlines()[-1].startswith(f"{steps} steps, ")


def test_a_worker_that_answers_sends_the_parameters():
    output = output_of(PROGRAM, "none", timeout=90)
    assert output.splitlines()[-1] == "3 steps, params True"
