"""Optax's own tests pass with our optimizers, and fail with broken ones."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers.tables import slow

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
        [sys.executable, "-m", "tests.transforms.optax_suite", *arguments],
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


@pytest.mark.parametrize(
    ("module", "at_least"),
    [
        slow("alias", 100),
        slow("common", 80),
        slow("sharding", 24),
        slow("float64", 11),
    ],
)
def test_optax_tests_pass(module, at_least):
    assert_passes(at_least, module)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "at_least"), [("alias", 30), ("common", 19)])
def test_optax_tests_pass_with_radazo(module, at_least):
    assert_passes(at_least, module, "--optimizers", "radazo")


def assert_passes(at_least, *arguments):
    finished, counts = run(*arguments)
    assert finished.returncode == 0, finished.stdout
    assert counts["failed"] == counts["errors"] == 0
    assert counts["passed"] >= at_least


@pytest.mark.parametrize(
    ("fault", "found_by"),
    [
        slow("flipped_sign", "test_optimization"),
        slow("float_counter", "test_state_shape_dtype_shard_stability"),
        slow("dropped_extra_args", "test_optimizers_accept_extra_args"),
    ],
)
def test_optax_tests_find(fault, found_by):
    finished, counts = run(
        "alias", "--fault", fault, "--optimizers", "radazo", "--tests", found_by
    )
    assert finished.returncode == 1
    assert counts["passed"] == 0
    assert counts["broken"]
    assert all(name.startswith(found_by) for name in counts["broken"])
