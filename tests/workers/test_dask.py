"""Runs on Dask's scheduler and worker processes, some of which are killed."""

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers import dask_runs, fleets
from tests.helpers.fleets import assert_same, reference
from tests.helpers.subprocesses import output_of

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts of Linux")


@contextlib.contextmanager
def cluster(num_workers, **options):
    with (
        distributed.LocalCluster(
            n_workers=num_workers,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            silence_logs=100,
            **options,
        ) as found,
        distributed.Client(found, direct_to_workers=True) as client,
    ):
        yield client


def traffic(client):
    """The bytes sent and received, by the address of a worker, as Linux counts them."""
    found = {}
    for group in (client.rpc.available, client.rpc.occupied):
        for address, comms in group.items():
            for comm in comms:
                info = comm.stream.socket.getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_INFO, 136
                )
                found[address] = np.add(
                    found.get(address, (0, 0)), struct.unpack_from("<QQ", info, 120)
                )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False])
def test_workers_in_threads_take_the_same_steps(direct):
    run = dask_runs.make_square(20)
    with cluster(2, processes=False, protocol="tcp://") as client:
        client.direct_to_workers = direct  # Through the scheduler otherwise.
        result = zo.distribute(**run, client=client, num_steps=8, progress=False)
    assert_same(result, reference(8, **run))


@pytest.mark.slow
def test_killed_workers_change_nothing_and_messages_are_small(tmp_path):
    """Two of three are killed. Dask's nannies start other processes, which join."""
    path, run = tmp_path / "run", dask_runs.make_square(100)
    counted = []
    with cluster(3) as client, fleets.shown() as seen:
        pids = client.run(os.getpid)

        def callback(report):
            workers = seen[0].reports.values()
            # From the step on before which all three have evaluated.
            if counted or sum(x.evaluations > 0 for x in workers) == 3:
                # A killed worker's connection has no socket any more.
                counted.append(traffic(client) if len(counted) < 12 else None)
            if len(counted) in (12, 27):
                os.kill(pids.popitem()[1], signal.SIGKILL)
            time.sleep(0.02)
            # Until two others have joined, and have evaluated.
            return sum(x.evaluations > 0 for x in workers) == 5

        first = set(pids)
        result = zo.distribute(
            **run,
            client=client,
            num_steps=3000,
            journal=path,
            callback=callback,
            progress=False,
        )
        fleets.assert_soon(lambda: not any(client.run(num_actors).values()))
    expected = reference(len(result.values), **run)
    assert_same(result, expected)
    fleets.assert_same_lines(path, expected)
    dead = [x for x in result.workers.values() if "died" in x.left]
    assert len(dead) == 2 and len(result.workers) == 5
    returned = [x for name, x in result.workers.items() if name not in first]
    assert all(x.joined and x.evaluations and not x.left for x in returned)
    found = per_step(counted[1:12], result.workers)
    assert len(found) == 3
    for address, steps in found.items():
        # A message may be counted a step later.
        most = (8 * 16 + 1000) * np.arange(2, len(steps) + 2)
        assert (np.cumsum(steps, axis=0) <= most[:, None]).all(), address


def num_actors(dask_worker):
    return len(dask_worker.state.actors)


def per_step(counted, workers):
    """The bytes sent and received in each step, by worker: [steps, 2]."""
    # Connections were opened before.
    known = workers.keys() & counted[0].keys()
    return {x: np.diff([each[x] for each in counted], axis=0) for x in known}


def certificates(folder):
    """A certificate that is its own authority, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    paths = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=radazo", "-keyout", paths[0], "-out", paths[1]),
        ],
        check=True,
        capture_output=True,
    )
    key, certificate = map(str, paths)
    roles = ("scheduler", "worker", "client")
    return distributed.Security(
        require_encryption=True,
        tls_ca_file=certificate,
        **{f"tls_{role}_cert": certificate for role in roles},
        **{f"tls_{role}_key": key for role in roles},
    )


@pytest.mark.slow
def test_messages_are_encrypted_by_the_settings_of_dask(tmp_path):
    run = dask_runs.make_square(100)
    security = certificates(tmp_path)
    with cluster(1, security=security, protocol="tls://") as client:
        before, during = client.run(dask_runs.listening), []

        def callback(report):
            during.append(client.run(dask_runs.listening))

        result = zo.distribute(
            **run, client=client, num_steps=5, progress=False, callback=callback
        )
    # Nothing listens that Dask has not opened.
    assert all(before.values()) and during == [before] * 5
    assert all(address.startswith("tls://") for address in result.workers)
    assert_same(result, reference(5, **run))


@pytest.mark.slow
def test_errors_on_workers_are_those_of_the_call(tmp_path):
    run = dask_runs.make_square(3) | {"progress": False, "journal": tmp_path / "run"}
    with cluster(2) as client:
        with pytest.raises(ValueError, match="make_fun must build the run") as error:
            zo.distribute(**run | {"make_fun": dask_runs.fails}, client=client)
        assert str(error.value).count("FileNotFoundError: checkpoint.npz") == 1
        with pytest.raises(ValueError, match=r"on tcp.*, start is .*; on tcp"):
            zo.distribute(**run | {"make_fun": dask_runs.differs}, client=client)
    # Steps may have been taken before the second worker was ready.
    assert run["journal"].exists() and zo.runs.History.from_journal(run["journal"])


@pytest.mark.slow
def test_workers_without_the_package_are_named_on_a_line():
    """The scheduler does not need it."""
    run = dask_runs.make_square(3) | {"progress": False}
    with cluster(1) as client:
        client.run(dask_runs.remove_package)
        text = r"on tcp://\S+, ModuleNotFoundError\(.*radazo_jax"
        with pytest.raises(ValueError, match=text) as error:
            zo.distribute(**run, client=client)
    assert "\n" not in str(error.value)


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


@pytest.mark.slow
def test_the_interpreter_exits_though_a_worker_thread_hangs():
    output = output_of(HANGING_THREAD, timeout=180)
    assert "it has not built the run in 1 s" in output
