"""The plan of a run, against runs and arrays."""

import re

import jax
import numpy as np
import pytest
from flax import nnx

from radazo_llm.models import lora
from radazo_llm.run import usage

from .. import tables, tiny


def num_bytes(tree):
    return sum(np.asarray(x).nbytes for x in jax.tree.leaves(tree))


SIZES = ("--batch-size", 2, "--eval-batch-size", 2, "--lora-rank", 2, "--length", 8)


def planned(job, capsys, *options):
    """The numbers of the table, in MiB, and what follows it."""
    tiny.command("plan", "--model", job, *SIZES, *options)
    out = capsys.readouterr().out
    rows = re.findall(r"^((?:Memory|Disk): .*?)  +([\d,.]+)$", out, re.MULTILINE)
    return {name: float(number.replace(",", "")) for name, number in rows}, out


@pytest.mark.parametrize(
    "options",
    [(), tables.slow(("--quantize", "int8")), tables.slow(("--last-layers", 1))],
)
def test_the_plan_has_the_sizes_of_a_run(job, capsys, options):
    found, out = planned(job, capsys, *options)
    model = tiny.model()
    loaded = num_bytes(nnx.state(model)) / usage.MIB
    assert found["Memory: the model"] == pytest.approx(loaded, abs=0.06)
    lora.add_lora(model, rank=2, rngs=nnx.Rngs(0))
    tuned = num_bytes(nnx.state(model, nnx.LoRAParam)) / usage.MIB
    assert found["Memory: tuned parameters"] == pytest.approx(tuned, abs=0.06)
    assert found["Disk: what is exported"] == pytest.approx(tuned, abs=0.06)
    outputs = 1500 * 8 * 16 * 4 / usage.MIB if "--last-layers" in options else 0
    assert found["Disk: outputs of frozen layers"] == pytest.approx(outputs, abs=0.06)
    assert found["Memory: the process, all in all"] > 50
    assert re.search(r"A step takes .* for 1,000 steps, without evaluations", out)


def test_a_model_that_does_not_fit_is_one_line(job, capsys, monkeypatch):
    monkeypatch.setattr(usage, "available", lambda: 1000)
    line = tiny.refused(capsys, "plan", "--model", job, *SIZES)
    assert "--model must fit into memory: it takes" in line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--length", "33"], "--length must be at most 32, the positions of the model"),
        (["--quantize", "file"], "--quantize must not be file"),
        (["--last-layers", "2"], "--last-layers must be from 1 to 1 for a model of 2"),
        (["--length", "0"], "Invalid value for '--length'"),
    ],
)
def test_what_cannot_be_planned_is_one_line(job, capsys, given, message):
    assert message in tiny.refused(capsys, "plan", "--model", job, *SIZES, *given)
