"""Each campaign runs; the commands on the records do more."""

import shutil
import subprocess
import sys

import pytest

from common import RESEARCH

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def campaign(name, *options):
    """Runs a campaign; returns its stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", f"campaigns.{name}", *options],
        cwd=RESEARCH,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_random_programs_are_perturbed_right():
    _, progress = campaign("fuzz", "--programs", "100", "--seed", "100000")
    assert "100 programs" in progress


@needs_cc
@pytest.mark.slow
def test_disturbed_runs_continue_or_say_why_not():
    """A run of each kind of fault."""
    options = ["--kills", "1", "--moments", "1", "--full", "1", "--seed", "1"]
    told, _ = campaign("faults", *options)
    assert told.count("'then': ") == 3
