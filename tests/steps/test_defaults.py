"""Runs that find the size of their steps: the defaults, and their ends."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.tables import slow

START = jnp.zeros(20)
ESTIMATOR = zo.forward_difference(Hashed(), num_directions=4)


def loss(x):
    return jnp.sum((x - 1.0) ** 2)


def noisy_loss(x, xi):
    return jnp.sum((x - xi) ** 2)


@pytest.mark.parametrize("scale", [1e-4, slow(1e4)])
def test_tunes_nothing_where_nothing_is_named(scale):
    """The result does not depend on the units of the loss."""

    def scaled(x):
        return scale * loss(x)

    start = jnp.zeros(200)
    result = zo.minimize(scaled, start, num_steps=60, progress=False)
    assert result.values[-1] < 0.01 * result.values[0]
    again = zo.minimize(
        scaled,
        start,
        optax.sgd(1.0),
        zo.accelerated(zo.adaptive_difference(zo.orthonormal(), 14)),  # K = √200.
        zo.search.parabolic(),
        num_steps=60,
        key=0,
        progress=False,
    )
    chex.assert_trees_all_equal(result.params, again.params)


def test_is_not_accelerated_behind_another_optimizer():
    result = zo.minimize(
        loss, START, optax.sgd(0.1), num_steps=3, key=0, progress=False
    )
    plain = zo.adaptive_difference(zo.orthonormal())
    again = zo.minimize(
        loss, START, optax.sgd(0.1), plain, num_steps=3, key=0, progress=False
    )
    chex.assert_trees_all_equal(result.params, again.params)


def test_tunes_nothing_on_minibatches():
    result = zo.minimize(
        noisy_loss,
        START,
        num_steps=60,
        sample=lambda key: 1 + 0.01 * jax.random.normal(key, (20,)),
        progress=False,
    )
    assert result.values[-1] < 0.1 * result.values[0]


def cliff(x, xi=None):
    """Finite only near the start."""
    value = jnp.sum((x + 1.0) ** 2)
    return jnp.where(value < 18.0, jnp.nan, value)


# R-AdaZO without a learning rate.
MEASURED = zo.radazo(1.0), ESTIMATOR, zo.search.parabolic(extra_evaluations=1)
NAMED_NONE = (None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kwargs"),
    [
        (NAMED_NONE, {}),
        (MEASURED, {}),
        (NAMED_NONE, {"journal": "run.jsonl"}),
    ],
)
def test_a_last_step_to_nothing_is_taken_back(method, kwargs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    at_most, nothing = loss(START - 2.0), 0
    for num_steps in range(1, 30, 4 if kwargs else 1):
        result = zo.minimize(
            cliff,
            START,
            *method,
            num_steps=num_steps,
            progress=False,
            **kwargs,
        )
        value, last = cliff(result.params), cliff(result.state.params)
        nothing += int(jnp.isnan(last))
        assert value <= at_most
        assert jnp.isnan(last) or value <= last
    assert nothing


@pytest.mark.parametrize("method", [NAMED_NONE, slow(MEASURED)])
def test_a_run_leaves_a_start_without_a_value(method):
    def fun(x):
        return jnp.where(jnp.all(x == 0), jnp.nan, loss(x))

    result = zo.minimize(fun, START, *method, num_steps=60, progress=False)
    assert result.state.failures.skipped == 0
    assert result.values[-1] < 0.2 * loss(START)


@pytest.mark.parametrize(
    "method", [NAMED_NONE, (optax.sgd(1.0), ESTIMATOR, zo.search.parabolic())]
)
def test_a_run_continues_where_the_parameters_never_have_a_value(method):
    """Steps are then as long as the first one, by the slope alone."""

    def fun(x):
        values = np.sum((x - 1.0) ** 2, axis=-1)
        values[np.all(x == x[:1], axis=-1)] = np.nan
        return values

    result = zo.minimize_black_box(
        fun, np.asarray(START), *method, num_steps=80, batched=True, progress=False
    )
    assert result.state.failures.skipped == 0
    assert result.values[-1] < 0.6 * loss(START)


def test_a_gradient_from_where_a_step_is_taken_back_is_forgotten():
    search = zo.search.parabolic(extra_evaluations=1, initial_step_size=1e3)
    init, step = zo.solver(loss, zo.radazo(1.0), ESTIMATOR, search)
    step, states, outcomes = jax.jit(step), [init(START, 0)], []
    for _ in range(3):
        state, info = step(states[-1])
        states.append(state)
        outcomes.append(int(info.outcome))
    taken, rejected = zo.runs.Outcome.TAKEN, zo.runs.Outcome.REJECTED
    assert outcomes == [taken, rejected, taken]
    chex.assert_trees_all_equal(states[2].optimizer_state, states[1].optimizer_state)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        ((0.0,), "learning_rate must be a finite number > 0; got 0.0"),
        ((0.1, 0), "num_steps must be an int ≥ 1; got 0"),
        ((None, 100), "num_steps must be None without learning_rate; got 100"),
    ],
)
def test_the_rate_on_minibatches_is_checked(rate, message):
    with pytest.raises(ValueError, match=message):
        zo.default_method(START, *rate)
