"""Functions and callbacks that exit, stop, or return what cannot be read."""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo

from . import functions

START = np.ones(3, np.float32)
METHOD = zo.zo_sgd(1e-2), zo.forward_difference(zo.rademacher(), num_directions=5)
POPULATION = zo.zo_sgd(1e-2), zo.evolution_strategy(zo.rademacher(), population_size=6)
STEPS = 3


def run(fun=functions.square, method=METHOD, **options):
    options = {"num_steps": STEPS, **options}
    return zo.minimize_black_box(fun, START, *method, key=0, progress=False, **options)


def result_of(fun, method=METHOD, **options):
    """The result of a run; an error of any kind that ends it is a failed assertion."""
    try:
        return run(fun, method, **options)
    except (Exception, SystemExit, functions.Stop) as error:
        raise AssertionError(f"the run ended with {error!r}") from error


def losing(lost):
    """A function that loses some points."""
    return lambda x: lost(x) if functions.fails(x) else functions.square(x)


def assert_some_failed(result, expected=None, method=METHOD):
    """The points are those of a run in which the same points are NaN."""
    expected = expected or run(losing(lambda x: np.nan), method)
    assert expected.history.failed.sum() > 0
    np.testing.assert_array_equal(result.params, expected.params)
    np.testing.assert_array_equal(result.values, expected.values)
    assert result.num_evaluations == expected.num_evaluations


ENDS = pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="what is no Exception ends the run, wherever it is raised",
)


@ENDS
@pytest.mark.parametrize("fun", [functions.exits, functions.stops])
def test_an_exit_in_a_thread_is_a_failed_point(fun):
    with ThreadPoolExecutor(1) as threads:
        result = result_of(fun, executor=threads)
    assert_some_failed(result)


@pytest.mark.slow
@ENDS
@pytest.mark.parametrize("fun", [functions.exits, functions.stops])
def test_an_exit_in_a_worker_process_is_a_failed_point(fun):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as processes:
        result = result_of(fun, executor=processes)
    assert_some_failed(result)


@pytest.mark.parametrize("make", [ThreadPoolExecutor, None], ids=["thread", "in turn"])
def test_an_error_is_a_failed_point(make):
    def raises(x):
        raise OSError("no license")

    if make is None:
        return assert_some_failed(run(losing(raises)))
    with make(1) as executor:
        assert_some_failed(run(losing(raises), executor=executor))


def test_an_exit_of_the_main_thread_passes_on_after_the_journal_is_written(tmp_path):
    def exits(x):
        calls.append(x)
        return sys.exit(3) if len(calls) == 9 else functions.square(x)

    path, calls = tmp_path / "run.jsonl", []
    with pytest.raises(SystemExit, match="3"):
        run(exits, journal=path)
    assert int(zo.replay(path, START, *METHOD).step) == 1
    np.testing.assert_array_equal(run(exits, journal=path).params, run().params)


def traced(**options):
    return zo.minimize(
        *(lambda p: jnp.sum(p**2), START, *METHOD),
        num_steps=STEPS,
        key=0,
        chunk_size=1,
        progress=False,
        **options,
    )


def stop(*info):
    raise StopIteration


@pytest.mark.xfail(
    strict=True, raises=StopIteration, reason="it passes through the run"
)
@pytest.mark.parametrize("call", [run, traced])
def test_stop_iteration_of_a_callback_ends_the_run(call):
    result = call(callback=stop)
    np.testing.assert_array_equal(result.params, call(num_steps=1).params)
    assert len(result.values) == 1


@pytest.mark.parametrize("call", [run, pytest.param(traced, marks=pytest.mark.slow)])
def test_a_true_value_of_a_callback_ends_the_run(call):
    result = call(callback=lambda *info: True)
    np.testing.assert_array_equal(result.params, call(num_steps=1).params)
    assert len(result.values) == 1


UNREADABLE = {
    "three": lambda x: (1.0, x, "warn"),
    "ragged": lambda x: [[1.0], [2.0, 3.0]],
    "ragged in a pair": lambda x: ([[1.0], [2.0, 3.0]], x),
}


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="reading such a value raises"
)
@pytest.mark.parametrize("method", [METHOD, POPULATION], ids=["numbers", "vectors"])
@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
def test_a_value_that_cannot_be_read_is_a_failed_point(value, method):
    assert_some_failed(result_of(losing(value), method), method=method)


def batch(xs):
    return [functions.square(x) for x in xs]


READABLE = {
    "list": batch,
    "pair": lambda xs: (batch(xs), list(xs)),
    "array, None": lambda xs: (np.array(batch(xs)), None),
    "list, None": lambda xs: (batch(xs), None),
    "tuple": lambda xs: tuple(batch(xs)),
}


@pytest.mark.parametrize("fun", READABLE.values(), ids=READABLE)
def test_values_of_a_batch_are_read(fun, request):
    if fun in list(READABLE.values())[2:]:
        request.applymarker(
            pytest.mark.xfail(
                strict=True,
                raises=AssertionError,
                reason="a tuple must be a pair of n values and n objects",
            )
        )
    result = result_of(fun, batched=True)
    np.testing.assert_array_equal(result.params, run().params)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="a tuple must be a pair")
def test_a_batch_that_cannot_be_read_has_failed_points():
    def sometimes(xs):
        calls.append(len(xs))
        return (batch(xs), None, "warn") if len(calls) == 2 else batch(xs)

    calls = []
    result = result_of(sometimes, batched=True)
    assert list(result.history.failed) == [0, 6, 0]
