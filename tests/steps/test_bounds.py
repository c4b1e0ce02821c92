"""Bounds: what is read as a box, and what would be read as another one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import radazo_jax as zo

_PAIRS = [(0, 5), (6, 10)]
_LOWER, _UPPER = np.transpose(_PAIRS).astype(np.float32)
_START = np.array([2.0, 7.0], np.float32)
_METHOD = (zo.zo_sgd(0.1), zo.central_difference(num_directions=2))


def _away(x):
    """Its unbounded minimum violates a bound of each parameter."""
    return ((x - np.array([9.0, 2.0], np.float32)) ** 2).sum()


def _minimized(bounds):
    return zo.minimize(
        _away, _START, *_METHOD, num_steps=60, bounds=bounds, progress=False
    )


def _black_box(bounds):
    return zo.minimize_black_box(
        _away, _START, *_METHOD, num_steps=60, bounds=bounds, progress=False
    )


def _told(bounds):
    run = zo.ask_tell(_START, *_METHOD, bounds=bounds)
    for _ in range(60):
        run.tell([_away(x) for x in run.ask()])
    return run


def _solved(bounds):
    init, step = zo.solver(_away, *_METHOD, bounds=bounds)
    state, step = init(_START, jax.random.key(0)), jax.jit(step)
    for _ in range(60):
        state, _ = step(state)
    return state


RUNS = pytest.mark.parametrize("run", [_minimized, _black_box, _told, _solved])


@RUNS
@pytest.mark.parametrize(
    "pairs",
    [_PAIRS, tuple(_PAIRS), [[0, 5], [6, 10]], np.array(_PAIRS), jnp.array(_PAIRS)],
    ids=["tuples", "tuple of tuples", "lists", "NumPy", "JAX"],
)
def test_a_pair_for_each_parameter_is_refused(run, pairs):
    with pytest.raises(ValueError, match=r"tuple\(np\.transpose\(bounds\)\)") as error:
        run(pairs)
    assert "\n" not in str(error.value)


def test_replay_and_distribute_refuse_pairs(tmp_path):
    path = tmp_path / "run.jsonl"
    zo.minimize_black_box(
        _away, _START, *_METHOD, num_steps=2, journal=path, progress=False
    )
    with pytest.raises(ValueError, match=r"np\.transpose"):
        zo.replay(path, _START, *_METHOD, bounds=_PAIRS)
    client = type("Client", (), dict(scheduler=0, rpc=0, run=0, sync=0))()
    client.asynchronous = False
    with pytest.raises(ValueError, match=r"np\.transpose"):
        zo.distribute(lambda: _away, _START, *_METHOD, client=client, bounds=_PAIRS)


@RUNS
@pytest.mark.parametrize(
    "bounds",
    [
        tuple(np.transpose(_PAIRS)),
        (_LOWER, _UPPER),
        (jnp.array(_LOWER), jnp.array(_UPPER)),
        ([0, 6], [5, 10]),
        scipy.optimize.Bounds([0, 6], [5, 10]),
        scipy.optimize.Bounds(lb=[0, 6], ub=np.array([5.0, 10.0]), keep_feasible=True),
    ],
    ids=["the advice", "NumPy", "JAX", "lists", "SciPy", "SciPy's options"],
)
def test_runs_end_at_the_corner_of_the_box(run, bounds):
    np.testing.assert_array_equal(run(bounds).params, [5, 6])


@pytest.mark.parametrize("bounds", [(0, 8), (0.0, 8.0), scipy.optimize.Bounds(0, 8)])
def test_numbers_bound_every_parameter_of_a_tree(bounds):
    def fun(p):
        return jnp.sum((p["a"] - 9) ** 2) + (p["b"] + 1) ** 2

    start = {"a": np.full(2, 7, np.float32), "b": np.float32(1)}
    every = zo.central_difference(zo.coordinate(replace=False), num_directions=3)
    result = zo.minimize(
        fun, start, zo.zo_sgd(0.1), every, num_steps=60, bounds=bounds, progress=False
    )
    np.testing.assert_array_equal(result.params["a"], [8, 8])
    assert result.params["b"] == 0


def test_tuples_bound_parameters_that_are_tuples():
    def fun(p):
        return (p[0] - 9) ** 2 + (p[1] - 2) ** 2

    start = (np.float32(2), np.float32(7))
    result = zo.minimize(
        fun, start, *_METHOD, num_steps=100, bounds=((0, 6), (5, 10)), progress=False
    )
    assert [float(p) for p in result.params] == [5, 6]


def test_an_unbounded_side_of_scipy_is_unbounded():
    bounds = scipy.optimize.Bounds([-np.inf, 6], [5, np.inf])
    np.testing.assert_array_equal(_minimized(bounds).params, [5, 6])
