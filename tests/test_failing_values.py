"""Estimators that remember, and distributions of users, in runs whose values fail."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import assert_same
from relatives.table import PARAMS, flat, make, quadratic
from tables import DISTRIBUTIONS, slow

import radazo_jax as zo

STEPS = 6
# The estimators that keep something of the steps before, and distributions that users
# wrote or that draw without replacement.
CASES = [
    slow("query_reuse", "sparse"),
    slow("variance_reduced", "coordinate in turn"),
    ("residual_feedback", "smooth"),
    slow("accelerated", "orthonormal"),
    slow("prior_guided", "sparse"),
    slow("linear_interpolation", "coordinate in turn"),
    slow("gaussian_process", "smooth"),
    slow("momentum_perturbation", "sparse"),
    slow("adaptive_difference", "orthonormal"),
]
each_case = pytest.mark.parametrize(("name", "distribution"), CASES)


def whole(params):
    """In float64, and rounded to numbers that float32 holds."""
    return float(np.round(quadratic(flat(params)) * 64) / 64)


class Failing:
    """The function; a point in four fails the first time that it is asked for."""

    def __init__(self, how):
        self.how, self.calls, self.seen = how, 0, set()

    def __call__(self, params):
        point = flat(params).tobytes()
        if point in self.seen:
            return whole(params)
        self.seen.add(point)
        self.calls += 1
        return self.how() if self.calls % 4 == 2 else whole(params)


def no_answer():
    raise OSError("no answer")


def run(estimator, fun=whole, **options):
    options = {"progress": False, "num_steps": STEPS, **options}
    steps = options.pop("num_steps")
    return zo.minimize_black_box(
        fun, PARAMS, optax.sgd(1e-3), estimator, steps, 3, **options
    )


@each_case
def test_a_run_without_some_values_is_rebuilt(name, distribution, tmp_path):
    estimator, path = make(name, DISTRIBUTIONS[distribution]), tmp_path / "run.jsonl"
    result = run(estimator, Failing(lambda: np.nan), journal=path)
    assert result.state.failures.evaluations > 1
    assert np.isfinite(flat(result.params)).all()
    assert_same(zo.replay(path, PARAMS, optax.sgd(1e-3), estimator), result.state)


@pytest.mark.slow
@each_case
def test_a_value_that_is_asked_for_again_leaves_no_trace(name, distribution):
    estimator = make(name, DISTRIBUTIONS[distribution])
    retried = run(estimator, Failing(no_answer), on_failure="retry")
    assert_same(retried.state, run(estimator).state)


@pytest.mark.slow
@each_case
def test_a_run_that_a_failure_ended_goes_on(name, distribution):
    """To what it is where the value is dropped."""
    estimator, failing = make(name, DISTRIBUTIONS[distribution]), Failing(no_answer)
    with pytest.raises(zo.RunError, match="OSError: no answer") as caught:
        run(estimator, failing, on_failure="raise")
    state = caught.value.state
    assert state.failures.evaluations >= 1
    left = STEPS - int(state.step)
    went_on = run(estimator, failing, state=state, num_steps=left)
    dropped = run(estimator, Failing(no_answer))
    assert_same(went_on.params, dropped.params)
    assert_same(went_on.state.estimator_state, dropped.state.estimator_state)
    assert jnp.all(went_on.state.step == STEPS)
