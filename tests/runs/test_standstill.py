"""Runs of functions that do not change are warned about, once."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.tables import slow

START = np.zeros(5, np.float32)
METHOD = (zo.radazo(1e-2), zo.forward_difference(Hashed(), num_directions=4))


def steps(params):
    """The function of the README: constant near the start."""
    return np.abs(np.round(8 * params) - [3, 1, 4, 1, 5]).sum()


def traced(params):
    target = jnp.array([3, 1, 4, 1, 5], jnp.float32)
    return jnp.abs(jnp.round(8 * params) - target).sum()


def warned(run, *args, **kwargs):
    """The result and the warnings of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(*args, progress=False, **kwargs)
    assert all(warning.filename == __file__ for warning in caught)
    texts = [str(warning.message) for warning in caught]
    assert all("at all points of the first 10 steps" in text for text in texts)
    return result, texts


def called(*args, **kwargs):
    return zo.train(*args, evaluator=zo.external(), **kwargs)


RUNS = pytest.mark.parametrize(
    ("run", "fun"), [slow(called, steps), (zo.train, traced)]
)


@RUNS
def test_a_run_that_stands_still_is_warned_about_once(run, fun):
    """After ten steps."""
    result, texts = warned(run, fun, START, *METHOD, num_steps=40)
    assert np.all(result.values == 14)
    assert len(texts) == 1
    assert texts[0].startswith("fun returned 14 at all") and "\n" not in texts[0]
    _, texts = warned(run, fun, START, *METHOD, num_steps=9)
    assert not texts


def test_a_journaled_compiled_run_is_warned_about(tmp_path):
    path = tmp_path / "run.jsonl"
    _, texts = warned(zo.train, traced, START, *METHOD, num_steps=12, journal=path)
    assert len(texts) == 1


@RUNS
def test_what_is_advised_moves_the_run(run, fun):
    method = (zo.radazo(1e-2), zo.central_difference(smoothing=0.2))
    result, texts = warned(run, fun, START, *method, num_steps=200)
    assert not texts
    assert result.values.min() < 3


@RUNS
def test_a_run_that_begins_at_its_target_is_not_warned_about(run, fun):
    result, texts = warned(run, fun, START, *METHOD, num_steps=40, target=14.0)
    assert result.stopped == "target" and not texts


@RUNS
def test_a_constant_that_a_run_has_reached_is_not_warned_about(run, fun):
    del fun

    def hinge(x):
        return (x + 0.5).clip(0, None).sum()

    every = zo.central_difference(zo.coordinate(replace=False), num_directions=5)
    result, texts = warned(run, hinge, START, zo.zo_sgd(0.2), every, num_steps=30)
    assert np.all(result.values[-20:] == 0) and not texts
    _, texts = warned(
        run, hinge, START, zo.zo_sgd(0.2), every, num_steps=20, state=result.state
    )
    assert not texts


@RUNS
def test_values_without_a_pattern_are_not_warned_about(run, fun):
    """Steps that are skipped have no equal values."""
    del fun
    with pytest.raises(zo.RunError), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(
            lambda x: x.sum() * np.float32(np.nan),
            START,
            *METHOD,
            num_steps=30,
            progress=False,
        )
