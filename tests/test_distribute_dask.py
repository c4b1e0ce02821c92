"""Runs on Dask's scheduler and worker processes, some of which are killed."""

import contextlib
import os
import signal

import dask_runs
import fleets
import pytest
from fleets import assert_same, reference

import radazo_jax as zo

distributed = pytest.importorskip("distributed")

RUN = {
    "make_fun": dask_runs.language_model,
    "params": None,
    "optimizer": zo.radazo(1e-3),
    "estimator": zo.forward_difference(zo.rademacher(), 15),
}


@contextlib.contextmanager
def cluster(num_workers):
    with (
        distributed.LocalCluster(
            n_workers=num_workers,
            threads_per_worker=1,
            dashboard_address=None,
            silence_logs=100,
        ) as found,
        distributed.Client(found) as client,
    ):
        yield found, client


def pids(client):
    """The processes of the workers."""
    return {
        address: worker["pid"]
        for address, worker in client.run(lambda: {"pid": os.getpid()}).items()
    }


def test_killed_workers_change_nothing(tmp_path):
    """Dask's nannies start other processes for them, which join."""
    path, killed = tmp_path / "run", []
    expected = reference(60, **RUN)
    with cluster(2) as (_, client):
        known = pids(client)

        def kill(step, values):
            del values
            if step in (5, 20):
                killed.append(known.popitem())
                os.kill(killed[-1][1], signal.SIGKILL)

        result = zo.distribute(
            **RUN,
            client=client,
            num_steps=60,
            journal=path,
            callback=kill,
            progress=False,
        )
    assert_same(result, expected)
    fleets.assert_same_lines(path, expected)
