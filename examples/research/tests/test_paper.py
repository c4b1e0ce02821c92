"""The paper's experiments run."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from common import RESEARCH
from paper import network


def _run(script, *arguments):
    # Small runs are nearly all compilation: the compiler need not try hard.
    environment = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-W", "error", "-m", f"paper.{script}", *arguments]
    return subprocess.run(
        [str(part) for part in command],
        cwd=RESEARCH,
        env=os.environ | environment,
        capture_output=True,
        encoding="utf-8",
    )


@pytest.mark.parametrize(
    "name",
    [
        "synthetic",
        pytest.param("moments", marks=pytest.mark.slow),
        pytest.param("attack", marks=pytest.mark.slow),
        pytest.param("tuned", marks=pytest.mark.slow),
    ],
)
def test_fast_run(name, tmp_path):
    """A script has one test, because each property would need another run."""
    output = tmp_path / "made"
    some = ("--functions", "Cubic") if name == "synthetic" else ()
    done = _run(name, "--fast", "--output", output, *some)
    assert done.returncode == 0, done.stderr

    assert f"Wrote {output / name}.json" in done.stdout
    assert re.search(r"^-+(  -+)+$", done.stdout, re.MULTILINE)  # A table.
    assert "100%" in done.stderr  # A progress bar.

    content = json.loads((output / f"{name}.json").read_text(encoding="utf-8"))
    assert f"python -m paper.{name} --fast --output {output}" in content["command"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert {"python", "jax", "optax", "radazo_jax"} <= set(content["versions"])
    assert content["settings"]["seeds"] == 2

    if name != "moments":  # It has no figure.
        image = (output / f"{name}.png").read_bytes()
        assert image.startswith(b"\x89PNG\r\n\x1a\n")
        assert int.from_bytes(image[16:20], "big") >= 200

    if name == "synthetic":
        for gaps in content["gaps"].values():
            starts = {tuple(curve[0] for curve in seeds) for seeds in gaps.values()}
            assert len(starts) == 1  # All methods start alike.
            for method in ("R-AdaZO", "ZO-AdaMM", "ZO-RMSProp"):
                assert all(curve[-1] < curve[0] for curve in gaps[method])


def test_images_that_are_attacked():
    data = network.load()
    for images, found in (
        (data.train_images, data.train_labels),
        (data.test_images, data.test_labels),
    ):
        assert images.shape == (len(found), 28, 28, 1) and images.dtype == np.float32
        assert images.min() == 0 and images.max() == 1 and set(found) == set(range(10))
