"""Random programs against their definition, and that no primitive is forgotten."""

import pathlib
import subprocess
import sys

import compare
import jax.numpy as jnp
import pytest
import tables
from fuzz import run
from fuzz.build import MAKERS
from fuzz.evaluate import evaluate
from fuzz.generate import with_maker
from fuzz.left_out import LEFT_OUT
from fuzz.properties import traced
from jax._src.interpreters import mlir

from radazo_jax._src.perturb import rearrange

# No primitives, but what is done with them.
OTHERS = {"vmap", "ref", "random_normal"}


def lowered_on_the_cpu():
    """From the tables of JAX itself."""
    tables = mlir._lowerings, mlir._platform_specific_lowerings["cpu"]
    return {primitive.name for table in tables for primitive in table}


def test_each_primitive_of_jax_is_made_or_left_out():
    assert lowered_on_the_cpu() - set(MAKERS) - set(LEFT_OUT) == set()
    assert set(MAKERS) & set(LEFT_OUT) == set()


def makes_it(name):
    programs = (with_maker(MAKERS[name], seed) for seed in range(40))
    return any(program and name in set(run.met(program)) for program in programs)


def test_each_maker_makes_its_primitive():
    assert [n for n in MAKERS if n not in OTHERS and not makes_it(n)] == []


def assert_no_failure(seeds, quick=False):
    report = run.run(seeds, quick)
    assert not report["failures"], "\n\n".join(report["failures"])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 60))
def test_random_programs(first):
    assert_no_failure(range(first, first + 60), quick=True)


def test_elements_of_a_direction_are_rounded_as_float32():
    """Low-rank elements too, whose factors enter a product in float64."""
    assert_no_failure(range(5414, 5415))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100_000, 102_000, 1000))
def test_many_random_programs(first):
    """Another process compiles with little optimization."""
    numbers = ["--programs", "1000", "--seed", str(first)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *numbers],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1000 programs" in done.stderr


@pytest.mark.parametrize(
    "name",
    ["conv_general_dilated", "dot_general", "reduce_sum", "div", "erf_inv", "gather"],
)
def test_numpy_computes_what_jax_does(name):
    """The operations that JAX is not asked for."""
    programs = (with_maker(MAKERS[name], seed) for seed in range(12))
    for program in [program for program in programs if program][:5]:
        got = evaluate(traced(program.fun, program.arrays), program.arrays)
        expected = tables.jit(program.fun)(program.arrays)
        for a, b in zip(got, expected, strict=True):
            inexact = jnp.issubdtype(b.dtype, jnp.inexact)
            epsilon = float(jnp.finfo(b.dtype).eps) if inexact else 0.0
            compare.assert_equal([a], [b], 16 * epsilon)


def test_a_fault_is_found_and_made_short(monkeypatch):
    """Positions that do not change if a leaf is reversed."""
    monkeypatch.setattr(rearrange, "reverse", lambda dimensions: lambda mark: mark)
    check = run.Check("bits", "flips", 0.25)
    programs = (with_maker(MAKERS["rev"], seed) for seed in range(20))
    failed = [p for p in programs if p and run.failure(p, check)[0]]
    assert failed
    shorter = run.shortest(failed[0], check)
    assert "Mismatch" in run.failure(shorter, check)[0]
    assert len(shorter.statements) == 1
    assert "lax.rev" in run.printed(0, shorter, check)
