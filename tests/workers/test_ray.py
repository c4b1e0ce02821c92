"""Runs on Ray's actors, some of which are killed."""

import contextlib
import os
import pathlib
import signal
import sys
import time

import pytest

import radazo_jax as zo
from tests.helpers import dask_runs, fleets
from tests.helpers.fleets import assert_same, reference

ray = pytest.importorskip("ray", reason='needs "radazo-jax[ray]"')
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def actors():
    """The processes of replicas, by the names that Ray gives them."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # It has ended.
            if path.read_bytes().startswith(b"ray::Replica"):
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def three_gpus():
    """Of which Ray only counts the number."""
    options = {"include_dashboard": False, "log_to_driver": False}
    ray.init(num_cpus=3, num_gpus=3, configure_logging=False, **options)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_killed_actors_change_nothing(three_gpus):
    run, killed = dask_runs.make_square(100) | {"progress": False}, []

    def callback(report):
        time.sleep(0.02)
        # Once all three have evaluated, and until the two were made again and did.
        steps = [x.step for x in seen[0]._workers.values()]
        if report.step < 10 or sum(x >= report.step - 2 for x in steps) < 3:
            return False
        if not killed:
            killed.extend(sorted(actors())[:2])
            for process in killed:
                os.kill(process, signal.SIGKILL)
        return len(actors()) == 3 and not set(killed) & set(actors())

    with fleets.shown() as seen:
        result = zo.distribute(**run, client=ray, num_steps=3000, callback=callback)
    assert sum("died" in x.left for x in result.workers.values()) == 2
    assert len(result.workers) == 3 and result.stopped == "callback"
    fleets.assert_soon(lambda: not actors())
    assert_same(result, reference(len(result.values), **run))


def test_ray_must_be_initialized():
    with pytest.raises(TypeError, match=r"the module ray after ray.init\(\); got"):
        zo.distribute(**dask_runs.make_square(3), client=ray)
