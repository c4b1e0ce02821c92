"""The history of a run, compared with NumPy on the same values."""

import csv
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import run, traced

SLOPES = np.array([1.0, -2.0, 3.0], np.float32)
ESTIMATOR = zo.central_difference(zo.gaussian(), num_directions=2, smoothing=0.5)


def linear(x):
    return jnp.sum(jnp.asarray(SLOPES) * x)


@pytest.fixture(scope="module")
def compiled():
    """A run in chunks, the parameters after each step, and the chain that it took."""
    optimizer = optax.chain(
        optax.inject_hyperparams(zo.zo_sgd)(optax.linear_schedule(0.1, 0.02, 8)),
        optax.snapshot("length", optax.tree.norm),
    )
    seen = [np.zeros(3)]
    method = optimizer, ESTIMATOR

    def keep(report):
        seen.append(np.array(report.state.params, np.float64))

    result = traced(linear, jnp.zeros(3), 7, method, chunk_size=1, callback=keep)
    return result, np.array(seen), method


@pytest.fixture(scope="module")
def black_box(tmp_path_factory):
    """A run with failures, its values step by step, and its journal."""
    path, values = tmp_path_factory.mktemp("run") / "run.jsonl", []

    def fun(x):
        values.append(float(np.abs(x - 1).sum()) if len(values) % 5 else np.nan)
        return values[-1]

    method = zo.zo_sgd(0.1), zo.forward_difference(num_directions=3, smoothing=0.1)
    result = run(fun, np.zeros(3, np.float32), 5, method, journal=path)
    return result, np.array(values).reshape(5, 4), path


def test_numbers_of_a_compiled_run(compiled):
    result, seen, _ = compiled
    history = result.history
    np.testing.assert_array_equal(history.value, result.values)
    np.testing.assert_array_equal(history.step, np.arange(7))
    np.testing.assert_array_equal(history.evaluations, np.full(7, 4))
    np.testing.assert_array_equal(history.failed, np.zeros(7))
    assert np.all(history.seconds > 0)
    rates = np.linspace(0.1, 0.02, 9)[:7]
    np.testing.assert_allclose(history.scalars["learning_rate"], rates, rtol=1e-6)
    steps = np.diff(seen, axis=0)
    lengths = np.linalg.norm(steps, axis=1)
    np.testing.assert_allclose(history.scalars["length"], lengths, rtol=1e-5)
    # The derivative of a linear function along the estimate, which is -step/rate.
    np.testing.assert_allclose(history.slope, -steps @ SLOPES / rates, rtol=1e-4)


def test_chunks_do_not_change_what_is_recorded(compiled):
    expected, _, method = compiled
    found = traced(linear, jnp.zeros(3), 7, method, chunk_size=4)
    same = found.history._replace(seconds=expected.history.seconds)
    jax.tree.map(np.testing.assert_array_equal, same, expected.history)


def test_numbers_of_a_black_box(black_box):
    result, values, _ = black_box
    history, good = result.history, np.isfinite(values)
    np.testing.assert_array_equal(history.value, result.values)
    np.testing.assert_array_equal(history.failed, (~good).sum(axis=1))
    np.testing.assert_array_equal(history.evaluations, np.full(5, 4))
    np.testing.assert_allclose(history.value_std, np.nanstd(values, axis=1), rtol=1e-5)


def test_a_journal_has_the_same_numbers(black_box):
    result, values, path = black_box
    read, history = zo.runs.History.from_journal(path), result.history
    for name in ("step", "evaluations", "failed"):
        np.testing.assert_array_equal(getattr(read, name), getattr(history, name))
    np.testing.assert_allclose(read.value_std, history.value_std, rtol=1e-5)
    np.testing.assert_allclose(read.seconds, history.seconds, rtol=1e-2)
    np.testing.assert_allclose(read.value, np.nanmean(values, axis=1), rtol=1e-6)
    assert np.isnan(read.slope).all()
    with pytest.raises(ValueError, match="must be a file with a run"):
        zo.runs.History.from_journal("no")


class Noted(NamedTuple):
    value: jax.Array
    own: jax.Array


def test_states_of_ones_own_loop():
    noted = optax.GradientTransformation(
        lambda _: Noted(jnp.float32(3), jnp.float32(4)),
        lambda updates, state, _: (updates, state),
    )
    inner = optax.chain(zo.radazo(0.0), noted)
    tx = zo.estimate_gradient(zo.forward_difference(), 0, inner)
    params = jnp.ones(3)
    state, recorded = tx.init(params), []
    update = jax.jit(lambda s, p: tx.update(None, s, p, value_fn=linear))
    for _ in range(3):
        recorded.append({**zo.runs.scalars(state), "seconds": 1.0})
        _, state = update(state, params)
    history = zo.runs.History.of([*recorded, {"value": 7.0}])
    np.testing.assert_array_equal(history.value, [np.inf, 2.0, 2.0, 7.0])
    np.testing.assert_array_equal(history.step, np.arange(4))
    np.testing.assert_array_equal(history.seconds, [1, 1, 1, np.nan])
    own = state.inner_state[1]
    assert zo.runs.scalars(state)["own"] is own.own
    assert zo.runs.scalars(state)["inner_state.1.value"] is own.value


def test_trees_like_the_parameters_are_left_out():
    optimizer = optax.inject_hyperparams(zo.radazo)(0.5)
    start = {"a": jnp.ones(()), "b": jnp.ones(3)}
    state = zo.ask_tell(start, optimizer, zo.forward_difference()).state
    names = {name.rpartition(".")[2] for name in zo.runs.scalars(state)}
    assert "learning_rate" in names
    assert not names & {"a", "b", "mu", "nu"}


def test_table_of_a_run(compiled, tmp_path):
    history = compiled[0].history
    history.write_csv(tmp_path / "run.csv")
    with open(tmp_path / "run.csv", encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    for name, column in {**history._asdict(), **history.scalars}.items():
        if name != "scalars":
            found = np.array([float(row[name]) for row in read])
            np.testing.assert_array_equal(found, column)
