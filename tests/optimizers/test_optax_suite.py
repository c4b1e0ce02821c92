"""Optax's own tests pass with the optimizers of this package."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments):
    """Returns the exit status and the counts of a run in a process of its own."""
    # Optax's tests are not made for strict promotion.
    environment = {
        name: value for name, value in os.environ.items() if "PROMOTION" not in name
    }
    # Their programs run too seldom to be worth optimizing.
    environment["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    finished = subprocess.run(
        [sys.executable, "-m", "tests.optimizers.optax_suite", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    lines = finished.stdout.splitlines()
    assert lines, finished.stderr
    try:
        return finished, json.loads(lines[-1])
    except json.JSONDecodeError:
        pytest.fail(finished.stdout + finished.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "at_least", "optimizers"),
    [
        ("alias", 59, ["radazo", "zo_adamm", "zo_signsgd"]),
        ("common", 61, ["radazo", "zo_rmsprop", "zo_sgd"]),
        ("sharding", 21, []),
        ("float64", 10, []),
    ],
)
def test_optax_tests_pass(module, at_least, optimizers):
    finished, counts = run(module, "--optimizers", *optimizers)
    assert finished.returncode == 0, finished.stdout
    assert counts["failed"] == counts["errors"] == 0
    assert counts["passed"] >= at_least
