"""The loss that tunes language models, and what an evaluation measures of it.

NumPy in float64 is the authority.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from radazo_llm.examples.tokens import Batch
from radazo_llm.models.opt import OPT
from radazo_llm.run.session import summary
from radazo_llm.settings import Settings
from radazo_llm.tune import loss
from radazo_llm.tune.batches import bounds, buckets
from radazo_llm.tune.job import loss_of, measure, parts_of

from .. import tables, tiny
from ..tiny import SETTINGS, TRAIN, examples, model


def _log_probabilities(opt: OPT, batch: Batch) -> np.ndarray:
    """Log-probabilities of the candidates' tokens [B, C, L] in float64, one by one."""
    b, c, length = batch.targets.shape
    tokens = np.broadcast_to(batch.tokens, (b, c, batch.tokens.shape[-1]))
    logits = tiny.logits(opt, tokens.reshape(b * c, -1))
    logits = np.asarray(logits, np.float64).reshape(*tokens.shape, -1)
    rows = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    result = np.zeros((b, c, length))
    for i, j, k in np.ndindex(b, c, length):
        result[i, j, k] = rows[i, j, batch.positions[i, j, k], batch.targets[i, j, k]]
    return result


def of_candidates(opt, batch):
    """The mean log-probability of each candidate, float64 [B, C]."""
    found = _log_probabilities(opt, batch) * batch.mask
    return found.sum(axis=-1) / batch.mask.sum(axis=-1)


def expected_loss(opt, batch, objective):
    score, rows = of_candidates(opt, batch), np.arange(len(batch.label))
    if objective == "classification":
        chosen = score[rows, batch.label]
        return np.mean(np.log(np.exp(score).sum(axis=1)) - chosen)
    if objective == "accuracy":
        wrong = np.mean(score.argmax(axis=-1) != batch.label)
        assert 0 < wrong < 1
        return wrong
    logp = _log_probabilities(opt, batch)[rows, batch.label]
    mask = np.asarray(batch.mask, np.float64)[rows, batch.label]
    return -(logp * mask).sum() / mask.sum()


@pytest.mark.parametrize("sequences", [1, 2])
def test_scores_are_mean_log_probabilities(sequences):
    opt, batch = model(), examples(5, sequences)
    expected = of_candidates(opt, batch)
    found = np.float64(jax.jit(loss.scores)(opt, batch))
    if sequences == 1:  # The denominator of the probabilities is left out.
        assert batch.targets.shape[-1] == 1
        expected, found = (x - x[:, :1] for x in (expected, found))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("objective", "sequences", "block"),
    [
        ("classification", 1, 16),
        ("classification", 2, 16),
        ("accuracy", 2, 16),
        ("language_model", 2, 16),
        ("language_model", 2, 1),
    ],
)
def test_the_loss_is_as_defined(objective, sequences, block, monkeypatch):
    monkeypatch.setattr(loss, "_BLOCK", block)  # Of tokens whose logits are made.
    opt, batch = model(), examples(9, sequences)
    found = jax.jit(loss.loss_fn, static_argnums=2)(opt, batch, objective)
    expected = expected_loss(opt, batch, objective)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("objective", "size"),
    [("classification", 5), tables.slow("language_model", 64)],
)
def test_an_evaluation_is_the_loss_on_all(objective, size):
    data = examples(13, 2)
    settings = dataclasses.replace(
        SETTINGS, tune="full", objective=objective, eval_batch_size=size
    )
    parts, params = measured(settings)
    found = measure(settings, parts, {"dev": [data]}, params, 4)
    expected = expected_loss(model(), data, objective)
    assert found["dev_loss"] == pytest.approx(expected, rel=1e-5)
    right = of_candidates(model(), data).argmax(axis=1) == data.label
    assert found["dev_accuracy"] == pytest.approx(right.mean())


def measured(settings):
    parts = parts_of(settings, model())
    return parts, parts.params


def test_words_that_are_the_same_for_all_have_a_threshold_and_a_largest_class():
    data = examples(13, 1)
    same = data._replace(targets=np.repeat(data.targets[:1], 13, axis=0))
    settings = dataclasses.replace(SETTINGS, objective="classification")
    parts, params = measured(settings)
    found = measure(settings, parts, {"dev": [same]}, params, 0)
    assert found["dev_largest"] == np.bincount(data.label).max() / 13
    score = of_candidates(model(), same)
    difference = score[:, 1] - score[:, 0]
    right = (difference > np.median(difference)) == data.label
    assert found["dev_calibrated"] == pytest.approx(right.mean())
    assert "dev_largest" not in measure(settings, parts, {"dev": [data]}, params, 0)


@pytest.mark.parametrize("number", [1, 3])
def test_the_loss_of_a_step_is_the_loss_of_its_rows(number):
    """It holds for each bucket, whose padding is cut."""
    whole = examples(20, 1)
    positions = np.broadcast_to(np.arange(20).reshape(20, 1, 1) % 8, (20, 2, 1))
    whole = whole._replace(
        tokens=np.pad(whole.tokens, [(0, 0), (0, 0), (0, 12)]),
        positions=(positions * 2).astype(np.int32),
    )
    parts = parts_of(SETTINGS, model())
    settings = dataclasses.replace(SETTINGS, objective="classification")
    data = buckets(whole, bounds(whole, number))
    assert len(data) == (1 if number == 1 else 2)
    fun = jax.jit(loss_of(settings, parts, data))
    rows = np.array([3, 0, 1], np.int32)
    for i, part in enumerate(data):
        found = fun(parts.params, (jnp.int32(i), rows))
        some = Batch(*(values[rows] for values in part))
        expected = expected_loss(model(), some, "classification")
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "adam"}, "--method must be one of radazo, zo_adamm"),
        ({"tune": "head"}, "--tune must be one of lora, full; got head"),
        ({"learning_rate": -1.0}, "--learning-rate must be 0 or more; got -1.0"),
        ({"learning_rate": 0.0, "method": "zo_sgd"}, "must be positive unless it can"),
        ({"learning_rate": 0.0, "num_steps": 1}, "must be positive unless it can be m"),
        ({"num_steps": 0}, "--steps must be positive; got 0"),
        ({"smoothing": float("nan")}, "--smoothing must be positive and at most 1000"),
        ({"smoothing": 1e30}, "--smoothing must be positive and at most 1000; got 1e+"),
        ({"seed": -1}, "--seed must be 0 or more; got -1"),
        ({"last_layers": 2, "tune": "full"}, "--tune must not be full with --l"),
        ({"tune": "full", "quantize": "file"}, "--tune must not be full with --last-l"),
        ({"warmup_steps": -1}, "--warmup-steps must be 0 or more; got -1"),
        ({"b1": 1.0}, "--b1 must be in [0, 1); got 1.0"),
        ({"dev_share": 1.0}, "--dev-share must be in [0, 1); got 1.0"),
        (
            {"command": "reward", "population_size": 0},
            "--population-size must be positive; got 0",
        ),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError) as error:
        Settings(**{"learning_rate": 1e-3} | options)
    assert message in str(error.value)


def test_the_first_step_of_a_measured_rate_is_no_longer_than_others():
    """Ten times as long, it left the region that the rate was measured in."""
    gradient = jnp.ones(3)
    for rate, first in ((0.0, 0.1), (1e-3, 1.0)):
        settings = dataclasses.replace(SETTINGS, learning_rate=rate)
        optimizer = settings.optimizer(np.full(4, 0.1, np.float32))
        updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
        np.testing.assert_allclose(updates, -first, rtol=1e-3)


@pytest.mark.parametrize("tune", ["lora", tables.slow("full")])
def test_what_is_tuned_is_one_part(tune):
    parts = parts_of(dataclasses.replace(SETTINGS, tune=tune), model())
    whole, base = tiny.arrays(parts.model(parts.params)), tiny.arrays(model())
    tuned = {path for path, _ in nnx.to_flat_state(parts.params)}
    rest = {path for path, _ in nnx.to_flat_state(parts.rest)}
    assert tuned | rest == whole.keys() and not tuned & rest
    assert (tune == "full") == (not rest)
    assert tuned == base.keys() if tune == "full" else tuned.isdisjoint(base)
    count = 4 if tune == "lora" else len(base)
    assert len(jax.tree.leaves(parts.params)) == count


def test_the_end_of_a_run_is_one_line():
    first = {"step": 0, "dev_loss": 1, "test_accuracy": 0.5, "test_calibrated": 0.73}
    first |= {"dev_accuracy": 0.5, "test_largest": 0.6}
    last = {"step": 9, "dev_accuracy": 0.7, "test_accuracy": 0.8, "dev_loss": 0.3}
    assert summary([first, last]).strip() == (
        "Accuracy on test: the largest class alone 60.0%, untuned 50.0%, untuned with "
        "the threshold at its median 73.0%, tuned 80.0%."
    )
    assert "Accuracy on test: tuned 80.0%." in summary([{"step": 5}, last])
    row = {"step": 0, "dev_loss": 2.0}
    assert "Loss per token on dev: untuned 2.0000, tuned 2.0" in summary([row, row])
    row = {"step": 0, "dev_reward": 0.5}
    assert "Reward on dev: untuned 0.5000, tuned 0.5000." in summary([row, row])


def test_a_batch_larger_than_the_data_is_refused(job, tmp_path):
    settings = dataclasses.replace(SETTINGS, batch_size=21)
    with pytest.raises(ValueError, match=r"--batch-size must be at most 20, .*got 21"):
        tiny.run(job, tmp_path, settings, (TRAIN, TRAIN))
