"""Functions and callbacks that exit, stop, or return what cannot be read."""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers import calls
from tests.helpers.short_runs import METHOD, run, square, traced
from tests.helpers.tables import slow

POPULATION = zo.zo_sgd(1e-2), zo.evolution_strategy(zo.rademacher(), population_size=6)


def ended(fun, **options):
    """The result of a run; an error of any kind that ends it is a failed assertion."""
    try:
        return run(fun, **options)
    except (Exception, SystemExit, calls.Stop) as error:
        raise AssertionError(f"the run ended with {error!r}") from error


def losing(lost):
    """A function that loses some points."""
    return lambda x: lost(x) if calls.is_lost(x) else square(x)


def assert_some_failed(result, **options):
    """The run is that in which the same points are NaN."""
    expected = run(losing(lambda x: np.nan), **options)
    assert expected.history.failed.sum() > 0
    np.testing.assert_array_equal(result.params, expected.params)
    np.testing.assert_array_equal(result.values, expected.values)
    assert result.num_evaluations == expected.num_evaluations


def spawning(workers):
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context)


@pytest.mark.parametrize("make", [ThreadPoolExecutor, slow(spawning)])
@pytest.mark.parametrize("fun", [calls.exits, calls.stops, calls.raises])
def test_a_point_that_ends_its_worker_alone_has_failed(fun, make):
    with make(1) as executor:
        result = ended(fun, executor=executor)
    assert_some_failed(result)


def test_an_exit_is_a_failure_of_its_point_as_in_a_worker():
    def exits(x):
        points.append(x)
        return sys.exit(3) if len(points) == 7 else square(x)

    points = []
    assert run(exits).state.failures.evaluations == 1


def stop(report):
    raise StopIteration


@pytest.mark.parametrize("callback", [stop, lambda report: True])
@pytest.mark.parametrize("call", [run, traced])
def test_a_callback_ends_the_run(call, callback):
    options = {"chunk_size": 1} if call is traced else {}
    result = call(callback=callback, **options)
    np.testing.assert_array_equal(result.params, call(num_steps=1).params)
    assert len(result.values) == 1


UNREADABLE = {
    "three": lambda x: (1.0, x, "warn"),
    "ragged": lambda x: [[1.0], [2.0, 3.0]],
    "ragged in a pair": lambda x: ([[1.0], [2.0, 3.0]], x),
}


@pytest.mark.parametrize("method", [METHOD, POPULATION], ids=["numbers", "vectors"])
@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
def test_a_value_that_cannot_be_read_is_a_failed_point(value, method):
    options = {"method": method, "key": 1}  # The first point has a value.
    assert_some_failed(ended(losing(value), **options), **options)


def batch(xs):
    return [square(x) for x in xs]


@pytest.mark.parametrize(
    "fun",
    [
        batch,
        lambda xs: (batch(xs), list(xs)),
        lambda xs: (np.array(batch(xs)), None),
        lambda xs: (batch(xs), None),
        lambda xs: tuple(batch(xs)),
    ],
    ids=["list", "pair", "array and None", "list and None", "tuple"],
)
def test_values_of_a_batch_are_read(fun):
    np.testing.assert_array_equal(ended(fun, batched=True).params, run().params)


def test_a_batch_that_cannot_be_read_has_failed_points():
    def sometimes(xs):
        batches.append(xs)
        return (batch(xs), None, "warn") if len(batches) == 2 else batch(xs)

    batches = []
    assert list(ended(sometimes, batched=True).history.failed) == [0, 5, 0]
