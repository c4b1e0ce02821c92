"""What docs/black_boxes.md says of its records."""

import json
import pathlib

import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).parents[1]


def _record(name):
    path = _ROOT / "black_boxes" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def _measured(content, name):
    """A measure of each tool: an array of seeds."""
    return {
        tool: np.array([found[name] for found in run["measures"]])
        for tool, run in content["runs"].items()
    }


@pytest.mark.parametrize("name", ["mujoco_policy", "onnx_int8", "pipeline"])
def test_all_tools_had_as_many_evaluations(name):
    content = _record(name)
    allowed = content["settings"]["evaluations"]
    for tool, run in content["runs"].items():
        assert len(run["evaluations"]) == content["settings"]["seeds"] >= 3
        # A step of the default method that would exceed them is not begun. Of the last
        # population of others, some may be beyond.
        step = content["dimension"] + 1 if tool == "default method" else 16
        assert all(allowed - step < n <= allowed + 16 for n in run["evaluations"])
        assert run["scale"] == run["scales"][int(np.argmin(run["tried"]))]


def test_what_the_page_says_of_the_int8_model():
    content = _record("onnx_int8")
    loss = {tool: np.array(run["loss"]) for tool, run in content["runs"].items()}
    assert len(set(loss["default method"])) == 1
    assert loss["default method"].mean() == max(x.mean() for x in loss.values())
    accuracy = _measured(content, "test")
    default = accuracy.pop("default method").mean()
    means = [x.mean() for x in accuracy.values()]
    assert max(means) - min(means) < min(x.std(ddof=1) for x in accuracy.values())
    assert default > max(means)
    assert min(x.min() for x in accuracy.values()) > content["start"]["test"] + 0.05


def test_what_the_page_says_of_the_pipeline():
    content = _record("pipeline")
    score = _measured(content, "test")
    best = ("default method", "pycma", "Nevergrad")
    assert score["R-AdaZO"].max() < min(score[tool].min() for tool in best)
    means = [score[tool].mean() for tool in best]
    assert max(means) - min(means) < score["pycma"].std(ddof=1)
    curves = {tool: run["curves"] for tool, run in content["runs"].items()}
    assert sum(curve in curves["pycma"] for curve in curves["Nevergrad"]) == 2


def test_what_the_page_says_of_the_robot():
    content = _record("mujoco_policy")
    others, trained = (_measured(content, name) for name in ("test", "trained"))
    means = {tool: found.mean() for tool, found in trained.items()}
    assert min(means, key=means.__getitem__) == "default method"
    assert others["Nevergrad"].min() > max(
        others[x].max() for x in ("R-AdaZO", "pycma")
    )
    for tool in ("R-AdaZO", "pycma"):
        assert trained[tool].mean() > 2 * others[tool].mean()
