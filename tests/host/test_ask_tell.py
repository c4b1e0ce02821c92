"""Ask and tell: the steps of `minimize`, in parts, and between pickles."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.host_runs import (
    METHODS,
    START,
    Function,
    assert_same,
    bowl,
    quiet,
    repeating,
    ripples,
    rows,
    run,
)


def pickled(told):
    return pickle.loads(pickle.dumps(told))


def tell_some(told, fun, rng):
    """Tells a part of what is asked for; returns how many values it told."""
    points = told.ask()
    np.testing.assert_array_equal(told.ask(), points)
    count = int(rng.integers(1, len(points) + 1))
    told.tell(np.array([fun(x) for x in points[:count]]))
    return count


def can_be_pickled(method):
    return "." in type(method).__module__ or method is repeating


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("dtype", "of_value", "noise", "fails"),
    [
        ("float64", float, 0.0, False),
        ("float64", float, 0.1, False),
        ("float32", np.float32, 0.0, True),
        ("bfloat16", np.float64, 0.1, True),
    ],
)
def test_the_steps_are_those_of_minimize(name, dtype, of_value, noise, fails):
    """In parts, with pickles between them, and with noise."""
    method, start = METHODS[name], np.zeros(3, jnp.dtype(dtype))
    most = 90
    whole = quiet(
        run, Function(noise, fails, of_value), method, start,
        callback=lambda report: len(report.evaluations) >= most,
    )  # fmt: skip
    fun, rng = Function(noise, fails, of_value), np.random.default_rng(7)
    told, count = zo.ask_tell(start, method), 0
    while not told.ended and count < whole.num_evaluations:
        # The last step of the whole run is complete.
        count += tell_some(told, fun, rng)
        if rng.integers(3) == 0 and can_be_pickled(method):
            told = pickled(told)
    found, expected = told.evaluations, whole.evaluations
    assert told.ended == whole.reason
    np.testing.assert_array_equal(found.points, expected.points[:count])
    np.testing.assert_array_equal(found.values, expected.values[:count])
    if count < whole.num_evaluations:  # It compares its best points at the end.
        assert noise and whole.stopped == "converged"
        return
    assert told.best[1:3] == whole.best[1:3]
    np.testing.assert_array_equal(told.params, whole.params)
    assert told.stages[: len(whole.stages)] == whole.stages


@pytest.mark.parametrize(
    "named",
    [(), (zo.radazo(0.3), zo.forward_difference())],
    ids=["method", "optimizer"],
)
def test_each_process_of_a_series_continues(named):
    """Each reads the run, tells a step, and stores it. The best is known."""
    stored, seen = None, []
    for _ in range(30):
        if not named:
            told = pickle.loads(stored) if stored else zo.ask_tell(START)
            if told.ended:
                break
        else:
            state, best = pickle.loads(stored) if stored else (None, None)
            told = zo.ask_tell(START, *named, state=state, best=best)
        values = [ripples(x) for x in told.ask()]
        seen += values
        told.tell(values)
        stored = pickle.dumps(told if not named else (told.state, told.best))
    assert told.best.value == pytest.approx(min(seen), rel=1e-6)
    assert ripples(told.best.params) == pytest.approx(min(seen), rel=1e-5)


def test_a_run_moves_between_the_doors():
    """`minimize`, then by hand, then `minimize`: the run of one call."""
    first = run(ripples, max_evaluations=17)
    told = zo.ask_tell(START, evaluations=pickled(first.evaluations))
    assert told.best.value == first.best.value
    for _ in range(9):
        told.tell([ripples(x) for x in told.ask()])
    fun = Function()
    last = quiet(run, fun, evaluations=told.evaluations, max_evaluations=70)
    assert_same(last, run(ripples, max_evaluations=70))
    assert len(fun.calls) == 70 - len(told.evaluations)


def test_failures_after_the_last_value_are_asked_for_again():
    told, asked = zo.ask_tell(START, METHODS["evolution"]), 0
    while asked < 40:
        points = told.ask()
        values = [ripples(x) if asked < 20 else np.nan for x in points]
        asked += len(values)
        told.tell(values)
    again = zo.ask_tell(START, METHODS["evolution"], evaluations=told.evaluations)
    for _ in range(4):
        again.tell([ripples(x) for x in again.ask()])
    used = again.evaluations.used
    assert used.sum() > 20 and not np.isnan(again.evaluations.values[used]).any()
    # A pickle of the run itself continues it, with its failures.
    same = pickled(told)
    np.testing.assert_array_equal(same.ask(), told.ask())
    assert rows(same.evaluations) == rows(told.evaluations)


def test_points_and_start_belong_to_the_caller():
    start = {"a": np.zeros(2), "b": np.zeros(1, np.float32)}
    told = [zo.ask_tell(start), zo.ask_tell({k: x.copy() for k, x in start.items()})]
    for x in start.values():
        x.fill(9)
    for _ in range(20):
        points = [x.ask() for x in told]
        values = [bowl(np.r_[a, b]) for a, b in zip(*points[0].values(), strict=True)]
        for x in jax.tree.leaves(points[0]):
            x.fill(9)
        for x in told:
            x.tell(values)
    assert rows(told[0].evaluations) == rows(told[1].evaluations)
    assert "best" in repr(told[0]) and len(repr(told[0])) < 500


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (np.zeros(5), ValueError, r"shape \(4,\); got shape \(5,\)"),
        (np.zeros(0), ValueError, r"got shape \(0,\)"),
        (np.zeros((4, 2)), ValueError, r"got shape \(4, 2\)"),
        (np.zeros(()), ValueError, r"got shape \(\)"),
        (["a"] * 4, TypeError, "values must be real numbers"),
    ],
)
def test_values_that_are_none_are_refused(values, error, message):
    told = zo.ask_tell(START, METHODS["custom"])
    points = told.ask()
    with pytest.raises(error, match=message):
        told.tell(values)
    np.testing.assert_array_equal(told.ask(), points)
    told.tell([bowl(x) for x in points])


def test_a_run_that_has_ended_asks_for_nothing():
    told = zo.ask_tell(START, METHODS["custom"])
    while not told.ended:
        told.tell([bowl(x) for x in told.ask()])
    with pytest.raises(ValueError, match="got a run that has ended: all steps were"):
        told.ask()
    with pytest.raises(ValueError):
        told.tell([1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": 3}, "state must be None unless an optimizer takes the steps"),
        ({"best": 3}, "best must be None unless an optimizer"),
        ({"evaluations": 3}, "evaluations must be the evaluations of an earlier"),
        ({"step": -1}, "step must be a number of at least 0"),
        ({"bounds": (1.0, 2.0)}, "params must lie within bounds"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        zo.ask_tell(START, **options)
    if "step" in options or options.get("evaluations"):
        with pytest.raises((TypeError, ValueError), match="unless a method takes"):
            zo.ask_tell(START, zo.radazo(1e-2), zo.forward_difference(), **options)
