"""Random programs against their definition, and that no primitive is forgotten."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir

import radazo_jax as zo
from campaigns.fuzz import run
from campaigns.fuzz.build import MAKERS
from campaigns.fuzz.evaluate import evaluate
from campaigns.fuzz.generate import with_maker
from campaigns.fuzz.left_out import LEFT_OUT
from campaigns.fuzz.properties import traced
from campaigns.fuzz.report import derived

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
def test_random_programs():
    assert_no_failure(range(60), quick=True)


def test_elements_of_a_direction_are_rounded_as_float32():
    """Low-rank elements too, whose factors enter a product in float64."""
    assert_no_failure(range(5414, 5415))


@pytest.mark.parametrize(
    "name",
    ["conv_general_dilated", "dot_general", "reduce_sum", "div", "erf_inv", "gather"],
)
def test_numpy_computes_what_jax_does(name):
    """The operations that JAX is not asked for."""
    programs = (with_maker(MAKERS[name], seed) for seed in range(12))
    for program in [program for program in programs if program][:5]:
        got = evaluate(traced(program.fun, program.arrays), program.arrays)
        expected = jax.jit(program.fun)(program.arrays)
        for a, b in zip(got, expected, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            inexact = jnp.issubdtype(b.dtype, jnp.inexact)
            tolerance = 16 * float(jnp.finfo(b.dtype).eps) if inexact else 0.0
            wide = np.float64 if jnp.issubdtype(b.dtype, jnp.floating) else b.dtype
            a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
            largest = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0)))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * largest)


def test_a_fault_is_found_and_printed(monkeypatch):
    """A perturbation in the opposite direction."""
    right = zo.perturb
    wrong = lambda fun: lambda params, u, scale: right(fun)(params, u, -scale)  # noqa: E731
    monkeypatch.setattr(zo, "perturb", wrong)
    report = run.run(range(3), quick=True)
    assert any("Mismatch" in text for text in report["failures"])
    assert "def test_seed_0_bits" in report["failures"][0]
    *_, totals = derived([report])[:2]
    assert totals["programs"] == 3 and totals["mismatches"] == len(report["failures"])
