"""Workers that hold another frozen model, which is no parameter."""

import contextlib
import itertools
import os
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import fails, slow

distributed = pytest.importorskip("distributed")

START = np.linspace(0.5, 1, 6, dtype=np.float32)
METHOD = zo.zo_sgd(1e-2), zo.forward_difference(zo.rademacher(), num_directions=7)
UNNOTICED = fails(AssertionError, "only the parameters are compared")


@contextlib.contextmanager
def cluster(num_workers, processes):
    with (
        distributed.LocalCluster(
            n_workers=num_workers,
            threads_per_worker=1,
            processes=processes,
            dashboard_address=None,
            silence_logs=100,
        ) as found,
        distributed.Client(found) as client,
    ):
        yield found, client


def said_in(make_fun, client, found, **options):
    """What a run says: the warnings in a list, and the error that ends it."""
    try:
        zo.distribute(
            *(make_fun, START, *METHOD, client),
            key=0,
            progress=False,
            timeout=60.0,
            **options,
        )
    except (ValueError, zo.RunError) as error:
        found.append(error)
    return " ".join(map(str, found))


def joined_later(scale, scale_after):
    """A run that a worker joins whose loss is scaled: its address, what the run says.

    The scale changes once the worker has evaluated 50 points. The run ends if 500 more
    are evaluated, or if it said something.
    """
    scales, evaluated, numbers = [1.0, scale], [0, 0], itertools.count()

    def make_fun():
        number = next(numbers)

        def factor():
            evaluated[number] += 1
            return np.float32(scales[number])

        def loss(p):
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            callback = jax.pure_callback(factor, shape, vmap_method="sequential")
            return callback * jnp.sum(p**2)

        return loss

    def callback(*info):
        time.sleep(0.005)
        if len(local.workers) == 1:
            local.scale(2)
        if evaluated[1] > 50:
            scales[1] = scale_after
        return evaluated[1] > 550 or found

    with (
        cluster(1, processes=False) as (local, client),
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always")
        first = set(client.scheduler_info()["workers"])
        said = said_in(make_fun, client, found, callback=callback, num_steps=20_000)
        (address,) = set(client.scheduler_info()["workers"]) - first
    return address, said


@UNNOTICED
@pytest.mark.parametrize(
    ("scale", "scale_after"), [(2.0, 2.0), slow(1.0, 2.0)], ids=["joins", "later"]
)
def test_a_worker_with_another_model_is_named(scale, scale_after):
    address, said = joined_later(scale, scale_after)
    assert address in said


@pytest.mark.slow
def test_a_worker_that_rounds_in_another_way_is_not_named():
    rounding = 1 + 2**-23
    _, said = joined_later(rounding, rounding)
    assert not said


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, pytest.param(2.0, marks=UNNOTICED)])
def test_a_worker_with_another_model_from_the_beginning_is_named(scale):
    """The model is another in one of three processes."""

    def set_scale():
        os.environ["SCALE"] = str(scale)

    def make_fun():
        factor = float(os.environ.get("SCALE", "1"))
        return lambda p: factor * jnp.sum(p**2)

    with (
        cluster(3, processes=True) as (_, client),
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always")
        address = min(client.scheduler_info()["workers"])
        client.run(set_scale, workers=[address])
        said = said_in(make_fun, client, found, num_steps=100)
    assert (address in said) == (scale != 1)
