"""A journal is resumed by any function; another value of a point is a warning."""

import re
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.journals import Simulator
from tests.helpers.short_runs import METHOD, START, run, traced


def crashing(x, calls):
    """A bug: an index that is out of range once the run has moved."""
    calls.append(x)
    return float(np.sum(x**2)) if len(calls) < 8 else calls[99]


def fixed(x):
    print("evaluated", end="")
    return float(np.sum(x**2))  # The bug is gone.


@pytest.mark.parametrize(
    ("on_failure", "failed"), [("raise", [0, 3]), ("drop", [0, 3, 5, 5])]
)
def test_a_run_that_died_of_a_bug_is_resumed_once_the_bug_is_fixed(
    on_failure, failed, tmp_path
):
    """Warnings are errors here: its values must equal the journal's."""
    path, calls = tmp_path / "run.jsonl", []
    options = {"on_failure": on_failure, "max_consecutive_failures": 2}
    with pytest.raises(zo.RunError, match="IndexError"):
        run(lambda x: crashing(x, calls), num_steps=9, journal=path, **options)
    assert zo.runs.History.from_journal(path).failed.tolist() == failed
    resumed = run(fixed, num_steps=9, journal=path, **options)
    assert resumed.history.failed.tolist() == failed + [0] * (9 - len(failed))
    # Steps in which values failed were taken without them.
    np.testing.assert_array_equal(
        zo.replay(path, START, *METHOD).params, resumed.params
    )


def scaled(level, jnp=np):
    return lambda x: jnp.asarray(level, np.float32) * jnp.sum(x**2)


@pytest.mark.parametrize("call", [run, traced])
def test_another_value_of_a_journaled_point_is_a_warning(call, tmp_path):
    """It shows both values, and the run continues; an equal one is none."""
    path, library = tmp_path / "run.jsonl", jnp if call is traced else np
    call(scaled(1.0, library), num_steps=2, journal=path)
    again = call(scaled(1.0, library), num_steps=3, journal=path)
    with pytest.warns(UserWarning, match="at which fun now returns") as caught:
        result = call(scaled(2.0, library), num_steps=4, journal=path)
    assert len(result.values) == 4
    (text,) = (str(warning.message) for warning in caught)
    # The first value of the last step.
    value = again.values[-1]
    assert f"{value:.9g}" in text and "\n" not in text
    returned = float(re.search(r"returns ([\d.]+)\. Unless", text)[1])
    assert returned == pytest.approx(2 * value, rel=1e-6)


def test_a_worker_that_dies_at_a_journaled_point_ends_the_run(tmp_path):
    """The error has the result of the journal."""
    path = tmp_path / "run.jsonl"
    result = run(num_steps=2, journal=path)

    class Dies(ThreadPoolExecutor):
        def submit(self, *args):
            raise BrokenExecutor("a worker died")

    with Dies(1) as threads, pytest.raises(zo.RunError, match="evaluated again") as e:
        run(num_steps=3, journal=path, executor=threads)
    np.testing.assert_array_equal(e.value.result.values, result.values)
    assert e.value.result.best.value == result.best.value


@pytest.mark.parametrize("again", [True, False], ids=["same object", "another"])
def test_counters_caches_and_locks_do_not_prevent_resuming(again, tmp_path):
    path, fun = tmp_path / "run.jsonl", Simulator()
    run(fun, num_steps=2, journal=path)
    parts = run(fun if again else Simulator(), num_steps=4, journal=path)
    np.testing.assert_array_equal(parts.params, run(num_steps=4).params)
