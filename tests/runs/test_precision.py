"""Runs of Python functions keep the precision of their parameters."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo

START = np.zeros(3)
MINIMUM = np.full(3, 1 / 3)
# The same objects, so that they compile once.
METHOD = zo.zo_sgd(0.1), zo.forward_difference(zo.rademacher(), num_directions=1)
JULIAN_DATE = 2459123.44  # It has more digits than float32.


def fun(x):
    return float(np.sum((x - MINIMUM) ** 2))


def run(fun=fun, start=START, steps=3, **options):
    return zo.minimize_black_box(
        *(fun, start, *METHOD),
        num_steps=steps,
        key=0,
        progress=False,
        **options,
    )


LOSES = pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="states hold JAX arrays, which unpickling outside of enable_x64 rounds",
)


@pytest.mark.parametrize(
    "copied",
    [
        lambda state: state,
        pytest.param(lambda state: pickle.loads(pickle.dumps(state)), marks=LOSES),
        copy.deepcopy,
    ],
    ids=["itself", "pickled", "deep copy"],
)
def test_a_state_continues_in_its_precision(copied):
    whole = run(steps=6)
    rest = run(steps=3, state=copied(run(steps=3).state))
    np.testing.assert_array_equal(rest.params, whole.params)
    assert rest.params.dtype == np.float64


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="results hold JAX arrays")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_and_states_are_numpy_arrays(dtype):
    result = run(start=START.astype(dtype))
    assert isinstance(result.params, np.ndarray)
    assert result.params.dtype == result.best.params.dtype == dtype
    floats = [
        leaf
        for leaf in jax.tree.leaves(result.state)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert floats and all(isinstance(leaf, np.ndarray) for leaf in floats)
    assert {leaf.dtype for leaf in floats} == {np.dtype(dtype)}


@pytest.mark.xfail(
    strict=True,
    raises=UserWarning,
    reason="results are JAX arrays, and computed with in float32",
)
def test_results_are_computed_with_in_their_precision():
    result = run()
    exact = np.array([float(x) for x in result.params]) - 1 / 3
    np.testing.assert_array_equal(result.params - 1 / 3, exact)


@pytest.mark.xfail(
    strict=True,
    raises=pytest.fail.Exception,
    reason="the parameters of the state replace those of the call",
)
def test_a_state_of_another_precision_is_refused():
    state = run(start=START.astype(np.float32)).state
    with pytest.raises((TypeError, ValueError), match=r"float64.*float32|float32.*64"):
        run(start=START, state=state)


@pytest.mark.parametrize(
    "start",
    [
        JULIAN_DATE,
        pytest.param({"t0": JULIAN_DATE}, marks=pytest.mark.slow),
        pytest.param([JULIAN_DATE, 0.1], marks=pytest.mark.slow),
        {"t0": [JULIAN_DATE, 0.1]},
        pytest.param(np.array([JULIAN_DATE, 0.1]), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_python_floats_are_float64_for_a_python_function(start, request):
    if not isinstance(start, np.ndarray):
        request.applymarker(
            pytest.mark.xfail(
                strict=True,
                raises=AssertionError,
                reason="Python floats become float32",
            )
        )
    seen = []

    def fun(params):
        seen.append(np.array(jax.tree.leaves(params)))
        return float(np.sum(seen[-1]))

    result = run(fun, start, steps=1)
    np.testing.assert_array_equal(seen[0], jax.tree.leaves(start))
    assert {leaf.dtype for leaf in jax.tree.leaves(result.params)} == {np.dtype(float)}


def test_python_floats_are_float32_for_a_traced_function():
    result = zo.minimize(
        lambda p: p["t0"] ** 2,
        *({"t0": 0.5}, *METHOD),
        num_steps=1,
        key=0,
        progress=False,
    )
    assert result.params["t0"].dtype == np.float32
