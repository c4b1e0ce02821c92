"""The learning rate of a run whose settings have none."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from radazo_llm.tune.rate import before_rate
from radazo_llm.tune.run import run

from ..tiny import DEV, SETTINGS, TRAIN, metrics, model

SETTINGS = dataclasses.replace(SETTINGS, learning_rate=0.0)


def test_the_rate_is_measured_printed_and_found_again(tmp_path, capsys):
    result = run(SETTINGS, model(), TRAIN, DEV, folder=tmp_path)
    printed = capsys.readouterr().out
    assert "learning rate" in printed and "decayed to 0 over     12 steps" in printed
    losses = [line["loss"] for line in metrics(tmp_path) if "loss" in line]
    longer = dataclasses.replace(SETTINGS, eval_every=6)
    again = run(longer, model(), TRAIN, DEV, folder=tmp_path, resume=True)
    # A run that resumes at its end measures the same rate, and takes no step.
    assert capsys.readouterr().out == printed
    assert again.evaluations == result.evaluations
    assert len(losses) == 12


def test_the_first_step_of_a_measured_rate_is_no_longer_than_others():
    """Ten times as long, it left the region that the rate was measured in."""
    gradient = jnp.ones(3)
    for settings, first in ((before_rate(SETTINGS), 0.1), (SETTINGS, 1.0)):
        optimizer = settings.optimizer(0.1, settings.b1)
        updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
        np.testing.assert_allclose(updates, -first, rtol=1e-3)
    given = dataclasses.replace(SETTINGS, learning_rate=1e-3)
    assert before_rate(given) == given


@pytest.mark.slow
def test_an_accuracy_has_the_rate_of_its_choices(capsys):
    settings = dataclasses.replace(SETTINGS, objective="accuracy", smoothing=0.3)
    result = run(settings, model(), TRAIN, DEV)
    rate = capsys.readouterr().out.splitlines()[0]
    run(dataclasses.replace(settings, objective="classification"), model(), TRAIN, DEV)
    assert capsys.readouterr().out.splitlines()[0] == rate
    for row in result.evaluations:
        assert row["train_loss"] == pytest.approx(1 - row["train_accuracy"])


def test_a_rate_that_cannot_be_measured_must_be_given(monkeypatch):
    def flat(*args, **options):
        raise ValueError("fun must rise")

    monkeypatch.setattr("radazo_jax.find_learning_rate", flat)
    expected = r"--learning-rate must be given .*: fun must rise.* Give --learning-rate"
    with pytest.raises(ValueError, match=expected):
        run(SETTINGS, model(), TRAIN, DEV)


def test_other_methods_need_a_rate():
    settings = dataclasses.replace(SETTINGS, method="zo_sgd")
    with pytest.raises(ValueError, match="learning_rate must be positive with the"):
        run(settings, model(), TRAIN, DEV)
