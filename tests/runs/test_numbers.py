"""Precision, floating-point errors, flags that look for mistakes, and large counts."""

import contextlib
import copy
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers import short_runs
from tests.helpers.compare import Hashed
from tests.helpers.short_runs import run, traced
from tests.helpers.tables import slow

WIDE = np.zeros(3)
JULIAN_DATE = 2459123.44  # It has more digits than float32.


def distance(x):
    return float(np.sum((x - 1 / 3) ** 2))


def pickled(state):
    return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy, slow(lambda x: x)])
def test_a_state_continues_in_its_precision(copied):
    whole = run(distance, WIDE, 6)
    rest = run(distance, WIDE, 3, state=copied(run(distance, WIDE, 3).state))
    np.testing.assert_array_equal(rest.params, whole.params)
    assert rest.params.dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_and_states_are_numpy_arrays(dtype):
    result = run(distance, WIDE.astype(dtype))
    assert isinstance(result.params, np.ndarray)
    assert result.params.dtype == result.best.params.dtype == dtype
    leaves = jax.tree.leaves(result.state)
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floats and all(isinstance(x, np.ndarray) for x in floats)
    assert {x.dtype for x in floats} == {np.dtype(dtype)}


def test_a_state_of_another_precision_is_refused():
    state = run(distance, WIDE.astype(np.float32)).state
    with pytest.raises((TypeError, ValueError), match=r"float64.*float32|float32.*64"):
        run(distance, WIDE, state=state)


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


# --- NumPy raises ---------------------------------------------------------------


HASHED = (zo.zo_sgd(1e-2), zo.forward_difference(Hashed(), num_directions=3))
ONES = np.ones(3, np.float32)
# Below and above what float32 can hold, and its subnormal numbers.
FACTORS = 1e-300, 1e-44, 1e39


RAISING = pytest.mark.usefixtures("raising")


@pytest.fixture
def raising():
    with np.errstate(all="raise"):
        yield


@RAISING
@pytest.mark.parametrize(
    ("factor", "dtype"),
    [
        *((factor, np.float32) for factor in FACTORS),
        *(slow(factor, np.float64) for factor in FACTORS),
    ],
)
def test_a_black_box_runs(tmp_path, factor, dtype):
    def fun(x):
        return float(np.sum(np.asarray(x, np.float64) ** 2)) * factor

    def run(steps):
        ends = {"target": -1.0, "max_consecutive_failures": 30}
        path, start = tmp_path / "run.jsonl", ONES.astype(dtype)
        return short_runs.run(fun, start, steps, HASHED, journal=path, **ends)

    if factor > 1e38 and dtype == np.float32:  # No value can be used.
        with pytest.raises(zo.RunError):
            run(3)
        return
    run(3)
    result = run(6)
    assert len(result.values) == 6 and "best" in repr(result)
    state = zo.replay(tmp_path / "run.jsonl", ONES.astype(dtype), *HASHED)
    np.testing.assert_array_equal(state.params, result.params)
    assert len(zo.runs.History.from_journal(tmp_path / "run.jsonl").value) == 6


@RAISING
@pytest.mark.parametrize("factor", FACTORS)
def test_ask_and_tell_run(factor):
    run = zo.ask_tell(ONES, *HASHED)
    for _ in range(3):
        points = run.ask().astype(np.float64)
        run.tell([float(np.sum(x**2)) * factor for x in points])
    assert int(run.state.step) == 3


@RAISING
def test_a_function_still_raises_its_own_errors():
    def fun(x):
        return np.float32(1e-30) * np.float32(1e-30) + x[0]

    with pytest.raises(zo.RunError, match="FloatingPointError: underflow"):
        short_runs.called(fun, ONES, *HASHED, num_steps=3, progress=False)


@RAISING
@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e-44, 1e-38])
def test_a_compiled_run_and_its_measurements(factor):
    def fun(x):
        return jnp.float32(factor) * jnp.sum(x**2)

    result = zo.train(fun, ONES, *HASHED, num_steps=12, target=1e-45, progress=False)
    assert repr(result)
    str(zo.diagnose(fun, ONES, HASHED[1], 0))


# --- Flags of JAX ---------------------------------------------------------------


ESTIMATORS = [
    zo.forward_difference(),
    zo.central_difference(num_directions=1),
    zo.central_difference(zo.low_rank()),
    zo.evolution_strategy(),
]

WITH_MEMORY = [
    zo.contrib.query_reuse(),
    zo.contrib.residual_feedback(),
    zo.contrib.linear_interpolation(),
    zo.contrib.gaussian_process(),
    zo.contrib.coordinate_wise(2),
]


@contextlib.contextmanager
def finite():
    with jax.debug_nans(True), jax.debug_infs(True):
        yield


def key_reuse():
    return jax.debug_key_reuse(True)


@contextlib.contextmanager
def explicit_axes():
    kind = jax.sharding.AxisType.Explicit
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("m",), axis_types=(kind,))):
        yield


def bowl(x):
    return jnp.sum((x - 1) ** 2)


def run_of(estimator, params):
    return zo.train(
        bowl, params, zo.radazo(1e-2), estimator, num_steps=2, progress=False
    ).params


@pytest.mark.slow
@pytest.mark.parametrize("flags", [finite, key_reuse, explicit_axes])
def test_finite_functions_stay_finite(flags):
    with flags():
        params = jnp.zeros((8, 4))
        for estimator in ESTIMATORS:
            value, _ = zo.value_and_grad(bowl, estimator)(jax.random.key(0), params)
            assert abs(float(value) - 32) < 1
            assert float(bowl(run_of(estimator, params))) < 32


@pytest.mark.slow
@pytest.mark.parametrize("flags", [finite, key_reuse])
@pytest.mark.parametrize("estimator", WITH_MEMORY, ids=repr)
def test_memories_that_are_empty_hold_finite_numbers(flags, estimator):
    with flags():
        assert jnp.all(jnp.isfinite(run_of(estimator, jnp.zeros(3))))


# --- Counts near the largest ----------------------------------------------------


MOST = 2**31 - 1
ZEROS = np.zeros(5, np.float32)
OPTIMIZER = zo.zo_sgd(1e-2)
ESTIMATOR = zo.forward_difference(zo.rademacher(), num_directions=3)


def around_one(x):
    return jnp.sum((x - 1) ** 2)


def at(step, **failures):
    """The state of a run after so many steps."""
    state = zo.ask_tell(ZEROS, OPTIMIZER, ESTIMATOR).state
    counts = {name: jnp.int32(count) for name, count in failures.items()}
    failed = state.failures._replace(**counts)
    return state._replace(step=jnp.int32(step), failures=failed)


def train(num_steps, state, fun=around_one, optimizer=OPTIMIZER):
    return traced(fun, ZEROS, num_steps, (optimizer, ESTIMATOR), state=state)


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
        run(lambda x: 0.0, ZEROS, num_steps, method, state=at(MOST - 3))


def test_no_step_is_told_that_cannot_be_counted():
    run = zo.ask_tell(ZEROS, OPTIMIZER, ESTIMATOR, state=at(MOST - 1))
    run.ask()
    run.tell(np.zeros(4))
    assert int(run.state.step) == MOST
    run.ask()
    with pytest.raises(ValueError, match="before 2"):
        run.tell(np.zeros(4))


def test_failures_are_counted_up_to_the_last_number():
    """A run in which some values fail continues."""

    def sometimes(x):
        return jnp.where(x[0] > 1e-9, jnp.inf, around_one(x))

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
        points = zo.estimators.sample_points(distribution, draw, 3, [0.1], ZEROS)
        return points.directions

    for step in (0, 1, most - 1, most, MOST):
        found = drawn(step)
        expected = 3 * (step % most) + np.arange(3)
        np.testing.assert_array_equal(found.number, expected.astype(np.uint32))
        cycle = step // most
        own = jax.random.fold_in(key, cycle) if cycle else key
        chex.assert_trees_all_equal(found.key[0], own)
