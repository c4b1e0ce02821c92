"""Runs on minibatches that name no optimizer: R-AdaZO at a rate that is measured."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.train import rates
from tests.helpers.compare import Hashed

START = jnp.linspace(-1.0, 1.0, 24)
# Twelve steps of about 0.1 at another rounding of the rate, which 1/μ = 200 amplifies.
ROUNDED = 5e-4
ESTIMATOR = zo.forward_difference(Hashed(), 3)


def loss(x, noise):
    return 1 + jnp.mean((x - 1 - noise) ** 2)


def sample(key):
    return jax.random.normal(key, (24,)) / 4


def run(fun=loss, start=START, **options):
    if "max_evaluations" not in options:
        options = {"num_steps": 12} | options
    options = {"estimator": ESTIMATOR, "progress": False} | options
    return zo.train(fun, start, sample=sample, **options)


def rate(num_steps=12, **options):
    return zo.find_learning_rate(
        loss,
        START,
        num_steps,
        sample=sample,
        distribution=Hashed(),
        evaluator=zo.vectorized(),
        **options,
    )


@pytest.fixture(scope="module")
def whole():
    return run()


def test_the_rate_is_the_one_that_is_found_alone(whole):
    assert whole.learning_rate == rate()
    assert f"learning_rate={rate().learning_rate:.6g}" in repr(whole)


def measured_estimator():
    """The estimator at the smoothing that was measured with the rate."""
    return dataclasses.replace(ESTIMATOR, smoothing=rate().smoothing)


def test_the_run_is_radazo_at_the_schedule_of_the_rate(whole):
    optimizer = zo.radazo(rate().schedule, bias_correction=True)
    again = run(optimizer=optimizer, estimator=measured_estimator())
    np.testing.assert_allclose(again.params, whole.params, atol=ROUNDED)
    assert again.learning_rate is None


def test_the_history_has_the_rate_of_each_step(whole):
    expected = [rate().schedule(t) for t in range(12)]
    np.testing.assert_array_equal(whole.history.scalars["learning_rate"], expected)


def test_the_evaluations_of_the_rate_count(whole):
    assert whole.num_evaluations == rate().num_evaluations + 12 * 4
    taken = rate().num_evaluations
    found = run(max_evaluations=taken + 12 * 4 + 3)
    assert found.stopped == "max_evaluations"
    assert found.num_evaluations == taken + 12 * 4
    chex.assert_trees_all_equal(found.params, whole.params)
    assert found.learning_rate == whole.learning_rate


def test_without_a_known_end_the_rate_falls_more_slowly():
    found = run(num_steps=None, max_seconds=100.0, patience=5)
    assert found.learning_rate == rate(None)
    assert "1/√(1 + t/100)" in repr(found.learning_rate)
    steps = np.arange(len(found.values))
    expected = found.learning_rate.learning_rate / np.sqrt(1 + steps / 100)
    rates = found.history.scalars["learning_rate"]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    again = rate(None).over(12)
    np.testing.assert_allclose(again.learning_rate, rate().learning_rate, rtol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 5])
def test_chunks_and_states_change_nothing(whole, chunk_size):
    found = run(chunk_size=chunk_size, callback=lambda report: report.step == 5)
    assert found.state.step == 5
    # The same call takes the steps that are left.
    again = run(state=found.state, num_steps=None if chunk_size == 1 else 12)
    assert again.state.step == 12
    chex.assert_trees_all_equal(again.state, whole.state)
    assert again.learning_rate is None
    assert again.num_evaluations == 7 * 4


def test_a_journal_keeps_the_rate(whole, tmp_path):
    path = tmp_path / "run.jsonl"
    first = run(journal=path, callback=lambda report: report.step == 5)
    line = json.loads(path.read_text().splitlines()[0])
    assert line["learning_rate"] == first.learning_rate._asdict()
    again = run(journal=path)
    uncut = run(journal=tmp_path / "uncut.jsonl")
    chex.assert_trees_all_equal(again.state, uncut.state)
    assert again.learning_rate == first.learning_rate == whole.learning_rate
    assert again.num_evaluations == whole.num_evaluations
    options = {"estimator": ESTIMATOR, "fun": loss, "sample": sample}
    state = zo.replay(path, START, **options)
    chex.assert_trees_all_equal(state, again.state)


def test_the_rate_of_a_journal_is_not_measured_again(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    first, estimator = run(journal=path), measured_estimator()
    monkeypatch.setattr("radazo_jax._src.train.rates.endless_rate", None)
    again = run(journal=path)
    np.testing.assert_array_equal(again.params, first.params)
    with pytest.raises(ValueError, match="its learning_rate is"):
        run(journal=path, optimizer=zo.radazo(1e-3), estimator=estimator)


@pytest.mark.slow
def test_the_probe_stays_within_bounds():
    def fun(x, noise):
        return jnp.where(jnp.all(abs(x) <= 1.5), loss(x, noise), jnp.nan)

    found = run(fun, bounds=(-1.5, 1.5), on_failure="raise")
    assert np.isfinite(found.learning_rate.learning_rate)


@pytest.mark.slow
def test_large_trees_replay_their_moments(monkeypatch):
    monkeypatch.setattr(rates, "_LARGE", START.size - 1)
    start = START.reshape(4, 6)

    def fun(x, noise):
        return loss(x.ravel(), noise)

    found = run(fun, start)
    assert isinstance(
        found.state.optimizer_state[0], zo.transforms.ScaleByReplayedMomentsState
    )
    optimizer = zo.radazo(
        found.learning_rate.schedule, bias_correction=True, moments="replayed"
    )
    far = found.learning_rate.smoothing
    estimator = dataclasses.replace(ESTIMATOR, smoothing=far)
    again = run(fun, start, optimizer=optimizer, estimator=estimator)
    np.testing.assert_allclose(found.params, again.params, atol=ROUNDED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 1}, "num_steps must be ≥ 2; got 1. Or name an optimizer"),
        ({"max_evaluations": 20}, "max_evaluations must be ≥"),
    ],
)
def test_what_has_no_rate_is_named_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        run(**options)
    assert "\n" not in str(caught.value)
    assert "optimizer" in str(caught.value)


def test_a_run_ends_where_its_rate_is_zero(whole):
    with pytest.raises(ValueError, match="num_steps must end the run at step 12"):
        run(state=whole.state)
    begun = run(callback=lambda report: True, chunk_size=2)
    with pytest.raises(ValueError, match=r"got 40 after 2\. Give fewer steps"):
        run(num_steps=40, state=begun.state)
