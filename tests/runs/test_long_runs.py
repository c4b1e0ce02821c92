"""Counts near the largest that they can be."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import run, traced

MOST = 2**31 - 1
START = np.zeros(5, np.float32)
OPTIMIZER = zo.zo_sgd(1e-2)
ESTIMATOR = zo.forward_difference(zo.rademacher(), num_directions=3)


def loss(x):
    return jnp.sum((x - 1) ** 2)


def at(step, **failures):
    """The state of a run after so many steps."""
    state = zo.ask_tell(START, OPTIMIZER, ESTIMATOR).state
    counts = {name: jnp.int32(count) for name, count in failures.items()}
    failed = state.failures._replace(**counts)
    return state._replace(step=jnp.int32(step), failures=failed)


def train(num_steps, state, fun=loss, optimizer=OPTIMIZER):
    return traced(fun, START, num_steps, (optimizer, ESTIMATOR), state=state)


def test_the_last_steps_that_can_be_counted_are_taken():
    result = train(3, at(MOST - 3))
    assert int(result.state.step) == MOST
    assert len(result.values) == 3


@pytest.mark.parametrize("num_steps", [4, 10**18])
def test_a_run_that_would_be_too_long_is_refused(num_steps):
    """Beyond, each step would draw the directions of the last one."""
    with pytest.raises(ValueError, match="num_steps must end a run before 2"):
        train(num_steps, at(MOST - 3))
    with pytest.raises(ValueError, match=f"got {num_steps} after {MOST - 3}"):
        method = OPTIMIZER, ESTIMATOR
        run(lambda x: 0.0, START, num_steps, method, state=at(MOST - 3))


def test_no_step_is_told_that_cannot_be_counted():
    run = zo.ask_tell(START, OPTIMIZER, ESTIMATOR, state=at(MOST - 1))
    run.ask()
    run.tell(np.zeros(4))
    assert int(run.state.step) == MOST
    run.ask()
    with pytest.raises(ValueError, match="before 2"):
        run.tell(np.zeros(4))


def test_failures_are_counted_up_to_the_last_number():
    """A run in which some values fail continues."""

    def sometimes(x):
        return jnp.where(x[0] > 1e-9, jnp.inf, loss(x))

    standing = zo.zo_sgd(1e-20)
    result = train(20, at(0, evaluations=MOST - 10), sometimes, standing)
    assert len(result.values) == 20
    assert int(result.state.failures.evaluations) == MOST - 1


def test_numbers_of_directions_begin_again_with_another_key():
    """Directions without replacement have 2³² numbers, of which a step takes 3."""
    distribution, key = zo.coordinate(replace=False), jax.random.key(1)
    most = 2**32 // 3

    def drawn(step):
        draw = zo.estimators.Draw(jax.random.key(2), key, jnp.int32(step))
        points = zo.estimators.sample_points(distribution, draw, 3, [0.1], START)
        return points.directions

    for step in (0, 1, most - 1, most, MOST):
        found = drawn(step)
        expected = 3 * (step % most) + np.arange(3)
        np.testing.assert_array_equal(found.number, expected.astype(np.uint32))
        cycle = step // most
        own = jax.random.fold_in(key, cycle) if cycle else key
        chex.assert_trees_all_equal(found.key[0], own)
