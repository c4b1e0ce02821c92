"""Results: the best of a run that failed, and numbers to read."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import run, square, traced

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


@pytest.mark.parametrize("size", [10, 11])
def test_a_result_prints_the_numbers_of_few_parameters(size):
    """Also of a tree."""
    start = 3.7 * 1.9 ** np.arange(size, dtype=np.float32)
    tree = {"w": start[:4], "b": start[4:]}
    result = run(lambda p: square(p["w"]) + square(p["b"]), tree, 1)
    for found in (result, result.best):
        params = np.concatenate([found.params["w"], found.params["b"]])
        assert shown(params, str(found)) == (size == 10) and len(str(found)) < 1000


def test_a_result_of_a_compiled_run_prints_its_numbers():
    result = traced(start=START, num_steps=1)
    assert shown(result.params, str(result))


def seen(call, **options):
    reports = []
    result = call(start=START, num_steps=3, callback=reports.append, **options)
    return result, reports


def test_a_report_of_a_python_function_has_its_points():
    result, reports = seen(run)
    assert [report.step for report in reports] == [1, 2, 3]
    for report in reports:
        values = [square(x) for x in report.points]
        np.testing.assert_array_equal(report.values, np.float32(values))
        assert isinstance(report.state.params, np.ndarray)
    assert reports[-1].best == result.best
    np.testing.assert_array_equal(reports[-1].state.params, result.params)


def test_a_report_of_a_compiled_run_has_the_values_of_its_chunk():
    result, reports = seen(traced, chunk_size=2)
    assert [report.step for report in reports] == [2, 3]
    values = np.concatenate([report.values for report in reports])
    np.testing.assert_array_equal(values, result.values)
    assert result.best.value == result.values.min() and reports[-1].points is None
    # Each step evaluates five points, the parameters first.
    assert result.best.number == 5 * np.argmin(result.values)
    assert result.num_evaluations == 15


@pytest.mark.parametrize(
    ("options", "name"),
    [({"sample": lambda key: key}, "sample"), ({"chunk_size": 2}, "chunk_size")],
)
def test_options_of_compiled_runs_are_refused_with_python_functions(options, name):
    with pytest.raises(ValueError, match=f"{name} must be None with an evaluator"):
        traced(square, evaluator=zo.external(), **options)
