"""The scripts that a user copies, run as a user runs them."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

pytestmark = pytest.mark.usefixtures("compiled_once")

_EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
_WITHOUT_BAR = ("many_devices.py", "many_seeds.py")
_COPIED = sorted(_EXAMPLES.glob("*.py"))


def _run(script: str, *arguments: object) -> str:
    """Returns the output of a script, in a process in which warnings are errors."""
    path = [str(_EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "error", _EXAMPLES / script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert script in _WITHOUT_BAR or "100%" in done.stderr
    return done.stdout


def _accuracies(stdout: str) -> list[float]:
    return [float(found) for found in re.findall(r"([\d.]+)%", stdout)]


@pytest.mark.parametrize("path", _COPIED, ids=lambda path: path.stem)
def test_a_file_to_copy_is_short_and_needs_no_other(path: pathlib.Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (90 if path.stem == "quickstart" else 120)
    assert "examples." not in text
    assert f"`{path.name}`" in (_EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_quickstart_in_a_few_steps(tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "made" / "picture.png"  # The folder is made, too.
    stdout = _run("quickstart.py", "--steps", 150, "--output", picture)
    (accuracy,) = _accuracies(stdout)
    assert 60 < accuracy <= 100  # Guessing gives 10.
    assert f"The picture is {picture}." in stdout
    image = picture.read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(image[16:20], "big") >= 1200  # Its width.


@pytest.mark.slow
def test_custom_estimators_withstand_outliers() -> None:
    stdout = _run("custom_estimator.py")
    found = re.findall(r"^(.+): error ([\d.]+)$", stdout, re.M)
    plain, *others = (float(error) for _, error in found)
    # The parameters are at a distance of 0.6 at the start.
    assert plain > 0.3 and len(others) == 2 and max(others) < 0.1


@pytest.mark.slow
def test_custom_distributions_smooth_a_curve() -> None:
    stdout = _run("custom_distribution.py")
    errors = [float(error) for error in re.findall(r"error ([\d.]+)", stdout)]
    assert len(errors) == 3 and max(errors) < 0.15  # The noise is 0.2.


def _sends_values_alone(stdout: str) -> None:
    assert stdout.startswith("8 devices: {'points': 4, 'data': 2}\n")
    sent = re.findall(r"f32\[([\d,]+)\]", stdout)
    # Four values of a device, and the values of all devices.
    assert sorted(sent) == ["1,4", "4,4"]


@pytest.mark.slow
def test_many_devices_learn() -> None:
    stdout = _run("many_devices.py", "--steps", 400)
    _sends_values_alone(stdout)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", stdout)]
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_many_seeds_run_in_one_program() -> None:
    stdout = _run("many_seeds.py", "--steps", 200, "--seeds", 3)
    _has_a_row_for_each_rate(stdout, 3)


def _has_a_row_for_each_rate(stdout: str, num_seeds: int) -> None:
    assert stdout.startswith(f"{num_seeds} seeds")
    rows = [_accuracies(line) for line in stdout.splitlines()[2:]]
    assert [len(row) for row in rows] == [3, 3, 3, 3]
    assert all(worst <= median <= best for median, worst, best in rows)
    assert max(median for median, _, _ in rows) > 70  # Guessing gives 10.


@pytest.mark.slow
def test_adapters_learn_and_a_run_resumes_bit_for_bit(tmp_path: pathlib.Path) -> None:
    def checkpoint(folder: pathlib.Path) -> list[np.ndarray]:
        with ocp.CheckpointManager(folder) as manager:
            state = manager.restore(400, args=ocp.args.StandardRestore())
        return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]

    options = ("--checkpoint-every", 200, "--output")
    stdout = _run("finetune_lora.py", "--steps", 400, *options, tmp_path / "whole")
    plain, before, after = _accuracies(stdout)
    assert plain > 90 and before < 60 and after > before + 10
    _run("finetune_lora.py", "--steps", 200, *options, tmp_path / "two")
    stdout = _run("finetune_lora.py", "--steps", 400, *options, tmp_path / "two")
    assert "Goes on from step 200" in stdout
    assert _accuracies(stdout)[-1] == after
    whole, two = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "two")
    assert len(whole) > 10
    for expected, found in zip(whole, two, strict=True):
        np.testing.assert_array_equal(found, expected)
