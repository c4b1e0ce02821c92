"""Estimators that remember, and distributions of users, in runs whose values fail."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.relatives import PARAMS, flat, make, quadratic
from tests.helpers.short_runs import called
from tests.helpers.tables import DISTRIBUTIONS, every, jit, slow

# One object: another optimizer of Optax would have programs of its own.
SGD = optax.sgd(1e-3)


def whole(params):
    """In float64, and rounded to numbers that float32 holds."""
    return float(np.round(quadratic(flat(params)) * 64) / 64)


def run(estimator, fun=whole, **options):
    options = {"progress": False, "num_steps": 6, "key": 3, **options}
    return called(fun, PARAMS, SGD, estimator, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("query_reuse", "sparse"),
        ("variance_reduced", "coordinate in turn"),
        ("gaussian_process", "smooth"),
    ],
)
def test_a_run_without_some_values_is_rebuilt(name, distribution, tmp_path):
    """Estimators that keep something of the steps before; a value in four fails."""
    estimator, path = make(name, DISTRIBUTIONS[distribution]), tmp_path / "run.jsonl"
    calls = itertools.count()

    def fails(params):
        return np.nan if next(calls) % 4 == 2 else whole(params)

    result = run(estimator, fails, journal=path)
    assert result.state.failures.evaluations > 1
    assert np.isfinite(flat(result.params)).all()
    chex.assert_trees_all_equal(zo.replay(path, PARAMS, SGD, estimator), result.state)


SLOPES = np.array([1.0, -2.0, 3.0, 0.5])


FAILING = [[0], [0, 3, 7], [0, *range(3, 11)], [2], [4, 10]]


@pytest.mark.parametrize("failing", every(FAILING, [0], [2]))
def test_without_the_value_at_the_parameters_the_mean_replaces_it(failing):
    """Each value is compared with it, or else with the mean of the others, in float64.

    Directions whose value failed are left out.
    """
    params = np.zeros(4, np.float32)
    estimator = zo.forward_difference()

    @jit
    def ask(draw):
        points, state = estimator.points(draw, params, estimator.init(params))
        return points, state, zo.estimators.candidates(points, params)

    @jit
    def tell(points, values, state):
        estimate, _ = estimator.reduce(points, points.split(values), params, state)
        return estimate, estimate.gradient.materialize(params)

    points, state, asked = ask(zo.estimators.Draw.once(jax.random.key(0)))
    asked = np.asarray(asked, np.float64)
    values = np.round(np.sum((asked * 64 + SLOPES[None]) ** 2, axis=1) * 256) / 256
    values[failing] = np.nan
    estimate, gradient = tell(points, jnp.asarray(values, jnp.float32), state)
    found = [i for i in range(1, 11) if i not in failing]
    expected, slope, has_base = np.zeros(4), 0.0, 0 not in failing
    for i in found:
        others = np.mean([values[j] for j in found if j != i])
        change = values[i] - (values[0] if has_base else others)
        expected += 4 / len(found) * change / 5e-3 * asked[i] / 5e-3
        slope += 4 / len(found) * change * (change if has_base else values[i]) / 25e-6
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(estimate.slope, slope, rtol=1e-3)
    value = values[0] if has_base else values[found].mean()
    np.testing.assert_allclose(estimate.value, value, rtol=1e-6)
    assert estimate.num_values == len(found) + has_base


def test_one_value_is_none_to_compare():
    estimator, params = zo.forward_difference(num_directions=3), jnp.zeros(4)

    @jit
    def estimated(draw):
        points, _ = estimator.points(draw, params, ())
        values = points.split(jnp.array([jnp.nan, jnp.nan, 1.0, jnp.nan]))
        estimate, _ = estimator.reduce(points, values, params, ())
        return estimate, estimate.gradient.materialize(params)

    estimate, gradient = estimated(zo.estimators.Draw.once(jax.random.key(0)))
    assert estimate.num_values == 0
    assert jnp.isnan(estimate.value) and jnp.isnan(gradient).all()


NAMES = [
    "majority_vote",
    slow("prior_guided"),
    slow("linear_interpolation"),
    slow("gaussian_process"),
    slow("variance_reduced"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_start_that_fails_ends_no_run(name):
    """This holds for each estimator that evaluates the parameters."""
    start = flat(PARAMS)

    def fun(params):
        return np.nan if np.array_equal(flat(params), start) else whole(params)

    result = run(make(name, DISTRIBUTIONS["sphere"]), fun, num_steps=3)
    assert result.state.failures.evaluations >= 1
    assert result.state.failures.skipped == 0
    assert np.isfinite(result.values).all()
    assert np.isfinite(flat(result.params)).all()
    assert not np.array_equal(flat(result.params), start)
