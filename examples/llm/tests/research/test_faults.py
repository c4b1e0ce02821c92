"""Runs that are disturbed; `python -m research.faults` does more."""

import pathlib
import shutil
import subprocess
import sys
import types

import pytest

from radazo_llm.tune import checkpoint
from research.faults import build

ROOT = pathlib.Path(__file__).parents[2]
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def test_threads_that_write_late_tell_nothing(monkeypatch, tmp_path):
    """A full disk ends in the one line of the command."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    for _ in range(2):
        with checkpoint.opened(tmp_path):
            pass
    for text in ("Event loop is closed", "another"):
        raised = types.SimpleNamespace(exc_value=RuntimeError(text))
        sys.unraisablehook(raised)
    assert [str(raised.exc_value) for raised in told] == ["another"]


@needs_cc
@pytest.mark.slow
def test_disturbed_runs_go_on_or_say_why_not():
    """A run of each kind of fault."""
    command = [sys.executable, "-m", "research.faults"]
    numbers = ["--kills", "1", "--moments", "1", "--full", "1", "--seed", "1"]
    done = subprocess.run(
        [*command, *numbers], cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("'then': ") == 3


COUNTED = """
import ctypes, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
at, mode = int(sys.argv[2]), int(sys.argv[3])
log = str(folder) + ".log"
kind = sys.argv[4].encode() if len(sys.argv) > 4 else None
shim = ctypes.CDLL(None)
shim.fault_arm(str(folder).encode(), log.encode(), ctypes.c_long(at), mode, kind)
(folder / "a").write_bytes(b"0123")
os.replace(folder / "a", folder / "b")
(pathlib.Path(str(folder) + "-beside")).write_bytes(b"0")
(folder / "b").unlink()
"""


@needs_cc
@pytest.mark.parametrize(
    ("at", "mode", "code", "left"),
    [
        (-1, 0, 0, {}),
        (0, 1, -9, {}),
        (1, 1, -9, {"a": b"01"}),
        (2, 1, -9, {"a": b"0123"}),
        (3, 1, -9, {"b": b"0123"}),
        (0, 2, 1, {}),
        (1, 2, 1, {"a": b""}),
        (2, 2, 0, {}),
    ],
)
def test_the_shim_counts_kills_and_fills(at, mode, code, left, tmp_path):
    """Removing needs no space, and a full disk takes nothing away."""
    folder = tmp_path / "run"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, str(folder), str(at), str(mode)],
        env=build.environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert ("No space left on device" in done.stderr) == (code == 1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == left
    if mode == 0:
        log = (tmp_path / "run.log").read_text("utf-8").splitlines()
        changes = [line.replace(str(folder), "") for line in log]
        assert changes == ["0 open /a", "1 write /a", "2 rename /b", "3 remove /b"]


@needs_cc
@pytest.mark.parametrize(
    ("kind", "at", "code", "left"),
    [
        ("rename .*/b$", 0, -9, {"a": b"0123"}),
        ("(open|write) .*", 1, -9, {"a": b"01"}),
        ("rename .*", 1, 0, {}),
    ],
)
def test_the_shim_kills_at_a_change_of_a_kind(kind, at, code, left, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    numbers = [str(folder), str(at), "1", f"^[0-9]+ {kind}"]
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, *numbers], env=build.environment(tmp_path)
    )
    assert done.returncode == code
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == left
