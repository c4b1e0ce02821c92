"""Workers that hold another frozen model, which is no parameter."""

import contextlib
import os
import time
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.slow

START = np.linspace(0.5, 1, 6, dtype=np.float32)
METHOD = zo.zo_sgd(1e-2), zo.forward_difference(zo.rademacher(), num_directions=7)


@contextlib.contextmanager
def cluster(num_workers, processes):
    with (
        distributed.LocalCluster(
            n_workers=num_workers,
            processes=processes,
            threads_per_worker=1,
            protocol="tcp://",
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
        ) as found,
        distributed.Client(found) as client,
    ):
        yield found, client


def said_in(make_fun, client, **options):
    """Runs; returns the texts of its warnings and of the error that ends it."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        options = {"key": 0, "progress": False, "timeout": 300.0, **options}
        try:
            zo.distribute(make_fun, START, *METHOD, client=client, **options)
        except (ValueError, zo.RunError) as error:
            found.append(error)
    return " ".join(map(str, found))


# The factors of the next workers' models. A worker thread shares them, because a
# function of a module is pickled by its name.
FACTORS: list[float] = []


def make_next():
    factor = FACTORS.pop(0)
    return lambda p: factor * jnp.sum(p**2)


@pytest.mark.parametrize("scale", [2.0, 1 + 2**-23])
def test_a_worker_that_joins_with_another_model_is_named(scale):
    """Its values are twice as large as by the first one, or rounded in another way."""
    FACTORS[:], steps, after = [1.0, scale], [], []

    def callback(report):
        steps.append(report)
        if len(steps) == 2:
            local.scale(2)
        time.sleep(0.05)  # The worker has time to join.
        after.extend([] if FACTORS else [report])
        # A model that differs in rounding alone has no step at which it is named.
        return scale != 2 and len(after) == 100

    with cluster(1, processes=False) as (local, client):
        first = set(client.scheduler_info()["workers"])
        said = said_in(make_next, client, callback=callback, num_steps=400)
        (address,) = set(client.scheduler_info()["workers"]) - first
    if FACTORS:
        pytest.fail("the second worker has not made its function")
    assert (address in said) == (scale == 2)


@pytest.fixture(scope="module")
def three_processes():
    with cluster(3, processes=True) as (_, client):
        yield client


@pytest.mark.parametrize(
    ("below", "num_steps"), [(np.inf, 400), (0.5, 400), (0.0, 150)]
)
def test_a_worker_with_another_model_is_named(below, num_steps, three_processes):
    """Its values are twice as large as by the others if they are below some value.

    The start has the value 3.6, and so a worker may differ that did not when it joined.
    """

    def set_below():
        os.environ["BELOW"] = str(below)

    def make_fun():
        limit = float(os.environ.get("BELOW", "0"))

        def loss(p):
            value = jnp.sum(p**2)
            return jnp.where(value < limit, 2 * value, value)

        return loss

    client = three_processes
    address = min(client.scheduler_info()["workers"])
    client.run(set_below, workers=[address])
    # All workers have time to join.
    options = {"num_steps": num_steps, "callback": lambda report: time.sleep(0.05)}
    said = said_in(make_fun, client, **options)
    assert (address in said) == (below > 0)
