"""The plan of a run, against runs and arrays."""

import re

import jax
import numpy as np
import pytest
from flax import nnx

from radazo_llm.models import lora
from radazo_llm.tune import plan
from radazo_llm.tune.settings import Settings

from .. import tiny
from ..tiny import SETTINGS

LENGTH = 8  # Tokens of a sentence of `job`, rounded up to a multiple of 8.


def num_bytes(tree):
    return sum(np.asarray(x).nbytes for x in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def needs(job):
    return plan.needs(SETTINGS, job, 8, 40, "float32")[0]


def test_the_model_and_what_is_tuned_have_their_sizes(needs):
    model = tiny.model()
    loaded = num_bytes(nnx.state(model))
    assert needs["Memory: the model as it is loaded"] == loaded
    assert needs["Disk: a merged model"] == loaded
    lora.add_lora(model, rank=SETTINGS.lora_rank, rngs=nnx.Rngs(0))
    tuned = num_bytes(nnx.state(model, nnx.LoRAParam))
    assert needs["Memory: tuned parameters"] == tuned
    assert needs["Memory: the model in a step"] == loaded + tuned
    # Two moments, and a count.
    assert tuned * 2 <= needs["Memory: the optimizer's state"] < tuned * 2 + 64
    saved = 3 * tuned
    assert 2 * saved <= needs["Disk: checkpoints"] < 2 * (saved + 64)


def test_a_step_holds_the_model_and_little_more(needs):
    step = needs["Memory: a step, all in all"]
    arguments = needs["Memory: the model in a step"]
    arguments += needs["Memory: the optimizer's state"]
    assert arguments < step < 4 * arguments


@pytest.mark.slow
def test_outputs_of_frozen_layers_have_the_size_of_their_files(job, tmp_path):
    options = ("--steps", 1, "--last-layers", 1, "--batch-size", 2, "--lora-rank", 2)
    data = ("--model", job, "--data", job, "--task", "sst2", "--output", tmp_path)
    tiny.command("tune", *data, *options, "--learning-rate", 1e-3)
    files = [*(tmp_path / "frozen").glob("*.outputs")]
    written = sum(path.stat().st_size for path in files)
    settings = Settings(last_layers=1, batch_size=2, lora_rank=2, num_steps=1)
    # The two splits have the same sentences, and so the same file.
    found, _ = plan.needs(settings, job, LENGTH, 20, "float32")
    assert found["Disk: outputs of frozen layers"] == written
    full, _ = plan.needs(
        Settings(batch_size=2, lora_rank=2), job, LENGTH, 20, "float32"
    )
    assert found["Memory: the model in a step"] < full["Memory: the model in a step"]


def test_matrices_in_eight_bits_take_less(job):
    settings = Settings(quantize="int8", batch_size=2, lora_rank=2)
    found, _ = plan.needs(settings, job, 8, 40, "float32")
    plain, _ = plan.needs(Settings(batch_size=2, lora_rank=2), job, 8, 40, "float32")
    name = "Memory: the model in a step"
    assert found[name] < plain[name]


def test_the_command_prints_a_table(job, capsys):
    tiny.command("plan", "--model", job, "--length", 8, "--batch-size", 2)
    out = capsys.readouterr().out
    assert "for 8 tokens" in out
    for name in ("a step, all in all", "the optimizer's state", "Disk: checkpoints"):
        (number,) = re.findall(rf"{name} +([\d,.]+)\n", out)
        assert float(number) >= 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--length", "33"], "length must be at most 32, the positions of the model"),
        (["--quantize", "file"], "quantize must not be file"),
        (["--last-layers", "2"], "last_layers must be from 1 to 1 for a model of 2"),
        (["--length", "0"], "Invalid value for '--length'"),
    ],
)
def test_what_cannot_be_planned_is_one_line(job, capsys, given, message):
    with pytest.raises(SystemExit) as error:
        tiny.command("plan", "--model", job, "--length", 8, *given)
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
