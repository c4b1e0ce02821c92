"""Budgets and stopping rules of runs, compiled and of black boxes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.black_boxes import ESTIMATOR, OPTIMIZER, START, fun, run, traced
from tests.helpers.short_runs import called

SIZE = 4  # Evaluations per step.


def compiled(fun=traced, **options):
    options = {"progress": False, "key": 0, **options}
    return zo.train(fun, START, OPTIMIZER, ESTIMATOR, **options)


def outside(fun=fun, **options):
    options = {"progress": False, "key": 0, **options}
    return called(fun, START, OPTIMIZER, ESTIMATOR, **options)


each_run = pytest.mark.parametrize("run", [compiled, outside])


@functools.cache
def whole(run):
    return run(num_steps=60)


def lowest_values(run):
    """The values to which targets are compared, in NumPy: one for each step."""
    if run is compiled:
        return whole(run).values
    lowest = []
    outside(num_steps=60, callback=lambda x: lowest.append(x.values.min()))
    return np.array(lowest)


def assert_same_run(result, expected):
    chex.assert_trees_all_equal(result.state, expected.state)
    chex.assert_trees_all_equal(result.params, expected.params)
    np.testing.assert_array_equal(result.values, expected.values)
    if hasattr(result, "best"):
        chex.assert_trees_all_equal(result.best.params, expected.best.params)
        assert result.best[1:3] == expected.best[1:3]


@each_run
def test_no_step_exceeds_the_evaluations(run):
    result = run(max_evaluations=6 * SIZE - 1)
    assert result.stopped == "max_evaluations"
    assert result.history.evaluations.sum() == 5 * SIZE
    assert_same_run(result, run(num_steps=5))
    result = run(max_evaluations=5 * SIZE, num_steps=5)
    assert result.stopped == "num_steps"


@each_run
def test_a_target_ends_the_run_at_its_step(run):
    found = lowest_values(run)
    for target in (found[0], np.float64(found[20]) + 1e-9, found.min()):
        steps = 1 + int(np.argmax(found <= np.float32(target)))
        result = run(target=float(target))
        assert result.stopped == "target"
        assert len(result.values) == steps
        assert_same_run(result, run(num_steps=steps))


def test_a_target_that_is_not_reached_ends_with_the_default_steps():
    result = compiled(target=-1e30)
    assert result.stopped == "num_steps" and len(result.values) == 1000


@each_run
def test_patience_ends_the_run_at_its_step(run):
    found = np.minimum.accumulate(lowest_values(run))
    for patience in (1, 2, 4):
        # The first step whose value is not below all values up to `patience` before.
        stale = found[patience:] == found[:-patience]
        steps = patience + 1 + int(np.argmax(stale))
        assert stale.any()
        result = run(patience=patience)
        assert result.stopped == "patience"
        assert_same_run(result, run(num_steps=steps))


def test_chunks_do_not_change_where_a_run_ends():
    for options in ({"patience": 3}, {"target": 1.5}, {"max_evaluations": 50}):
        expected = compiled(**options)
        for chunk_size in (1, 3, 20_000):
            result = compiled(chunk_size=chunk_size, **options)
            assert_same_run(result, expected)
            assert result.stopped == expected.stopped


def test_another_budget_lifts_the_default_number_of_steps():
    assert len(compiled(max_evaluations=1100 * SIZE).values) == 1100
    result = compiled(max_seconds=3600.0, callback=lambda report: report.step >= 1010)
    assert result.stopped == "callback"
    assert int(result.state.step) >= 1010


@each_run
def test_seconds_end_a_run_between_its_steps(run, monkeypatch):
    """The clock advances by a second each time that it is read."""
    ticks = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    result = run(max_seconds=50.0)
    assert result.stopped == "max_seconds"
    steps = len(result.values)
    assert 1 <= steps < 60
    monkeypatch.undo()
    assert_same_run(result, run(num_steps=steps))


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (compiled, {"max_evaluations": 10 * SIZE + 2}),
        (compiled, {"patience": 2}),
        (outside, {"target": 1.5}),
    ],
)
def test_a_resumed_run_counts_what_its_journal_holds(run, options, tmp_path):
    """A run that has already ended takes no further step."""
    path, expected = tmp_path / "run.jsonl", run(journal=tmp_path / "all", **options)
    part = run(journal=path, num_steps=2)
    assert len(part.values) == 2
    for _ in range(2):
        result = run(journal=path, **options)
        assert result.stopped == expected.stopped == next(iter(options))
        assert_same_run(result, expected)
    assert path.read_bytes().count(b"\n") == 1 + len(expected.values)


def test_the_precision_of_targets_is_that_of_the_values():
    """0.1 in float32 is above 0.1."""
    result = outside(lambda x: 0.1, target=0.1)
    assert (result.stopped, len(result.values)) == ("target", 1)
    with jax.enable_x64():
        result = run(lambda x: 0.1 + 1e-12, np.zeros(6), 3, target=0.1)
    assert result.stopped == "num_steps"


def test_values_that_fail_reach_no_target():
    result = compiled(
        lambda x: jnp.where(jnp.any(x > 0.45), -jnp.inf, jnp.sum(jnp.abs(x))),
        target=-1.0,
        num_steps=9,
    )
    assert result.stopped == "num_steps" and result.state.failures.evaluations > 0


def stop(report):
    raise StopIteration


@pytest.mark.parametrize("callback", [stop, lambda report: True])
@each_run
def test_a_callback_ends_the_run(run, callback):
    options = {"chunk_size": 1} if run is compiled else {}
    assert_same_run(run(callback=callback, num_steps=9, **options), run(num_steps=1))


@each_run
@pytest.mark.parametrize(("num_steps", "path"), [(1, None), (3, "run.jsonl")])
def test_a_run_without_a_value_raises_whatever_its_length(
    run, num_steps, path, tmp_path
):
    path = path and tmp_path / path
    bad = {compiled: lambda x: jnp.sum(x) * jnp.nan, outside: lambda x: np.inf}[run]
    message = rf"fun had no finite value to use in any of the run's {num_steps} steps"
    for _ in range(1 if path is None else 2):
        with pytest.raises(zo.RunError, match=message) as caught:
            run(bad, num_steps=num_steps, journal=path)
        assert caught.value.state.step == num_steps
        if run is outside:
            assert "The last failure: returned inf" in str(caught.value)


BAD = [
    ({"num_steps": 0}, "num_steps must be an int ≥ 1; got 0"),
    ({"max_evaluations": 3}, "max_evaluations must be ≥ 4, the evaluations of a step"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_bad_budgets(options, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        compiled(**options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
