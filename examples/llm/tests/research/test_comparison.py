"""Records that compare methods, and the page that describes them."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from research import comparison
from research.common import RECORDS


# The comparison.
def _run(method: str, losses: list[float], **others: object) -> dict[str, object]:
    values = {"tune": "lora", "b1": 0.9, "learning_rate": 5e-5, "seed": 0} | others
    points = range(len(losses))
    return values | {
        "method": method,
        "step": [10 * i for i in points],
        "train_loss": losses,
        "train_accuracy": [0.5 for _ in points],
        "dev_accuracy": [0.5 for _ in points],
    }


def test_steps_to_a_loss_are_interpolated_and_infinite_if_never():
    runs = [
        _run("R-AdaZO", [1.0, 0.5, 0.0]),
        _run("R-AdaZO", [1.0, 0.9, 0.8], seed=1),
    ]
    found = comparison.group(runs, "lora", "R-AdaZO")
    steps = comparison.steps_to(found, np.array([0.75, 0.7]))
    np.testing.assert_allclose(steps, [5.0, np.inf])


def test_best_rate_is_sought_upward_while_the_loss_falls():
    asked = []

    def run(*, learning_rate: float, **others: str) -> dict[str, list[float]]:
        asked.append(learning_rate)
        return {"train_loss": [1.0, abs(np.log(learning_rate / 8e-4))]}

    assert comparison.best_rate(run, "lora", "radazo", 6) == pytest.approx(8e-4)
    np.testing.assert_allclose(asked, [5e-5, 2e-4, 8e-4, 3.2e-3])


# What research/records/README.md says of the comparison, held against its file.
@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    path = RECORDS / "llm.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_settings_of_the_comparison_are_the_appendix(content):
    settings = content["settings"]
    assert settings["num_directions"] == 1
    assert settings["learning_rate"] == 5e-5
    assert settings["smoothing"] == 1e-3
    assert (settings["b1"], settings["b2"]) == (0.9, 0.99)
    assert settings["seeds"] == 3
    assert "--fast" not in content["command"]


@pytest.fixture(scope="module")
def equal(content) -> dict[str, dict[str, comparison.Group]]:
    return {
        tune: {one.name: one for one in comparison.equal_rates(content["runs"], tune)}
        for tune in comparison.TUNES
    }


@pytest.mark.parametrize("tune", comparison.TUNES)
def test_radazo_is_faster_at_equal_rates_on_each_seed(equal, tune):
    ours, other = equal[tune]["R-AdaZO"], equal[tune]["ZO-AdaMM"]
    assert len(ours.losses) == 3
    steps = comparison.steps_to(ours, other.losses[:, -1])
    assert (steps < other.steps[-1] / 2).all()


@pytest.mark.parametrize("tune", comparison.TUNES)
def test_zo_adamm_and_zo_rmsprop_learn_alike(equal, tune):
    """Their losses fall equally far, to a fifth."""
    one, two = equal[tune]["ZO-AdaMM"], equal[tune]["ZO-RMSProp"]
    falls = [(g.losses[:, 0] - g.losses[:, -1]).mean() for g in (one, two)]
    assert falls[0] == pytest.approx(falls[1], rel=0.2)


@pytest.mark.slow
def test_the_comparison_runs_on_a_bare_machine(tmp_path):
    output = tmp_path / "fast.json"
    root = pathlib.Path(comparison.__file__).parents[1]
    path = f"{root}:{os.environ.get('PYTHONPATH', '')}"
    # A small run is nearly all compilation: the compiler need not try hard.
    flags = "--xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-m", "research.comparison", "--fast", "--output", output],
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": flags},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(output.read_text(encoding="utf-8"))
    for table in comparison.tables(content):
        assert f"\n{table.caption}\n\n{table.format()}" in done.stdout
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
