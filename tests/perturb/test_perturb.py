"""`perturb(fun)` against its definition by `tree_map`."""

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from tests.helpers.compare import sample

PARAMS = {"w": jnp.ones((3, 4)), "s": jnp.ones(())}


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
    def loss(params):
        """A loss."""

    found = zo.perturb(loss)
    assert (found.__name__, found.__doc__) == ("loss", "A loss.")


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
