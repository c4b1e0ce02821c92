"""The loss and the step that tune language models.

NumPy in float64 and a step written out by hand are the authorities.
"""

import dataclasses

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from radazo_llm.models import lora
from radazo_llm.models.opt import OPT
from radazo_llm.tune import train
from radazo_llm.tune.data import Batch

from .. import tables, tiny
from ..tiny import SETTINGS, TRAIN, arrays, examples, model


def _log_probabilities(model: OPT, batch: Batch) -> np.ndarray:
    """Log-probabilities of the candidates' tokens [B, C, L] in float64, one by one."""
    b, c, length = batch.targets.shape
    tokens = np.broadcast_to(batch.tokens, (b, c, batch.tokens.shape[-1]))
    logits = tiny.logits(model, tokens.reshape(b * c, -1))
    logits = np.asarray(logits, np.float64).reshape(*tokens.shape, -1)
    rows = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    result = np.zeros((b, c, length))
    for i, j, k in np.ndindex(b, c, length):
        result[i, j, k] = rows[i, j, batch.positions[i, j, k], batch.targets[i, j, k]]
    return result


@pytest.mark.parametrize("sequences", [1, 2])
def test_scores_are_mean_log_probabilities(sequences):
    opt, batch = model(), examples(5, sequences)
    expected = _log_probabilities(opt, batch) * batch.mask
    expected = expected.sum(axis=-1) / batch.mask.sum(axis=-1)
    found = np.float64(tables.jit(train.scores)(opt, batch))
    if sequences == 1:  # The denominator of the probabilities is left out.
        assert batch.targets.shape[-1] == 1
        expected, found = (x - x[:, :1] for x in (expected, found))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("sequences", [1, 2])
def test_classification_is_the_cross_entropy_over_the_candidates(sequences):
    opt, batch = model(), examples(5, sequences)
    logp = _log_probabilities(opt, batch) * batch.mask
    score = logp.sum(axis=-1) / batch.mask.sum(axis=-1)
    chosen = np.take_along_axis(score, batch.label[:, None], axis=1)[:, 0]
    expected = np.mean(np.log(np.exp(score).sum(axis=1)) - chosen)
    found = tables.jit(train.loss_fn)(opt, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_accuracy_counts_the_wrong_choices():
    opt, batch = model(), examples(9, 2)
    logp = _log_probabilities(opt, batch) * batch.mask
    score = logp.sum(axis=-1) / batch.mask.sum(axis=-1)
    found = tables.jit(train.loss_fn, static_argnums=2)(opt, batch, "accuracy")
    wrong = np.mean(score.argmax(axis=-1) != batch.label)
    assert 0 < wrong < 1 and float(found) == pytest.approx(wrong)


@pytest.mark.parametrize(("sequences", "block"), [(1, 16), (2, 16), (2, 1)])
def test_language_model_loss_is_that_of_the_right_tokens(sequences, block, monkeypatch):
    monkeypatch.setattr(train, "_BLOCK", block)  # Of tokens whose logits are made.
    opt, batch = model(), examples(5, sequences)
    rows, mask = np.arange(5), np.asarray(batch.mask, np.float64)
    logp = _log_probabilities(opt, batch)[rows, batch.label]
    mask = mask[rows, batch.label]
    expected = -(logp * mask).sum() / mask.sum()
    found = tables.jit(train.loss_fn, static_argnums=2)(opt, batch, "language_model")
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("objective", "batch_size"),
    [
        ("classification", 5),
        tables.slow("classification", 64),
        tables.slow("language_model", 5),
    ],
)
def test_evaluation_in_batches_is_the_loss_on_all(objective, batch_size):
    data, opt = examples(13, 2), model()
    expected = tables.jit(train.loss_fn, static_argnums=2)(opt, data, objective)
    scores = tables.jit(train.scores)(opt, data)
    settings = dataclasses.replace(SETTINGS, tune="full", objective=objective)
    job, state = train.start(settings, opt)
    right = np.asarray(scores).argmax(axis=1) == data.label
    found = tiny.evaluate(job, state.params, data, batch_size=batch_size)
    np.testing.assert_allclose(found.loss(), expected, rtol=1e-5)
    np.testing.assert_allclose(found.accuracy(data.label), right.mean(), rtol=1e-6)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "tune"),
    [
        ("radazo", "lora"),
        pytest.param("radazo", "prompt", marks=pytest.mark.slow),
        pytest.param("zo_adamm", "full", marks=pytest.mark.slow),
    ],
)
def test_step_is_the_one_written_out(method, tune):
    """Central difference along Gaussian u, then the recursions of the paper, twice."""
    check_steps(dataclasses.replace(SETTINGS, method=method, tune=tune))


@pytest.mark.slow
def test_step_of_forward_differences_is_the_one_written_out():
    more = {"difference": "forward", "num_directions": 3}
    settings = dataclasses.replace(SETTINGS, **more)
    assert settings.num_evaluations == 4
    check_steps(settings)


def check_steps(settings):
    method, count = settings.method, 0
    job, state = train.start(settings, model())
    key, rate = job.key, settings.learning_rate
    mu = settings.smoothing
    theta, unravel = jax.flatten_util.ravel_pytree(state.params)
    theta, m, v = np.asarray(theta, np.float64), 0.0, 0.0
    loss_fn = tables.jit(
        lambda vector, batch: train.loss_fn(
            nnx.merge(job.graphdef, unravel(vector), job.rest), batch
        )
    )
    for i in range(2):
        batch = jax.tree.map(lambda leaf, i=i: leaf[i : i + 4], TRAIN)

        def loss(vector: np.ndarray, batch: Batch = batch) -> float:
            nonlocal count
            count += 1
            return float(loss_fn(jnp.asarray(vector, jnp.float32), batch))

        back = 0 if settings.difference == "forward" else 1
        base = loss(theta) if back == 0 else 0.0
        g = 0.0
        for k in range(settings.num_directions):
            # The directions of a step have the step's key folded once more.
            u_key = jax.random.fold_in(jax.random.fold_in(key, i), k)
            u = np.asarray(jax.random.normal(u_key, theta.shape), np.float64)
            before = loss(theta - mu * u) if back else base
            slope = (loss(theta + mu * u) - before) / ((1 + back) * mu)
            g = g + slope * u / settings.num_directions
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * (m if method == "radazo" else g) ** 2
        step = {
            "radazo": m / np.sqrt(v + 1e-8),
            "zo_adamm": m / np.sqrt(v + 1e-8),
            "zo_rmsprop": g / np.sqrt(v + 1e-8),
            "zo_sgd": g,
        }[method]
        theta = theta - rate * step
        state, _ = tiny.train_step(job, state, batch)
    found = jax.flatten_util.ravel_pytree(state.params)[0]
    moved = np.abs(theta - np.asarray(found)).max()
    assert moved < 0.02 * rate, moved
    assert int(state.step) == 2
    assert count == 2 * settings.num_evaluations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "adam"}, "method must be one of radazo, zo_adamm"),
        ({"tune": "head"}, "tune must be one of lora, prompt, full, scales; got head"),
        ({"learning_rate": -1.0}, "learning_rate must be 0 or more; got -1.0"),
        ({"num_steps": 0}, "num_steps must be positive; got 0"),
        ({"smoothing": float("nan")}, "smoothing must be positive; got nan"),
        ({"seed": -1}, "seed must be 0 or more; got -1"),
        ({"last_layers": 2, "tune": "full"}, "last_layers must be 0 unless lora or"),
        ({"last_layers": 2, "quantize": "int4"}, "last_layers must be 0 unless lora"),
        ({"warmup_steps": -1}, "warmup_steps must be 0 or more; got -1"),
        ({"b1": 1.0}, "b1 must be in [0, 1); got 1.0"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError) as error:
        train.Settings(**options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("tune", "tuned"),
    [
        ("lora", nnx.LoRAParam),
        ("prompt", lora.PromptParam),
        pytest.param("full", nnx.Param, marks=pytest.mark.slow),
    ],
)
def test_tuning_changes_what_is_tuned_and_no_other_byte(tune, tuned):
    settings = dataclasses.replace(SETTINGS, tune=tune, learning_rate=1e-2)
    job, state = train.start(settings, model())

    def everything(state):
        return nnx.merge(job.graphdef, state.params, job.rest)

    before = arrays(everything(state))
    chosen = {
        path for path, _ in nnx.to_flat_state(nnx.state(everything(state), tuned))
    }
    assert chosen == (before.keys() if tune == "full" else chosen & before.keys())
    for i in range(3):
        batch = jax.tree.map(lambda leaf, i=i: leaf[i : i + 4], TRAIN)
        state, loss = tiny.train_step(job, state, batch)
        assert jnp.isfinite(loss)
    after = arrays(everything(state))
    assert after.keys() == before.keys()
    for path in before:
        same = before[path].tobytes() == after[path].tobytes()
        assert same != (path in chosen), path
