"""Outputs that are not arrays, arguments, effects, 64 bits, barriers and leaks."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
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
)
from tests.helpers.jaxprs import waits
from tests.helpers.tables import jit, slow
from tests.perturb.zoo import PROGRAMS, normal


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["low_rank", "hashed"])
def test_outputs_that_are_not_arrays(distribution):
    distribution = DISTRIBUTIONS[distribution]
    fun, params, *args = PROGRAMS["outputs"].build()
    direction = sample(distribution, params)
    got = zo.perturb(fun)(params, direction, SCALE, *args)
    expected = fun(displaced(distribution, params, direction), *args)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for name in ("string", "none", "number", "float", "flag", "empty"):
        assert got[name] == expected[name]
        assert type(got[name]) is type(expected[name])
    assert isinstance(got["numpy"], np.ndarray)
    assert_equal(arrays(got), arrays(expected), 1e-5)


def test_keyword_arguments_and_static_ones():
    """The names of `fun`'s arguments mean the same arguments in its perturbation."""

    def fun(params, x, power=2, *, shift):
        return (x @ params) ** power + shift

    params, x = normal(4, 5), normal(2, 4)
    distribution = zo.gaussian()
    direction = sample(distribution, params)
    expected = fun(displaced(distribution, params, direction), x, power=3, shift=1.0)
    compiled = jax.jit(zo.perturb(fun), static_argnames="power")
    for scale in (SCALE, jnp.float32(SCALE)):
        for f in (zo.perturb(fun), compiled):
            got = f(params, direction, scale, x, power=3, shift=1.0)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("distribution", "compiled"), [("hashed", True), ("low_rank", False)]
)
def test_effects_happen_once(distribution, compiled, capsys):
    seen = []

    def fun(params, x):
        jax.debug.callback(lambda w: seen.append(np.asarray(w)), params)
        jax.debug.print("first row {}", params[0, 0] * 0)

        def step(x, i):
            jax.debug.callback(lambda i: seen.append(int(i)), i)
            return x @ params, None

        x, _ = lax.scan(step, x, jnp.arange(3))
        jax.debug.print("done {}", jnp.sum(x) * 0, ordered=True)
        return lax.cond(x[0, 0] == 7, lambda: jax.debug.print("never"), lambda: None)

    distribution = DISTRIBUTIONS[distribution]
    params, x = normal(4, 4), normal(2, 4)
    direction = sample(distribution, params)
    perturbed = jax.jit(zo.perturb(fun)) if compiled else zo.perturb(fun)
    perturbed(params, direction, SCALE, x)
    jax.effects_barrier()
    printed = capsys.readouterr().out
    assert printed.count("first row") == 1
    assert printed.count("done") == 1
    assert "never" not in printed
    [leaf] = [w for w in seen if isinstance(w, np.ndarray)]
    expected = displaced(distribution, params, direction)
    np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)
    assert sorted(i for i in seen if isinstance(i, int)) == [0, 1, 2]


def test_flax_state_that_the_function_writes_into():
    """Outside of any jit, as the definition accepts it."""
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(norm, nnx.Param, ...)
    distribution = zo.gaussian()
    direction = sample(distribution, params)

    def fun(params, rest, x):
        return nnx.merge(graph, params, rest)(x)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected = fun(displaced(distribution, params, direction), rest, normal(3, 4))
        _, _, rest = nnx.split(norm, nnx.Param, ...)
        got = zo.perturb(fun)(params, direction, SCALE, rest, normal(3, 4))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("distribution", [slow("gaussian"), "low_rank"])
def test_leaves_of_64_bits(distribution):
    with jax.enable_x64(True):
        distribution = DISTRIBUTIONS[distribution]
        params = jnp.linspace(-1.0, 1.0, 20, dtype=jnp.float64).reshape(4, 5)
        x = jnp.full((2, 4), 1 / 3, jnp.float64)
        perturbed, definition = both(lambda p, x: (x @ p, p), distribution, params, x)
        direction = sample(distribution, params)
        # The draws are float32 numbers; the products of low rank are of those.
        scale = np.abs(
            SCALE * np.asarray(distribution.materialize(direction, params))
        ).max()
        got, expected = jit(perturbed)(direction), jit(definition)(direction)
        assert got[0].dtype == jnp.float64
        np.testing.assert_allclose(got[1], expected[1], atol=1e-7 * scale)
        np.testing.assert_allclose(got[0], expected[0], atol=1e-7 * scale)
        # If nothing is perturbed, nothing is rounded.
        got = zo.perturb(lambda p, x: x @ p)(params, direction, 0.0, x)
        np.testing.assert_allclose(got, x @ params, rtol=1e-15, atol=1e-15)


WIDE_PRODUCTS = {
    "dot_general": (
        lambda w, x: x @ w,
        lambda *shape: jnp.ones(shape, jnp.float64),
        (3, 4),
        (2, 3),
    ),
    "convolution": (
        lambda w, x: lax.conv_general_dilated(
            x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        lambda *shape: jnp.ones(shape, jnp.float64),
        (1, 3, 4),
        (1, 2, 3),
    ),
}


@pytest.mark.parametrize("name", WIDE_PRODUCTS)
@pytest.mark.parametrize("size", [1e39, slow(1e-50)])
def test_products_of_64_bits_with_low_rank(name, size):
    """The inputs are beyond the range of float32."""
    with jax.enable_x64(True):
        fun, ones, shape, x_shape = WIDE_PRODUCTS[name]
        distribution = zo.low_rank()
        params = ones(*shape)
        x = size * ones(*x_shape)
        perturbed, definition = both(fun, distribution, params, x)
        direction = sample(distribution, params)
        [got], [expected] = jit(perturbed)(direction), jit(definition)(direction)
        # The elements of a materialized direction are float32 numbers.
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6 * size)


def test_a_float_is_a_leaf_of_32_bits():
    distribution, x = zo.gaussian(), jnp.ones(2, jnp.bfloat16)
    params = {"a": 0.5, "b": jnp.asarray(0.5)}
    direction = sample(distribution, params)

    def fun(params, x):
        return params["a"] * x, params["b"] * x

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        moved = displaced(distribution, jax.tree.map(jnp.float32, params), direction)
        expected = fun(moved, x)
        got = zo.perturb(fun)(params, direction, SCALE, x)
    assert all(y.dtype == jnp.float32 for y in got)
    assert_equal(got, expected, 1e-6)


@pytest.mark.parametrize("distribution", ["gaussian", "low_rank"])
def test_leaks_no_tracer(distribution):
    params, x = normal(4, 5), normal(2, 4)
    direction = sample(DISTRIBUTIONS[distribution], params)
    with jax.checking_leaks():
        zo.perturb(lambda w, x: {"y": x @ w, "name": "y"})(params, direction, SCALE, x)


# --- Small programs -------------------------------------------------------------


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


# --- Evaluations that wait for one another --------------------------------------


def test_layers_one_after_another_wait_for_their_inputs():
    # Otherwise all perturbed layers would be alive together.
    params = [jnp.ones((300, 300)), jnp.ones((300, 300))]
    x = jnp.ones((5, 300))
    tied = waits(lambda p, x: jnp.tanh(x @ p[0]) @ p[1], zo.gaussian(), params, x)
    assert sum((5, 300) in shapes for shapes in tied) == 2


@pytest.mark.parametrize("unroll", [1, 2])
def test_a_leaf_used_in_every_step_waits_for_the_step_not_for_its_slice(unroll):
    # Waiting for the slice would copy it out of its stack; waiting for nothing would
    # build the leaf before the loop. Steps unrolled are layers one after another.
    def fun(w, xs):
        return lax.scan(lambda c, x: (c, x @ w), 0, xs, unroll=unroll)[1]

    w, xs = jnp.ones((300, 300)), jnp.ones((4, 5, 300))
    tied = waits(fun, zo.rademacher(), w, xs)
    assert tied
    assert any((5, 300) in shapes for shapes in tied) == (unroll > 1)
