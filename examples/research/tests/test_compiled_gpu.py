"""Whole steps, compiled for GPUs that need not exist.

JAX's plugin for CUDA looks for a GPU when JAX starts, so each program is compiled in a
process of its own. The figures hold for JAX 0.10.2.
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import click
import jax
import pytest

from benchmarks import gpus

ROOT = pathlib.Path(__file__).parents[1]
compiles = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason='needs the GPU compiler: pip install "radazo-jax[gpu-aot]"',
    ),
]

STEPS = """
import json, sys
from benchmarks import memory, models

target = sys.argv[1]
memory.MODELS["gpu"] = {
    # A tied embedding of 2^25 elements, whose logits are made sequence by sequence.
    "decoder": lambda: models.decoder(
        num_layers=2, width=512, num_heads=4, vocabulary=2**16
    )
}
bytes = {}
for distribution in ("", "sphere", "low_rank"):
    run = "zo_sgd" if distribution else "forward"
    case = dict(platform=target, model="decoder", run=run)
    case |= dict(distribution=distribution, K=1 if distribution else "")
    bytes[distribution or run] = memory.measured(case)["bytes"]
print(json.dumps(bytes))
"""

SENT = """
import json, sys
import click
import jax
from benchmarks import scaling

jax.config.update("jax_num_cpu_devices", 8)
small = dict(num_layers=2, width=256, num_heads=4, vocabulary=8192, length=64)
decoder = scaling.models.decoder
scaling.models.decoder = lambda **options: decoder(**options | small)
rows = []
for kind, spread, distribution, num_evaluations in json.loads(sys.argv[1]):
    case = scaling.Case(kind, scaling.Spread(*spread), distribution, num_evaluations)
    rows.append(scaling.measured("gpu", case))
print(json.dumps(rows))
"""


def run(script, *args):
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env=os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


class TestCompiled:
    pytestmark = compiles

    @pytest.mark.parametrize("target", ["h100", "rtx4090_triton"])
    def test_a_step_takes_little_more_memory_than_the_forward_pass(self, target):
        held = run(STEPS, target)
        forward = held.pop("forward")
        for distribution, total in held.items():
            # Built as a whole, the perturbed embedding would take 67 MB of 400 MB.
            assert total <= 1.05 * forward, distribution

    def test_eight_gpus_send_the_values_alone(self):
        [facts] = run(SENT, json.dumps([("strong", (8, 1, 1), "low_rank", 8)]))
        assert facts["devices"] == [gpus.GPUS["h100"].name]
        assert facts["host_transfers"] == []
        assert 0 < facts["sent_bytes"] <= 4 * 8 + 64

    def test_a_sharded_leaf_is_gathered_in_its_dtype(self):
        mesh = (2, 2, 2)
        cases = [("forward", mesh, "", None), ("weak", mesh, "rademacher", 2)]
        forward, step = run(SENT, json.dumps(cases))
        embedding = 8192 * 256
        assert 2 * embedding <= forward["largest_bytes"] < 4 * embedding
        assert step["largest_bytes"] <= forward["largest_bytes"]
        # An evaluation a device: what the forward pass sends, and both losses.
        assert step["sent_bytes"] == forward["sent_bytes"] + 4 * 2


def test_a_target_that_is_no_gpu_is_named():
    with pytest.raises(
        click.ClickException, match=r"must be a GPU, one of .*; got 'v5e'\.$"
    ):
        gpus.devices("v5e")


@pytest.mark.parametrize("found", ["0.9.2", None])
def test_a_plugin_of_another_version_is_named(monkeypatch, found):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    expected = rf"must be of JAX's version, {jax.__version__}; got {found or 'none'}\."
    with pytest.raises(click.ClickException, match=expected) as error:
        gpus.devices("h100")
    assert "\n" not in str(error.value)
