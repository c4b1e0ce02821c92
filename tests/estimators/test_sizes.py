"""Sizes of parameters, which `full_difference` seeks if slopes are too unlike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.tables import slow

SIZES = np.logspace(-6, 6, 5)


def scaled(x):
    return float(np.sum((x / SIZES - 1) ** 2) + 1)


def run(fun, start, most, **options):
    return zo.minimize_black_box(
        fun, start, max_evaluations=most, progress=False, **options
    )


@pytest.mark.parametrize("start", [np.zeros(5), slow(3 * SIZES)])
def test_a_size_changes_the_value_by_about_a_hundredth(start):
    state = run(scaled, start, 30).state.estimator_state
    assert state.sizes.known
    moves = start + np.diag(state.sizes.guesses)
    changes = np.array([abs(scaled(x) - scaled(start)) for x in moves])
    shares = changes / scaled(start)
    assert np.all((shares > 1e-3) & (shares < 1e-1))


def test_sizes_from_a_millionth_to_a_million_are_minimized():
    assert run(scaled, np.zeros(5), 60 * 6).best.value < 1 + 1e-5


def test_parameters_of_one_size_have_no_search():
    result = run(lambda x: float(np.sum((x - 1) ** 2)), np.zeros(5), 30)
    assert not result.state.estimator_state.sizes.known
    # θ, d moves, and θ once more.
    assert result.history.evaluations[:2].tolist() == [6, 1]


@pytest.mark.slow
def test_finite_widths_are_sizes():
    bounds = -2 * SIZES, 2 * SIZES
    state = run(scaled, np.zeros(5), 60, bounds=bounds, num_steps=4)
    state = state.state.estimator_state
    assert state.sizes.known
    np.testing.assert_allclose(state.sizes.guesses, 4 * SIZES)


@pytest.mark.slow
def test_a_failing_move_shortens_a_distance():
    def fun(x):
        return np.nan if np.any(abs(x) > 1e-8) else float(np.sum((1e8 * x - 3) ** 2))

    assert run(fun, np.zeros(2), 80).best.value < fun(np.zeros(2)) - 1


def test_noise_is_seen_in_the_second_step():
    draws = np.random.default_rng(0)
    result = zo.minimize_black_box(
        lambda x: float(np.sum(x**2) + draws.normal()),
        np.ones(5),
        zo.bfgs(),
        zo.full_difference(),
        zo.search.backtracking(),
        num_steps=2,
        progress=False,
    )
    state = result.state.estimator_state
    assert state.noise > 0
    with jax.enable_x64(True):
        assert zo.full_difference().exhausted(jax.tree.map(jnp.asarray, state))


def test_a_function_in_steps_has_central_differences_over_long_distances():
    result = run(lambda x: float(np.sum(np.round(8 * abs(x - 0.3)))), np.zeros(5), 30)
    state, evaluations = result.state.estimator_state, result.history.evaluations
    assert state.in_steps and result.best.value == 0
    # Short differences; then both signs, at the start and after a step.
    assert evaluations[:5].tolist() == [6] * 5
    np.testing.assert_allclose(abs(state.steps), 0.3, rtol=1e-6)
