"""Random programs against their definition, and that no primitive is forgotten."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir

import radazo_jax as zo
from campaigns.fuzz import run
from campaigns.fuzz.build import MAKERS
from campaigns.fuzz.definition import defined, perturbed
from campaigns.fuzz.generate import with_maker
from campaigns.fuzz.left_out import LEFT_OUT
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


@pytest.mark.slow
def test_random_programs():
    report = run.run(range(40), quick=True)
    assert not report["failures"], "\n\n".join(report["failures"])


def test_elements_of_a_direction_are_rounded_as_float32():
    """Low-rank elements too, whose factors enter a product in float64."""
    with jax.enable_x64(True):
        params = (jnp.ones((300, 300)),)
        got, expected = (
            make(lambda p: jnp.square(p[0]), "low_rank", 0.1)(params, jax.random.key(0))
            for make in (perturbed, defined)
        )
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-14)


def test_a_fault_is_found_and_printed(monkeypatch):
    """A perturbation in the opposite direction."""
    right = zo.perturb
    wrong = lambda fun: lambda params, u, scale: right(fun)(params, u, -scale)  # noqa: E731
    monkeypatch.setattr(zo, "perturb", wrong)
    report = run.run(range(2), quick=True)
    assert "def test_seed_0" in report["failures"][0]
    _, totals, *_ = derived([report])
    assert totals["programs"] == 2 and totals["mismatches"] == len(report["failures"])


def test_results_are_compared_by_their_bits_or_by_the_largest():
    zeros, close = np.array([0.0, 1.0]), np.array([-0.0, 1.0])
    assert run.compared([zeros], [zeros], exact=True)[0] == "same"
    assert run.compared([zeros], [close], exact=True)[0] == "mismatch"
    assert run.compared([zeros], [close], exact=False)[0] == "rounded"
    assert run.compared([zeros], [zeros + 0.02], exact=False)[0] == "mismatch"
    whole = np.array([0, 1])
    assert run.compared([whole], [whole + 1], exact=False)[0] == "unstable"
    assert run.compared([whole], [zeros], exact=False)[0] == "mismatch"
