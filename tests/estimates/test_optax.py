"""`estimate_gradient`: the zeroth-order step as an Optax chain."""

import inspect
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.tables import every, jit

ESTIMATOR = zo.forward_difference(Hashed(), num_directions=4)
ONE_DIRECTION = zo.forward_difference(Hashed(), num_directions=1)


def loss(params):
    return jnp.sum((params["w"] - 1.0) ** 2) + jnp.sum(params["b"] ** 2)


PARAMS = {"w": jnp.zeros((2, 3)), "b": jnp.ones(2)}


def test_emits_the_estimate_and_ignores_what_comes_in():
    """The directions equal the directions of the step of `solver`."""
    run_key = jax.random.key(5)
    tx = zo.estimate_gradient(ESTIMATOR, run_key)
    state = tx.init(PARAMS)
    junk = jax.tree.map(lambda p: p + 100.0, PARAMS)
    gradients = []

    @jit
    def step(key, state):
        return (
            zo.value_and_grad(loss, ESTIMATOR)(key, PARAMS),
            tx.update(junk, state, PARAMS, value_fn=loss, other=1),
            tx.update(None, state, PARAMS, obj_fn=loss)[0],
        )

    for t in range(3):
        key, _ = jax.random.split(jax.random.fold_in(run_key, t))
        (value, expected), (updates, new_state), again = step(key, state)
        chex.assert_trees_all_equal(updates, expected)
        assert float(new_state.value) == float(value)
        chex.assert_trees_all_equal(updates, again)
        chex.assert_trees_all_equal(new_state.key, run_key)
        assert int(new_state.step) == t + 1
        gradients.append(updates["w"])
        state = new_state
    assert (gradients[0] != gradients[1]).any() and (gradients[1] != gradients[2]).any()


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
        zo.estimate_gradient(zo.forward_difference(num_directions=4), 0),
        optax.clip_by_global_norm(10.0),
        zo.radazo(2e-2),
    )
    params, state = run(tx, PARAMS, tx.init(PARAMS), 300)
    assert loss(params) < 0.05 * loss(PARAMS)
    np.testing.assert_allclose(latest_value(state), loss(params), atol=0.2)
    assert latest_value(tx.init(PARAMS)) == jnp.inf


def latest_value(state):
    """Evaluates the expression in the docstring of `estimate_gradient`."""
    text = inspect.getdoc(zo.estimate_gradient)
    (expression,) = re.findall(r"latest value is\s+`(.*?)`", text)
    return eval(expression, {"optax": optax, "state": state})


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
    chex.assert_trees_all_equal(got, expected)


def test_missing_arguments():
    tx = zo.estimate_gradient(ESTIMATOR, 0)
    state = tx.init(PARAMS)
    with pytest.raises(TypeError, match=r"value_fn must be passed.*got None"):
        tx.update(PARAMS, state, PARAMS)
    with pytest.raises(TypeError, match=r"value_fn must be passed.*got 3\.0"):
        tx.update(PARAMS, state, PARAMS, value_fn=3.0)
    with pytest.raises(ValueError, match="params must be passed"):
        tx.update(PARAMS, state, value_fn=loss)


MASK = {"w": True, "b": False}
WRAPPERS = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "flatten": optax.flatten,
    "masked": lambda tx: optax.masked(tx, MASK),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "partition": lambda tx: optax.partition(
        {True: tx, False: optax.set_to_zero()}, MASK
    ),
}


def updater(tx, fn=loss):
    """The update of a transformation at PARAMS, compiled."""

    @jit
    def update(updates, state):
        return tx.update(updates, state, PARAMS, value_fn=fn)

    # Optax's MultiSteps divides a float by an integer.
    with jax.numpy_dtype_promotion("standard"):
        return update.lower(PARAMS, tx.init(PARAMS)).compile()


@pytest.mark.parametrize("name", every(WRAPPERS, "apply_if_finite", "MultiSteps"))
def test_a_wrapper_after_it_gets_the_gradients(name):
    wrapped = optax.with_extra_args_support(WRAPPERS[name](zo.radazo(1e-2)))
    estimate = zo.estimate_gradient(ONE_DIRECTION, 0)
    chained = optax.chain(estimate, wrapped)
    all_three = chained, estimate, wrapped

    @jit
    def step(states):
        def update(tx, updates, state):
            return tx.update(updates, state, PARAMS, value_fn=loss)

        updates, chained_state = update(chained, PARAMS, states[0])
        gradient, estimate_state = update(estimate, PARAMS, states[1])
        expected, wrapped_state = update(wrapped, gradient, states[2])
        return updates, expected, (chained_state, estimate_state, wrapped_state)

    states = tuple(tx.init(PARAMS) for tx in all_three)
    for _ in range(2):
        # Optax's MultiSteps divides a float by an integer.
        with jax.numpy_dtype_promotion("standard"):
            updates, expected, states = step(states)
        chex.assert_trees_all_close(updates, expected, rtol=1e-5)
    assert any(jnp.any(u != 0) for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", ["masked", "partition"])
def test_a_wrapper_around_it_that_masks_is_refused(name):
    estimate = zo.estimate_gradient(ESTIMATOR, 0)
    with pytest.raises(TypeError, match=r"params must be the whole.*\['b'\].*after"):
        WRAPPERS[name](estimate).init(PARAMS)
    masked = {"w": PARAMS["w"], "b": optax.MaskedNode()}
    with pytest.raises(TypeError, match=r"params must be the whole.*\['b'\].*after"):
        estimate.update(None, estimate.init(PARAMS), masked, value_fn=loss)


def test_a_gradient_that_is_not_finite_is_skipped_after_it_alone():
    finite = WRAPPERS["apply_if_finite"]
    estimate = zo.estimate_gradient(ONE_DIRECTION, 0)
    after = optax.chain(estimate, finite(zo.radazo(1e-2)))
    around = finite(optax.chain(estimate, zo.radazo(1e-2)))
    for tx, expected in ((after, 0.0), (around, jnp.nan)):
        update = updater(tx, lambda params: jnp.nan * loss(params))
        updates, _ = update(PARAMS, tx.init(PARAMS))
        for leaf in jax.tree.leaves(updates):
            np.testing.assert_array_equal(leaf, jnp.full_like(leaf, expected))


def test_flatten_around_it_flattens_what_value_fn_gets():
    shapes = []

    def value_fn(params):
        shapes.append(jax.tree.map(jnp.shape, params))
        return optax.tree.norm(params, squared=True)

    updater(optax.flatten(zo.estimate_gradient(ONE_DIRECTION, 0)), value_fn)
    assert set(shapes) == {(8,)}


# Operation by operation, each shape is compiled anew.
ONE_LEAF = {"w": jnp.zeros((2, 3))}


def lossy(params):
    """A loss that has no value in some places."""
    value = jnp.sum((params["w"] - 1.0) ** 2)
    return jnp.where(value > 6.5, jnp.nan, value)


@pytest.mark.slow
def test_takes_the_steps_of_solver_with_an_inner_transformation():
    """Bit for bit, among them steps that are skipped.

    Without `jit`, since two programs may round a product and a sum together.
    """
    inner, key = zo.radazo(0.3), jax.random.key(9)
    tx = zo.estimate_gradient(ESTIMATOR, key, inner)
    init, step = zo.solver(lossy, inner, ESTIMATOR)

    state, params, tx_state = init(ONE_LEAF, key), ONE_LEAF, tx.init(ONE_LEAF)
    apart = []
    with jax.disable_jit():
        for _ in range(4):
            state, info = step(state)
            updates, tx_state = tx.update(None, tx_state, params, value_fn=lossy)
            params = optax.apply_updates(params, updates)
            apart.append(bool(info.skipped))
            chex.assert_trees_all_equal(params, state.params)
            chex.assert_trees_all_equal(tx_state.inner_state, state.optimizer_state)
            np.testing.assert_array_equal(tx_state.value, info.value)
    assert any(apart) and not all(apart), apart


def test_a_step_without_a_usable_value_is_skipped():
    """With an inner transformation; its moments would move the parameters."""
    tx = zo.estimate_gradient(ESTIMATOR, 0, zo.radazo(1e-2))

    @jit
    def update(state, factor):
        return tx.update(None, state, PARAMS, value_fn=lambda p: factor * loss(p))

    updates, state = update(tx.init(PARAMS), 1.0)
    assert all(jnp.all(u != 0) for u in jax.tree.leaves(updates))
    updates, after = update(state, jnp.nan)
    chex.assert_trees_all_equal(updates, optax.tree.zeros_like(PARAMS))
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    assert int(after.step) == 2
