"""`perturb(fun)` against its definition, on the programs of the zoo."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import radazo_jax as zo
from tests.helpers.compare import (
    DISTRIBUTIONS,
    SCALE,
    arrays,
    assert_equal,
    both,
    displaced,
    sample,
    samples,
)
from tests.helpers.tables import KINDS, each_distribution, every, jit, slow
from tests.perturb.zoo import PROGRAMS

SELECTED = [name for name, program in PROGRAMS.items() if program.selected]
QUICK = ("custom_derivatives", "remat", "branches", "while_loops")
# Factors enter each of these in another way.
BY_FACTORS = (
    *("einsums", "scans", "nested_scans", "bfloat16_leaves", "rounded_on_the_way"),
    *("look_ups", "long_table", "convolutions", "decoder", "ensemble_under_vmap"),
    *("linear_algebra", "structure", "associative_operations", "derivatives_inside"),
    *("while_loops_of_a_batch", "flax_nnx"),
)
# Beside the selected ones, a program of each kind of rule that has a derivative.
DERIVED = (
    *(name for name in SELECTED if PROGRAMS[name].differentiable),
    *("scans", "associative_operations", "bfloat16_leaves", "rounded_on_the_way"),
    *("look_ups", "convolutions", "decoder", "linear_algebra", "sorting", "structure"),
)


@pytest.mark.parametrize(
    ("distribution", "name", "num"),
    [
        *(("low_rank(2)", name, 1) for name in ("branches", "while_loops", "mlp")),
        *(slow("low_rank(2)", name, 1) for name in ("custom_rules_on_leaves", "remat")),
        *(slow("hashed", name, 3) for name in PROGRAMS),
        *(slow("low_rank(2)", name, 3) for name in BY_FACTORS),
    ],
)
def test_is_the_program_at_the_perturbed_point(distribution, name, num):
    """With leaves treated as large and as small; several directions at once."""
    distribution, program = DISTRIBUTIONS[distribution], PROGRAMS[name]
    with program.context():
        fun, params, *args = program.build()
        perturbed, definition = both(fun, distribution, params, *args)

        @jit
        def run(us):
            first = jax.tree.map(lambda x: x[0], us)
            one = perturbed(first)
            small = arrays(zo.perturb(fun)(params, first, SCALE, *args))
            together = jax.vmap(perturbed)(us) if num > 1 else [x[None] for x in one]
            return one, small, together, lax.map(definition, us)

        one, small, together, expected = run(samples(distribution, params, num))
        assert_equal(one, [x[0] for x in expected], program.tolerance)
        assert_equal(small, [x[0] for x in expected], program.tolerance)
        assert_equal(together, expected, program.tolerance)


# Distributions that draw by position differ in how they draw, which no program changes.
@pytest.mark.parametrize(
    ("distribution", "name"),
    [
        *(("hashed", name) for name in ("branches", "while_loops")),
        *each_distribution(["mlp", "decoder"], fast=["sphere"], among=KINDS),
    ],
)
def test_every_distribution_under_scan_over_directions(distribution, name):
    distribution, program = DISTRIBUTIONS[distribution], PROGRAMS[name]
    with program.context():
        fun, params, *args = program.build()
        perturbed, definition = both(fun, distribution, params, *args)
        directions = samples(distribution, params)
        got, expected = jit(
            lambda us: (lax.map(perturbed, us), lax.map(definition, us))
        )(directions)
        assert_equal(got, expected, program.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distribution", "name"),
    [("gaussian", "custom_derivatives"), ("low_rank", "branches")],
)
def test_eagerly(distribution, name):
    distribution, program = DISTRIBUTIONS[distribution], PROGRAMS[name]
    with program.context():
        fun, params, *args = program.build()
        perturbed, definition = both(fun, distribution, params, *args)
        direction = sample(distribution, params)
        assert_equal(perturbed(direction), definition(direction), program.tolerance)


@pytest.mark.parametrize("name", every(DERIVED, *QUICK))
def test_gradient_with_respect_to_the_parameters(name):
    distribution, program = DISTRIBUTIONS["hashed"], PROGRAMS[name]
    with program.context():
        fun, params, *args = program.build()
        params = jax.tree.map(jnp.asarray, params)

        def loss(params, *args):
            outputs = [
                x
                for x in arrays(fun(params, *args))
                if jnp.issubdtype(x.dtype, jnp.floating)
            ]
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in outputs)

        direction = sample(distribution, params)
        got = jax.grad(lambda p: zo.perturb(loss)(p, direction, SCALE, *args))
        expected = jax.grad(lambda p: loss(p, *args))
        got, expected = jit(
            lambda p: (got(p), expected(displaced(distribution, p, direction)))
        )(params)
        # A gradient sums what the outputs hold, and its rounding too.
        assert_equal(arrays(got), arrays(expected), 10 * program.tolerance)
