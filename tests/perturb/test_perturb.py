"""`perturb(fun)` against its definition by `tree_map`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.compare import sample
from tests.helpers.tables import DISTRIBUTIONS, FAST, KINDS, every, jit

PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4),
    "b": jnp.ones(4),
    "s": jnp.ones(()),
}


def loss(params, x, *, power=2):
    hidden = jnp.tanh(x @ params["w"] + jnp.expand_dims(params["b"], 0))
    return params["s"] * jnp.sum(hidden**power)


def by_definition(distribution, params, direction, scale, *args, **kwargs):
    u = distribution.materialize(direction, params)
    moved = jax.tree.map(lambda p, v: p + scale * v, params, u)
    return loss(moved, *args, **kwargs)


@pytest.mark.parametrize("distribution", every(KINDS, *FAST))
def test_is_the_function_at_the_perturbed_point(distribution):
    distribution = DISTRIBUTIONS[distribution]
    x = jnp.ones((5, 3))
    direction = sample(distribution, PARAMS)
    eager = zo.perturb(loss)
    compiled = jit(eager, static_argnames="power")
    definition = jit(
        functools.partial(by_definition, distribution), static_argnames="power"
    )
    for fun, scale in ((eager, 0.5), (compiled, 0.5), (compiled, jnp.float32(-0.1))):
        expected = definition(PARAMS, direction, jnp.float32(scale), x, power=4)
        got = fun(PARAMS, direction, scale, x, power=4)
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_narrow_parameters_are_rounded_once():
    distribution = zo.gaussian()
    params = jnp.linspace(-2.0, 2.0, 64).astype(jnp.bfloat16)
    direction = distribution.sample(jax.random.key(0), params)
    z = np.asarray(jax.random.normal(jax.random.key(0), (64,)), np.float32)
    got = zo.perturb(lambda p: p)(params, direction, 0.25)
    expected = (np.asarray(params, np.float32) + np.float32(0.25) * z).astype(
        jnp.bfloat16
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, expected)


def test_keeps_name_and_documentation():
    assert zo.perturb(loss).__name__ == "loss"


def test_any_output_and_no_parameters_at_all():
    direction = sample(zo.sphere(), PARAMS)
    out = zo.perturb(lambda p, n: {"n": n, "p": p["s"]})(PARAMS, direction, 0.0, 3)
    assert out["n"] == 3
    assert out["p"] == 1.0
    empty = sample(zo.sphere(), {})
    assert zo.perturb(lambda p: 2.0)({}, empty, 0.1) == 2.0


def test_a_product_of_a_leaf_with_itself():
    """A variable on both sides of a product, under a distribution of factors."""
    distribution, params = zo.low_rank(), jnp.arange(6.0).reshape(2, 3)
    direction = distribution.sample(jax.random.key(0), params)
    w = np.asarray(
        params + 0.5 * distribution.materialize(direction, params), np.float64
    )
    got = zo.perturb(lambda p: jnp.einsum("ij,kj->ik", p, p))(params, direction, 0.5)
    np.testing.assert_allclose(got, w @ w.T, rtol=1e-5)
