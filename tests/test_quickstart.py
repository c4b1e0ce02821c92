"""The quickstart does what it says, as a user runs it: in a process of its own."""

import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_SCRIPT = _ROOT / "examples" / "quickstart.py"
_METHODS = ("R-AdaZO", "ZO-AdaMM", "ZO-RMSProp", "ZO-SGD", "ZO-signSGD")
_EVALUATIONS_A_STEP = 11  # K + 1 with K = 10.
_ROW = re.compile(
    r"^(?P<method>\S+) +(?P<loss>[\d.]+) ± [\d.]+ +(?P<accuracy>[\d.]+) ± [\d.]+%"
    r" +(?P<evaluations>[\d,]+) +(?P<seconds>[\d.]+)$",
    re.MULTILINE,
)


class _Finished(NamedTuple):
    stdout: str
    stderr: str
    figure: pathlib.Path

    def row(self, method: str) -> dict[str, float]:
        (row,) = (
            m for m in _ROW.finditer(self.stdout) if m["method"] == method
        )  # Exactly one.
        columns = ("loss", "accuracy", "evaluations", "seconds")
        return {name: float(row[name].replace(",", "")) for name in columns}


def _run(figure: pathlib.Path, *arguments: str, **environment: str) -> _Finished:
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "error", _SCRIPT, "--output", figure, *arguments],
        env=os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)} | environment,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return _Finished(done.stdout, done.stderr, figure)


def test_fast_run(tmp_path: pathlib.Path) -> None:
    """One test, for workers that share its parts would each run it."""
    # A folder that is not there yet is made. The run is nearly all compilation, so
    # the compiler is told not to try hard.
    figure = tmp_path / "made" / "figure.png"
    fast = _run(figure, "--fast", XLA_FLAGS="--xla_backend_optimization_level=0")
    for method in _METHODS:
        _check_row(fast.row(method))
        assert re.search(rf"{method} *: 100%.* 120/120 .*loss=", fast.stderr)
    # Guessing costs log(10) = 2.303.
    assert fast.row("R-AdaZO")["loss"] < 1.5
    assert fast.row("R-AdaZO")["accuracy"] > 50
    _check_settings_and_caveat(fast.stdout)
    assert f"Wrote {figure}" in fast.stdout
    _check_figure(figure.read_bytes())


def _check_row(row: dict[str, float]) -> None:
    assert row["evaluations"] == 120 * _EVALUATIONS_A_STEP
    assert row["seconds"] > 0
    # Ten classes, and the start is about as good as guessing: below log(10) = 2.3
    # plus a margin for the random start.
    assert 0 < row["loss"] < 2.6
    assert 0 <= row["accuracy"] <= 100


def _check_settings_and_caveat(stdout: str) -> None:
    assert "2,410 parameters; 2 seeds" in stdout
    assert "final loss" in stdout
    assert "sphere law, K=10, μ=0.005, b1=0.9, b2=0.99, η from 0.002 to 0" in stdout
    assert "Equal η favors R-AdaZO" in stdout


def _check_figure(image: bytes) -> None:
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    width = int.from_bytes(image[16:20], "big")
    assert width >= 1200


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> _Finished:
    return _run(tmp_path_factory.mktemp("quickstart") / "figure.png")


@pytest.mark.slow
def test_radazo_learns_the_digits(full: _Finished) -> None:
    row = full.row("R-AdaZO")
    assert row["accuracy"] >= 96
    assert row["evaluations"] == 3000 * _EVALUATIONS_A_STEP
    assert "over 3 seeds" in full.stdout
    assert row["loss"] < min(
        full.row(name)["loss"] for name in _METHODS if name != "R-AdaZO"
    )


@pytest.mark.slow
def test_directions_of_rank_one_learn_as_well(
    full: _Finished, tmp_path: pathlib.Path
) -> None:
    low_rank = _run(tmp_path / "figure.png", "--law", "low_rank")
    assert "low_rank law" in low_rank.stdout
    accuracy = full.row("R-AdaZO")["accuracy"]
    assert abs(low_rank.row("R-AdaZO")["accuracy"] - accuracy) < 1
