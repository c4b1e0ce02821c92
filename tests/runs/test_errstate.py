"""Runs of a program in which NumPy raises floating-point errors."""

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers import short_runs
from tests.helpers.compare import Hashed
from tests.helpers.tables import slow

METHOD = (zo.zo_sgd(1e-2), zo.forward_difference(Hashed(), num_directions=3))
START = np.ones(3, np.float32)
# Below and above what float32 can hold, and its subnormal numbers.
FACTORS = 1e-300, 1e-44, 1e39


@pytest.fixture(autouse=True)
def raising():
    with np.errstate(all="raise"):
        yield


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
        path, start = tmp_path / "run.jsonl", START.astype(dtype)
        return short_runs.run(fun, start, steps, METHOD, journal=path, **ends)

    if factor > 1e38 and dtype == np.float32:  # No value can be used.
        with pytest.raises(zo.RunError):
            run(3)
        return
    run(3)
    result = run(6)
    assert len(result.values) == 6 and "best" in repr(result)
    state = zo.replay(tmp_path / "run.jsonl", START.astype(dtype), *METHOD)
    np.testing.assert_array_equal(state.params, result.params)
    assert len(zo.runs.History.from_journal(tmp_path / "run.jsonl").value) == 6


@pytest.mark.parametrize("factor", FACTORS)
def test_ask_and_tell_run(factor):
    run = zo.ask_tell(START, *METHOD)
    for _ in range(3):
        points = run.ask().astype(np.float64)
        run.tell([float(np.sum(x**2)) * factor for x in points])
    assert int(run.state.step) == 3


def test_a_function_still_raises_its_own_errors():
    def fun(x):
        return np.float32(1e-30) * np.float32(1e-30) + x[0]

    with pytest.raises(zo.RunError, match="FloatingPointError: underflow"):
        short_runs.called(fun, START, *METHOD, num_steps=3, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e-44, 1e-38])
def test_a_compiled_run_and_its_measurements(factor):
    def fun(x):
        return jnp.float32(factor) * jnp.sum(x**2)

    result = zo.train(fun, START, *METHOD, num_steps=12, target=1e-45, progress=False)
    assert repr(result)
    str(zo.diagnose(fun, START, METHOD[1], 0))
