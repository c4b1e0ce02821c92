"""The examples of black boxes run, and say what the other tools reach."""

import json
import os
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pytest

import radazo_jax as zo
from examples import calibrate

_ROOT = pathlib.Path(__file__).parents[2]
_NEEDS = {
    "mujoco_policy": ["mujoco", "gymnasium"],
    "onnx_int8": ["onnx", "onnxruntime"],
    "pipeline": [],
}


def _run(script, *arguments):
    path = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-W", "error", f"{_ROOT}/examples/{script}", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        encoding="utf-8",
    )


@pytest.mark.slow
def test_a_simulator_in_processes():
    assert len((_ROOT / "examples/black_box.py").read_text().splitlines()) <= 40
    done = _run("black_box.py")
    assert done.returncode == 0, done.stderr
    assert "200/200" in done.stderr  # A progress bar.
    rates, loss = re.findall(r"\[(.*)\] loss: (.*)", done.stdout)[0]
    # The rates of the simulation that it observed.
    np.testing.assert_allclose(
        np.fromstring(rates, sep=" "), [1.1, 0.8, 0.6, 0.9], rtol=0.1
    )
    assert 0 <= float(loss) < 1e-3


def _calibrated(output):
    """The loss of a calibration, and the number of points that failed."""
    found = re.search(r"loss: (.*), of .*\nfailed: (.*)", output)
    return float(found[1]), int(found[2])


@pytest.mark.slow
def test_a_calibration_without_processes(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "--evaluations", "40"])
    calibrate.main()
    first = calibrate.loss(calibrate.START)
    assert _calibrated(capsys.readouterr().out)[0] < 0.9 * first


@pytest.mark.slow
def test_a_calibration_in_processes():
    """The noise is not fitted: χ² of 82 values has a standard deviation of 0.16."""
    done = _run("calibrate.py", "--processes", "2")
    assert done.returncode == 0, done.stderr
    loss, _ = _calibrated(done.stdout)
    assert loss < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("name", _NEEDS)
def test_fast_run(name, tmp_path):
    for module in ("cma", "nevergrad", *_NEEDS[name]):
        pytest.importorskip(module)
    done = _run(f"black_boxes/{name}.py", "--fast", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "100%" in done.stderr
    content = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert {"cma", "nevergrad"} <= set(content["versions"])
    for tool, run in content["runs"].items():
        assert tool in done.stdout
        # All tools had as many evaluations, up to a step of each.
        for evaluations in run["evaluations"]:
            assert abs(evaluations - content["settings"]["evaluations"]) < 20
        for curve, loss in zip(run["curves"], run["loss"], strict=True):
            # pycma completes its last population.
            assert np.all(np.diff(curve) <= 0) and curve[-1] >= loss
            assert loss < content["start"]["loss"]
    for picture in tmp_path.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_compared_runs_of_this_library(monkeypatch):
    """They need none of the tools that they are compared with."""
    for module in ("cma", "nevergrad"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    from examples.black_boxes import compare

    problem = compare.Problem(
        lambda x: float(np.sum((x - 1) ** 2)),
        np.zeros(2, np.float32),
        zo.forward_difference(num_directions=2),
        rates=[0.1],
        sigmas=[0.1],
    )
    runs = [
        compare.radazo(problem, 0.1, 30, 0, None),
        compare.default(problem, None, 30, 0, None),
    ]
    for run in runs:
        assert 27 <= len(run.values) <= 30
        assert run.values[0] == 2 and run.values.min() == problem.loss(run.params) < 1
