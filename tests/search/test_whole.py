"""Steps as the optimizer proposes them, against Optax's own loop."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.searches import descent

ESTIMATOR = zo.forward_difference(Hashed(), num_directions=3)


def loss(x):
    return jnp.sum((x - 1.0) ** 2)


def test_takes_the_steps_of_a_loop_in_optax():
    """The same key draws the same directions."""
    optimizer, key, start = zo.radazo(1e-2), jax.random.key(3), jnp.zeros(5)
    tx = optax.chain(zo.estimate_gradient(ESTIMATOR, key), optimizer)
    init, step = zo.solver(loss, optimizer, ESTIMATOR, zo.search.whole())
    state, params, tx_state = init(start, key), start, tx.init(start)
    with jax.disable_jit():
        for _ in range(3):
            state, info = step(state)
            updates, tx_state = tx.update(None, tx_state, params, value_fn=loss)
            params = optax.apply_updates(params, updates)
            chex.assert_trees_all_equal(state.params, params)
            assert info.outcome == zo.runs.Outcome.TAKEN


def test_is_the_search_of_a_run_that_names_an_optimizer_alone():
    options = {"num_steps": 4, "key": 0, "progress": False}
    named = zo.minimize(
        loss, jnp.zeros(5), zo.radazo(1e-2), ESTIMATOR, zo.search.whole(), **options
    )
    result = zo.minimize(loss, jnp.zeros(5), zo.radazo(1e-2), ESTIMATOR, **options)
    chex.assert_trees_all_equal(result.state, named.state)


@pytest.mark.parametrize("value", [1.0, np.nan, np.inf])
def test_accepts_any_value_and_moves_by_the_direction(value):
    search, params = zo.search.whole(), jnp.array([1.0, -2.0])
    state = search.init(params)
    accepted, state = search.judge(state, params, jnp.float32(value))
    found = descent(jnp.array([0.5, 3.0]), value, 1.0)
    after, _ = search.move(state, params, found)
    assert accepted
    np.testing.assert_array_equal(after, [1.5, 1.0])


def test_a_step_ends_within_the_bounds():
    search, params = zo.search.whole(), jnp.array([0.3, 0.6])

    def project(x):
        return jnp.clip(x, 0.1, 0.7)

    found = descent(jnp.array([-5.0, 5.0]), 1.0, 1.0, project=project)
    after, _ = search.move(search.init(params), params, found)
    np.testing.assert_array_equal(after, np.array([0.1, 0.7], np.float32))


def test_holds_no_parameters():
    assert not jax.tree.leaves(zo.search.whole().init(jnp.zeros(3)))
