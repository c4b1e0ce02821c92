"""Functions that JAX does not see: what fails, is retried, and ends a run."""

import itertools

import chex
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers import short_runs
from tests.helpers.black_boxes import (
    ESTIMATOR,
    OPTIMIZER,
    START,
    STEPS,
    fun,
    run,
    traced,
)

METHOD = OPTIMIZER, ESTIMATOR


def states_of_steps(failing):
    """The states after three steps, in which these evaluations fail."""
    calls, states = itertools.count(), []

    def sometimes(x):
        if next(calls) in failing:
            raise OSError("no answer")
        return fun(x)

    def keep(report):
        states.append(report.state)

    run(sometimes, steps=3, callback=keep)
    return states


def test_a_step_without_values_is_skipped():
    for failing in ([5, 6, 7], [4, 6, 7]):  # All directions, or θ and all but one.
        before, after, last = states_of_steps(failing)
        assert after.failures.skipped == last.failures.skipped == 1
        assert after.failures.in_a_row == 1
        assert last.failures.in_a_row == 0
        chex.assert_trees_all_equal(before.params, after.params)
        chex.assert_trees_all_equal(before.optimizer_state, after.optimizer_state)
        assert np.any(last.params != after.params)


def test_a_step_without_the_value_at_the_parameters_is_taken():
    before, after, _ = states_of_steps([4])
    assert after.failures.evaluations == 1
    assert after.failures.skipped == 0
    assert np.any(before.params != after.params)


def test_compiled_runs_drop_and_skip_alike():
    """NaN at the same points gives the run of the black box, bit for bit."""

    def fails(x):
        return x[0] > 0.4

    def sometimes(x):
        return np.nan if fails(x) else fun(x)

    compiled = short_runs.traced(
        lambda x: jnp.where(fails(x), jnp.nan, traced(x)), START, STEPS, METHOD
    )
    outside = run(sometimes)
    assert outside.state.failures.evaluations > 0
    chex.assert_trees_all_equal(outside.state, compiled.state)


def test_a_failure_is_that_of_all_points_that_are_the_same():
    def fun(x):
        if np.allclose(x, 0):
            raise ValueError("not here")
        return float(np.sum(x))

    with zo.external().open(fun) as calls:
        found = calls.evaluate(np.array([[0.0], [0.0], [1.0]]))
    np.testing.assert_array_equal(found.values, [np.nan, np.nan, 1.0])
    assert found.failures == dict.fromkeys((0, 1), "ValueError: not here")


def compiled_without_values(**options):
    def fun(x):
        return jnp.sum(x) * jnp.nan

    short_runs.traced(fun, START, 9, METHOD, **options)


def test_too_many_failures_end_the_run_with_its_state():
    def broken(x):
        raise OSError("no answer")

    with pytest.raises(zo.RunError, match=r"OSError: no answer") as caught:
        run(broken, max_consecutive_failures=3)
    assert caught.value.state.step == 3
    with pytest.raises(zo.RunError, match=r"in 3 steps in a row") as caught:
        compiled_without_values(max_consecutive_failures=3)
    assert caught.value.state.step == 3
    with pytest.raises(zo.RunError, match="at step 0"):
        compiled_without_values(on_failure="raise")
    result = run(state=caught.value.state)
    assert result.state.step == 3 + STEPS


def test_a_value_beyond_float32_has_failed():
    """Such as a penalty of 1e300, which float64 can hold."""

    def penalized(x):
        return fun(x) if np.array_equal(x, START) else 1e300

    with pytest.raises(
        zo.RunError, match=r"returned 1e\+300, beyond float32\."
    ) as error:
        run(penalized, max_consecutive_failures=2)
    assert error.value.state.failures.evaluations == 2 * 3
