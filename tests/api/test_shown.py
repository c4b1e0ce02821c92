"""The printed forms of results, states and histories."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from radazo_jax._src.base import shown
from tests.helpers.compare import Hashed
from tests.helpers.short_runs import called

SIZE = 500
START = {"w": np.ones((50, SIZE // 50), np.float32), "b": np.ones(3, np.float32)}


def traced(params):
    return jnp.sum(params["w"] ** 2) + jnp.sum(params["b"] ** 2)


@pytest.fixture(scope="module")
def results():
    """A compiled run, a black box, and the state of ask and tell."""
    estimator = zo.forward_difference(Hashed(), 2)
    method = optax.inject_hyperparams(optax.sgd)(1e-3), estimator
    options = {"num_steps": 40, "progress": False}

    def outside(params):
        return params["w"].sum(), [params["w"]]  # Anything besides the value.

    box = called(outside, START, *method, **options)
    told = zo.ask_tell(START, *method)
    return zo.train(traced, START, *method, **options), box, told


def test_say_the_steps_the_values_and_the_shapes(results):
    compiled, box, told = results
    first, last = compiled.values[0], compiled.values[-1]
    shapes = "{b: float32[3], w: float32[50, 10]}"
    assert f"values={first:.6g} to {last:.6g} in 40 steps" in repr(compiled)
    assert f"params={shapes}" in repr(compiled)
    assert f"step=40, params={shapes}" in repr(compiled.state)
    assert "learning_rate" in repr(compiled.history)
    assert f"value={box.best.value:.6g}, number={box.best.number}" in repr(box.best)
    assert f"num_evaluations={box.num_evaluations}" in repr(box)
    assert f"step=0, params={shapes}" in repr(told) and "best=Best(" in repr(told)


@pytest.mark.parametrize(
    "values, text",
    [
        ([3, 1, 2], "3 to 2 in 3 steps, lowest 1 at 1"),
        ([3, np.nan, 1, 1], "3 to 1 in 4 steps"),
        ([np.nan, 2, 4], "nan to 4 in 3 steps, lowest 2 at 1"),
        ([np.nan, np.nan], "nan to nan in 2 steps"),
    ],
    ids=str,
)
def test_a_lowest_value_that_is_not_the_last_one_has_its_place(values, text):
    assert shown.series(np.array(values, float)) == text


def test_arrays_without_values_are_printed(results):
    """Traced, abstract, deleted, and trees of what is no array."""
    _, box, told = results
    state = told._stepper.state
    shapes = "params={b: float32[3], w: float32[50, 10]}"
    seen = []

    def record(state):
        seen.append(repr(state))
        return state.step

    jax.jit(record)(state)
    seen.append(repr(jax.eval_shape(lambda: state)))
    copies = jax.tree.map(jnp.copy, state)
    for leaf in jax.tree.leaves(copies):
        leaf.delete()
    seen.append(repr(copies))
    for text in seen:
        assert "step=int32[]" in text and shapes in text
    assert "step=None" in repr(jax.tree.map(lambda x: None, box.state))
    assert repr(zo.runs.History.of([])) == "History(value=float64[0], scalars=[])"


def test_remain_pytrees(results):
    for found in results:
        leaves, structure = jax.tree.flatten(found)
        assert type(jax.tree.unflatten(structure, leaves)) is type(found)
