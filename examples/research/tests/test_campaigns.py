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


def test_a_long_run_ends_at_its_last_step():
    told, _ = campaign("long_run", "--steps", "1000", "--journal-steps", "100")
    *parts, journal = told.splitlines()
    assert len(parts) == 10 and f"'step': {2**31 - 1}," in parts[-1]
    assert "'equal': True" in journal


@pytest.mark.slow
def test_random_programs_are_perturbed_right():
    _, progress = campaign("fuzz", "--programs", "100", "--seed", "100000")
    assert "100 programs" in progress


@pytest.mark.slow
def test_a_killed_run_ends_as_another():
    told, _ = campaign("killed_runs", "--kills", "2")
    assert told == "after 2 of 2 kills, all 80 steps equal: True\n"


@needs_cc
@pytest.mark.slow
def test_disturbed_runs_continue_or_say_why_not():
    """A run of each kind of fault."""
    options = ["--kills", "1", "--moments", "1", "--full", "1", "--seed", "1"]
    told, _ = campaign("faults", *options)
    assert told.count("'then': ") == 3


@needs_cc
@pytest.mark.slow
def test_runs_continue_from_copies_of_checkpoints():
    told, _ = campaign("faults.snapshots", "--copies", "2")
    assert "'tried': 2," in told and "'failed': 0" in told
