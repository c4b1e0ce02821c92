"""Runs of Python functions keep the precision of their parameters."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.short_runs import run, traced
from tests.helpers.tables import slow

START = np.zeros(3)
JULIAN_DATE = 2459123.44  # It has more digits than float32.


def distance(x):
    return float(np.sum((x - 1 / 3) ** 2))


def pickled(state):
    return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy, slow(lambda x: x)])
def test_a_state_continues_in_its_precision(copied):
    whole = run(distance, START, 6)
    rest = run(distance, START, 3, state=copied(run(distance, START, 3).state))
    np.testing.assert_array_equal(rest.params, whole.params)
    assert rest.params.dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_and_states_are_numpy_arrays(dtype):
    result = run(distance, START.astype(dtype))
    assert isinstance(result.params, np.ndarray)
    assert result.params.dtype == result.best.params.dtype == dtype
    leaves = jax.tree.leaves(result.state)
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floats and all(isinstance(x, np.ndarray) for x in floats)
    assert {x.dtype for x in floats} == {np.dtype(dtype)}


def test_a_state_of_another_precision_is_refused():
    state = run(distance, START.astype(np.float32)).state
    with pytest.raises((TypeError, ValueError), match=r"float64.*float32|float32.*64"):
        run(distance, START, state=state)


@pytest.mark.parametrize(
    "start", [slow(JULIAN_DATE), {"t0": [JULIAN_DATE, 0.1]}], ids=str
)
def test_python_floats_are_float64_for_a_python_function(start):
    seen = []

    def total(params):
        seen.append(np.array(jax.tree.leaves(params)))
        return float(np.sum(seen[-1]))

    result = run(total, start, 1)
    np.testing.assert_array_equal(seen[0], jax.tree.leaves(start))
    assert {x.dtype for x in jax.tree.leaves(result.params)} == {np.dtype(float)}


@pytest.mark.slow
def test_python_floats_are_float32_for_a_traced_function():
    result = traced(lambda p: p["t0"] ** 2, {"t0": 0.5}, 1)
    assert result.params["t0"].dtype == np.float32
