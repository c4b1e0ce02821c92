"""Relatives that choose their points: against their equations, in float64 NumPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.relatives import (
    DIMENSION,
    PARAMS,
    Steps,
    derivative,
    flat,
    gradients,
    moved,
    quadratic,
)
from tests.helpers.tables import slow

# --- One point, and two ------------------------------------------------------------


def test_residual_feedback():
    mu, distribution = 0.5, Hashed()
    steps = Steps(zo.contrib.residual_feedback(distribution, 2, mu))
    before = None
    for i in range(3):
        params = moved(PARAMS, 0.1 * i)
        estimate, _, values, us = steps(i, params, level=7.0)
        before = np.mean(values) if before is None else before
        expected = ((values - before) / mu) @ us / 2
        np.testing.assert_allclose(flat(estimate.gradient), expected, rtol=1e-3)
        np.testing.assert_allclose(estimate.value, np.mean(values), rtol=1e-5)
        before = np.mean(values)
    # A failed step leaves the value of the one before.
    steps(3, values=lambda at: np.full(len(at), np.nan))
    np.testing.assert_allclose(steps.state.value, before, rtol=1e-6)


# --- Variance reduction ------------------------------------------------------------


def test_variance_reduced():
    """Algorithm 2 with a mean over the first two steps of each period of four."""
    mu, size = 0.5, 3
    steps = Steps(
        zo.contrib.variance_reduced(Hashed(), size, mu, period=4, anchor_steps=2)
    )
    anchor, mean = None, None
    for i in range(6):
        params, level = moved(PARAMS, 0.1 * i), float(i)
        estimate, _, _, us = steps(i, params, level=level)
        theta, us, phase = flat(params), us[:size], i % 4

        def f(x, level=level):
            return quadratic(x, level)

        if phase == 0:
            anchor, mean = theta, np.zeros(DIMENSION)
        if phase < 2:
            central = [(f(anchor + mu * u) - f(anchor - mu * u)) / (2 * mu) for u in us]
            mean = (phase * mean + np.array(central) @ us / size) / (phase + 1)
            expected = mean
        else:
            here = [(f(theta + mu * u) - f(theta)) / mu for u in us]
            there = [(f(anchor + mu * u) - f(anchor)) / mu for u in us]
            expected = (np.array(here) - there) @ us / size + mean
        np.testing.assert_allclose(
            flat(estimate.gradient), expected, rtol=1e-3, atol=1e-4
        )


# --- Coordinates -------------------------------------------------------------------


@pytest.mark.parametrize("uniform", [slow(1.0), 0.25])
def test_coordinates_by_importance(uniform):
    """Mean and second moment, in closed form."""
    size, exact = 3, derivative(flat(PARAMS))
    estimator = zo.contrib.coordinate_wise(size, 0.1, uniform_fraction=uniform)
    scores = np.abs(exact)
    scores[1] = np.nan
    state = estimator.init(PARAMS)._replace(scores=jnp.asarray(scores, jnp.float32))

    got = gradients(estimator, state, jax.random.split(jax.random.key(1), 8000))
    error = got.std(0) / np.sqrt(len(got))
    assert (abs(got.mean(0) - exact) <= 4 * error + 1e-4).all()
    scores[1] = np.nanmean(scores)
    p = (1 - uniform) * scores / scores.sum() + uniform / DIMENSION
    second = np.sum(exact**2 / p) / size + (1 - 1 / size) * np.sum(exact**2)
    squares = np.sum(got**2, 1)
    error = squares.std() / np.sqrt(len(squares))
    assert abs(squares.mean() - second) < 4 * error


def test_scores_follow_what_is_seen():
    steps = Steps(zo.contrib.coordinate_wise(2, 0.1, decay=0.75))
    expected = np.full(DIMENSION, np.nan)
    for i in range(4):
        params = moved(PARAMS, 0.2 * i)
        _, _, _, us = steps(i, params)
        slopes = abs(derivative(flat(params)))
        for k in set(np.argmax(us, 1)):
            old = expected[k]
            new = 0.75 * old + 0.25 * slopes[k]
            expected[k] = slopes[k] if np.isnan(old) else new
    unseen = np.isnan(expected)
    scores = np.asarray(steps.state.scores)
    np.testing.assert_allclose(scores[~unseen], expected[~unseen], rtol=1e-3)
    assert np.all(scores[unseen] == np.finfo(np.float32).max)


# --- Votes, and perturbations with a momentum --------------------------------------


@pytest.mark.parametrize("distribution", [zo.gaussian(), slow(zo.rademacher())])
def test_majority_vote(distribution):
    mu, size = 0.1, 5
    steps = Steps(zo.contrib.majority_vote(distribution, size, mu))
    estimate, _, values, us = steps(0)
    votes = np.sign((values[1:] - values[0])[:, None] * us)
    np.testing.assert_allclose(flat(estimate.gradient), votes.mean(0), atol=1e-6)
    # A failed worker has no vote.
    failed = np.append(values[:-1], np.inf)
    estimate, *_ = steps(0, values=lambda at: failed)
    np.testing.assert_allclose(flat(estimate.gradient), votes[:-1].mean(0), atol=1e-6)
    assert int(estimate.num_values) == size


def test_momentum_perturbation():
    """Algorithm 1 of ZO-AdaMU, with one draw for the sum of two."""
    mu, b1, alpha, distribution = 0.1, 0.4, 0.7, zo.sphere()
    steps = Steps(zo.contrib.momentum_perturbation(distribution, mu, b1, alpha))
    deviation = np.sqrt(b1**2 * alpha + (1 - b1) ** 2 * (1 - alpha))
    history = np.zeros(DIMENSION)
    for i in range(4):
        theta = flat(moved(PARAMS, 0.1 * i))
        estimate, at, values, us = steps(i, moved(PARAMS, 0.1 * i))
        m = (1 - b1) * history + deviation * np.sqrt(DIMENSION) * us[0]
        np.testing.assert_allclose(at[0] - theta, mu * m, atol=1e-5)
        np.testing.assert_allclose(at[1] - theta, -mu * m, atol=1e-5)
        slope = (values[0] - values[1]) / (2 * mu)
        np.testing.assert_allclose(
            flat(estimate.gradient), slope * m, rtol=1e-3, atol=1e-4
        )
        history = np.sign(slope) * m
    np.testing.assert_allclose(flat(steps.state.history), history, atol=1e-5)


# --- Lengths and shapes of steps ---------------------------------------------------


def test_normalized_batch():
    """Algorithm 1 of FZOO, whose spread is of the values that are finite."""
    mu, size = 0.1, 4
    steps = Steps(zo.contrib.normalized_batch(Hashed(), size, mu))
    estimate, _, values, us = steps(0)
    expected = (values[1:] - values[0]) @ us / size / np.std(values[1:], ddof=1)
    np.testing.assert_allclose(flat(estimate.gradient), expected, rtol=1e-3)
    failed = np.append(values[:-1], np.inf)
    estimate, *_ = steps(0, values=lambda at: failed)
    spread = np.std(values[1:-1], ddof=1)
    expected = (values[1:-1] - values[0]) @ us[:-1] / (size - 1) / spread
    np.testing.assert_allclose(flat(estimate.gradient), expected, rtol=1e-3)
    estimate, *_ = steps(0, values=lambda at: np.ones(len(at)))
    assert not flat(estimate.gradient).any()


def test_hessian_informed():
    """Algorithm 1 of HiZOO."""
    mu, decay = 0.1, 0.7
    steps = Steps(zo.contrib.hessian_informed(zo.rademacher(), mu, decay))
    h = np.ones(DIMENSION)
    for i in range(4):
        params = moved(PARAMS, 0.1 * i)
        estimate, at, values, _ = steps(i, params)
        w = (at[1] - at[0]) / mu
        u = np.sqrt(h) * w
        np.testing.assert_allclose(abs(u), 1, rtol=1e-4)
        base, above, below = values
        curvature = abs(above + below - 2 * base) / (2 * mu**2)
        h = decay * h + (1 - decay) * curvature * h * u**2
        expected = (above - below) / (2 * mu) * u / np.sqrt(h)
        np.testing.assert_allclose(flat(estimate.gradient), expected, rtol=2e-3)
    np.testing.assert_allclose(flat(steps.state.hessian), h, rtol=2e-3)
    before = steps.state
    steps(4, values=lambda at: np.array([1.0, np.nan, 2.0]))
    chex.assert_trees_all_equal(steps.state, before)


def test_lazy_low_rank():
    """Algorithm 1 of LOZO: the row space of Z stays for a period."""
    mu, rank, period = 0.1, 1, 2
    steps = Steps(zo.contrib.lazy_low_rank(rank, period, mu))
    rows = []
    for i in range(4):
        estimate, at, values, _ = steps(i)
        z = (at[0] - at[1]) / (2 * mu)
        expected = (values[0] - values[1]) / (2 * mu) * z
        np.testing.assert_allclose(flat(estimate.gradient), expected, rtol=1e-3)
        matrix = z[:4].reshape(2, 2)
        np.testing.assert_allclose(np.linalg.det(matrix), 0, atol=1e-4)
        rows.append(matrix[0] / np.linalg.norm(matrix[0]))
    cosines = [abs(rows[i] @ rows[i + 1]) for i in range(3)]
    np.testing.assert_allclose([cosines[0], cosines[2]], 1, atol=1e-4)
    assert cosines[1] < 0.999


def test_lazy_low_rank_is_unbiased():
    estimator = zo.contrib.lazy_low_rank(2, 1, 0.1)
    keys = jax.random.split(jax.random.key(1), 8000)
    got, exact = gradients(estimator, (), keys), derivative(flat(PARAMS))
    assert (abs(got.mean(0) - exact) <= 4.5 * got.std(0) / np.sqrt(len(got))).all()
