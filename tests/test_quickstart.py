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

_EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def _run(script: str, *arguments: object, **environment: str) -> str:
    """What a script prints, in a process of its own in which warnings are errors."""
    path = [str(_EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(_EXAMPLES / script), *map(str, arguments)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        | environment,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert "100%" in done.stderr  # A progress bar.
    return done.stdout


def _accuracies(stdout: str) -> list[float]:
    return [float(found) for found in re.findall(r"([\d.]+)%", stdout)]


def test_quickstart_is_short() -> None:
    assert len((_EXAMPLES / "quickstart.py").read_text().splitlines()) <= 90


def test_quickstart_in_a_few_steps(tmp_path: pathlib.Path) -> None:
    # A folder that is not there yet is made. The run is nearly all compilation, so the
    # compiler is told not to try hard.
    picture, quick = (
        tmp_path / "made" / "picture.png",
        "--xla_backend_optimization_level=0",
    )
    stdout = _run("quickstart.py", "--steps", 200, "--output", picture, XLA_FLAGS=quick)
    (accuracy,) = _accuracies(stdout)
    assert 60 < accuracy <= 100  # Guessing gives 10.
    assert f"The picture is {picture}." in stdout
    image = picture.read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(image[16:20], "big") >= 1200  # Its width.


@pytest.mark.slow
def test_quickstart_learns_the_digits(tmp_path: pathlib.Path) -> None:
    (accuracy,) = _accuracies(_run("quickstart.py", "--output", tmp_path / "q.png"))
    assert accuracy >= 96


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
