"""``estimate_gradient``: the zeroth-order step as an Optax chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo

ESTIMATOR = zo.forward_difference(num_directions=4)


def loss(params):
    return jnp.sum((params["w"] - 1.0) ** 2) + jnp.sum(params["b"] ** 2)


PARAMS = {"w": jnp.zeros((2, 3)), "b": jnp.ones(2)}


def test_emits_the_estimate_and_ignores_what_comes_in():
    tx = zo.estimate_gradient(ESTIMATOR, jax.random.key(5))
    state = tx.init(PARAMS)
    junk = jax.tree.map(lambda p: p + 100.0, PARAMS)
    for _ in range(3):
        _, subkey = jax.random.split(state.key)
        value, expected = zo.value_and_grad(loss, ESTIMATOR)(subkey, PARAMS)
        updates, new_state = tx.update(junk, state, PARAMS, value_fn=loss, other=1)
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
        assert float(new_state.value) == float(value)
        again, _ = tx.update(None, state, PARAMS, value_fn=loss)
        jax.tree.map(np.testing.assert_array_equal, updates, again)
        assert (
            jax.random.key_data(new_state.key) != jax.random.key_data(state.key)
        ).any()
        state = new_state


def run(tx, params, state, num_steps):
    @jax.jit
    def step(params, state):
        updates, state = tx.update(params, state, params, value_fn=loss)
        return optax.apply_updates(params, updates), state

    for _ in range(num_steps):
        params, state = step(params, state)
    return params, state


def test_a_chain_minimizes_and_reports_its_value():
    tx = optax.chain(
        zo.estimate_gradient(ESTIMATOR, 0),
        optax.clip_by_global_norm(10.0),
        zo.radazo(2e-2),
    )
    params, state = run(tx, PARAMS, tx.init(PARAMS), 300)
    assert loss(params) < 0.05 * loss(PARAMS)
    np.testing.assert_allclose(optax.tree.get(state, "value"), loss(params), atol=0.2)
    assert optax.tree.get(tx.init(PARAMS), "value") == jnp.inf


def test_a_checkpoint_of_the_state_is_a_checkpoint_of_the_run(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx = optax.chain(zo.estimate_gradient(ESTIMATOR, 0), zo.radazo(2e-2))
    params, state = run(tx, PARAMS, tx.init(PARAMS), 5)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", {"params": params, "state": state})
        checkpointer.wait_until_finished()
        like = jax.eval_shape(lambda: {"params": PARAMS, "state": tx.init(PARAMS)})
        restored = checkpointer.restore(tmp_path / "run", like)
    expected, _ = run(tx, params, state, 5)
    got, _ = run(tx, restored["params"], restored["state"], 5)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_inject_hyperparams_and_schedules():
    def factory(learning_rate, key):
        return optax.chain(
            zo.estimate_gradient(ESTIMATOR, key), zo.radazo(learning_rate)
        )

    with jax.numpy_dtype_promotion("standard"):
        tx = optax.inject_hyperparams(factory)(
            learning_rate=optax.linear_schedule(1e-1, 1e-2, 10), key=3
        )
        state = tx.init(PARAMS)
        updates, state = tx.update(PARAMS, state, PARAMS, value_fn=loss)
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


def test_missing_arguments():
    tx = zo.estimate_gradient(ESTIMATOR, 0)
    state = tx.init(PARAMS)
    with pytest.raises(TypeError, match=r"value_fn must be passed.*got None"):
        tx.update(PARAMS, state, PARAMS)
    with pytest.raises(TypeError, match=r"value_fn must be passed.*got 3\.0"):
        tx.update(PARAMS, state, PARAMS, value_fn=3.0)
    with pytest.raises(ValueError, match="params must be passed"):
        tx.update(PARAMS, state, value_fn=loss)


def test_bad_construction():
    with pytest.raises(TypeError, match="estimator must be a GradientEstimator"):
        zo.estimate_gradient(zo.radazo(1e-3), 0)
    with pytest.raises(TypeError, match="key must be"):
        zo.estimate_gradient(ESTIMATOR, None)
    with pytest.raises(ValueError, match="rbg"):
        zo.estimate_gradient(ESTIMATOR, jax.random.key(0, impl="rbg"))


def test_parameters_that_changed_since_init():
    tx = optax.chain(zo.estimate_gradient(ESTIMATOR, 0), zo.radazo(1e-2))
    state = tx.init(PARAMS)
    other = {**PARAMS, "c": jnp.ones(1)}
    with pytest.raises(ValueError, match=r"tree structure.*'c'"):
        tx.update(other, state, other, value_fn=loss)
