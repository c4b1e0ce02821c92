"""Results: the best of a run that failed, and numbers to read."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import fails, run, square, traced
from tests.helpers.tables import slow

START = np.array([11.5, -7.25, 0.375], np.float32)


@pytest.mark.parametrize(
    "options",
    [{"on_failure": "raise"}, {"max_consecutive_failures": 1}],
    ids=["raise", "consecutive"],
)
def test_an_error_of_a_run_has_its_best_point(options):
    def sometimes(x):
        """Fails after two steps of five points."""
        if len(points) == 10:
            raise OSError("no license")
        points.append(x)
        return square(x)

    points = []
    with pytest.raises(zo.RunError) as caught:
        run(sometimes, START, 4, **options)
    best = caught.value.result.best
    values = [square(x) for x in points]
    np.testing.assert_array_equal(best.params, points[np.argmin(values)])
    assert best.value == np.float32(min(values))


@pytest.mark.slow
@fails(AttributeError, "a RunError of a compiled run has a state alone")
def test_an_error_of_a_compiled_run_has_its_best_value():
    """The loss is not finite below a value that a step reaches."""

    def loss(p):
        value = jnp.sum(p**2)
        return jnp.where(value > 180, value, jnp.nan)

    with pytest.raises(zo.RunError) as caught:
        traced(loss, START, 100, max_consecutive_failures=2)
    assert 180 < caught.value.result.best.value <= square(START)


def shown(params, text):
    """Whether a text has each of the parameters, to two digits."""
    words = re.findall(r"-?\d+\.?\d*(?:e[-+]?\d+)?", text)
    found = np.array([float(word) for word in words])
    return all(np.any(np.abs(found - x) <= 0.01 * abs(x)) for x in np.ravel(params))


@pytest.mark.parametrize("size", [slow(1), slow(3), 10])
def test_a_result_prints_the_numbers_of_few_parameters(size):
    result = run(square, 3.7 * 1.9 ** np.arange(size, dtype=np.float32), 1)
    assert shown(result.best.params, str(result.best))
    assert shown(result.params, str(result))


@pytest.mark.slow
def test_a_result_prints_the_numbers_of_a_tree():
    start = {"w": START[:2], "b": START[2]}
    result = run(lambda p: square(p["w"]) + square(p["b"]), start, 1)
    assert all(shown(x, str(result.best)) for x in result.best.params.values())


def test_a_result_of_a_compiled_run_prints_its_numbers():
    result = traced(start=START, num_steps=1)
    assert shown(result.params, str(result))


@pytest.mark.slow
def test_a_result_does_not_print_more_than_ten_parameters():
    result = run(square, 3.7 * 1.9 ** np.arange(11, dtype=np.float32), 1)
    assert not shown(result.best.params, str(result.best))
    assert len(str(result)) < 1000
