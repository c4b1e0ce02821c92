"""Whole steps, compiled for TPUs that need not exist.

The TPU compiler takes a lock and looks at its environment when JAX is imported, so each
program is compiled in a process of its own. The figures hold for JAX 0.10.2.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason='needs the TPU compiler: pip install "radazo-jax[tpu-aot]"',
    ),
]

ROOT = pathlib.Path(__file__).parents[1]

CASE = """
import json, sys
from benchmarks import scaling

spread, distribution, num_evaluations = json.loads(sys.argv[1])
case = scaling.Case("weak", scaling.Spread(*spread), distribution, num_evaluations)
print(json.dumps(scaling.measured("tpu", case)))
"""

STEPS = """
import json
import jax
import numpy as np
from benchmarks import memory, models, programs
from jax.sharding import Mesh

model = models.grouped_query_decoder(num_layers=4)
mesh = Mesh(np.array([memory.device("tpu")]), ("one",))
peaks = {}
for distribution in ("", "gaussian", "rademacher", "low_rank"):
    run = "zo_sgd" if distribution else "forward"
    fun, args, donated = memory.program(model, run, distribution, 2)
    args = programs.placed(args, mesh, lambda x: jax.P())
    compiled = programs.compiled_on(mesh, fun, args, donated)
    peak = compiled.memory_analysis().peak_memory_in_bytes
    peaks[distribution or run] = peak
print(json.dumps(peaks))
"""

EVALUATION = """
import json, sys
from benchmarks import memory, models

scanned = json.loads(sys.argv[1])
memory.MODELS["tpu"]["unseen"] = lambda: models.multi_query_decoder(2, scanned)
found = {}
for run, distribution in (("forward", ""), ("perturb", "gaussian")):
    case = dict(platform="tpu", model="unseen", run=run)
    found[run] = memory.measured(case | dict(distribution=distribution, K=""))
print(json.dumps(found))
"""

GIBIBYTE = 2**30
# A v5e chip has 16 GiB.
MEMORY = 16 * GIBIBYTE
# Parameters in bfloat16, two moments in float32, of 1.3B parameters.
STATE = 1_310_834_688 * (2 + 4 + 4)


def run(script, *args):
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env=os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def compiled(spread, distribution, num_evaluations):
    return run(CASE, json.dumps([spread, distribution, num_evaluations]))


@pytest.mark.parametrize("distribution", ["rademacher", "low_rank"])
def test_decoder_step_on_one_chip(distribution):
    facts = compiled((1, 1, 1), distribution, 2)
    assert facts["host_transfers"] == []
    assert facts["sent_bytes"] == 0
    assert STATE * 0.999 <= facts["aliased_bytes"] <= STATE * 1.01
    assert facts["peak_bytes"] <= STATE + 1.2 * GIBIBYTE < MEMORY


def test_step_of_another_decoder_takes_the_memory_of_its_forward_pass():
    # All layers' weights stay as they lie, in the loop over the layers that stands in
    # the loop over the directions.
    peaks = run(STEPS)
    forward = peaks.pop("forward")
    for distribution, peak in peaks.items():
        assert peak <= 1.02 * forward, distribution


@pytest.mark.parametrize("scanned", [True, False])
def test_evaluation_of_an_unseen_decoder_takes_the_memory_of_its_forward_pass(scanned):
    found = run(EVALUATION, json.dumps(scanned))
    for measured in ("bytes", "peak_bytes"):
        forward, perturbed = (found[of][measured] for of in ("forward", "perturb"))
        assert perturbed <= 1.015 * forward, measured


@pytest.mark.parametrize(
    "distribution", ["sphere", "gaussian", "rademacher", "low_rank"]
)
def test_evaluations_spread_over_eight_chips(distribution):
    alone = compiled((1, 1, 1), distribution, 2)
    facts = compiled((8, 1, 1), distribution, 8)
    assert facts["host_transfers"] == []
    assert 0 < facts["sent_bytes"] <= 4 * 8 + 64
    assert facts["aliased_bytes"] >= STATE * 0.999
    share = alone["evaluation_flops"] / 2
    assert facts["evaluation_flops"] == pytest.approx(share, rel=0.05)


def test_minibatch_and_evaluations_spread_over_eight_chips():
    facts = compiled((2, 4, 1), "rademacher", 8)
    assert 0 < facts["sent_bytes"] <= 4 * 8 + 64


def test_all_three_axes_on_256_chips():
    facts = compiled((4, 8, 8), "low_rank", 4)
    assert facts["host_transfers"] == []
    assert facts["aliased_bytes"] <= STATE / 8 * 1.01
    assert facts["peak_bytes"] < 0.25 * MEMORY
    embedding = 2 * 50272 * 2048
    assert facts["largest_bytes"] <= embedding, "as the forward pass gathers it"
