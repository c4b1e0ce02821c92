"""The distributions: their moments, and directions as small, position-addressed
pytrees."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.directions import generator, sums
from radazo_jax._src.directions.distribution import (
    elements,
    sample_directions,
    stored_elements,
)
from radazo_jax._src.directions.layout import layout_of
from tests.helpers.tables import (
    DISTRIBUTIONS,
    covariance,
    every,
    jit,
    slow,
)

SHAPES = {"b": (2,), "s": (), "w": (2, 3)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


@pytest.fixture(params=DISTRIBUTIONS)
def distribution(request):
    return DISTRIBUTIONS[request.param]


def drawn(distribution, key, params=PARAMS):
    return distribution.materialize(distribution.sample(key, params), params)


draw = jit(drawn, static_argnums=0)


def flat(tree):
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("name", every(DISTRIBUTIONS, "low_rank"))
def test_covariance_is_the_identity_over_the_factor(name):
    """Or the matrix that the distribution's `covariance` returns."""
    distribution = DISTRIBUTIONS[name]
    params, num = {"b": jnp.zeros(2), "w": jnp.zeros((4, 3))}, 40_000
    keys = jax.random.split(jax.random.key(0), num)
    draws = jit(jax.vmap(lambda key: flat(drawn(distribution, key, params))))
    u = np.asarray(draws(keys), np.float64)
    products = u[:, :, None] * u[:, None, :]
    error = products.mean(0) - covariance(distribution, params)
    standard_error = products.std(0) / np.sqrt(num)
    assert (abs(error) <= 4.5 * standard_error + 1e-7).all()
    assert (abs(u.mean(0)) <= 4.5 * u.std(0) / np.sqrt(num) + 1e-7).all()


def test_a_direction_is_small_whatever_the_parameters(distribution):
    small, large = (
        jax.eval_shape(
            distribution.sample,
            jax.random.key(0),
            {"a": jax.ShapeDtypeStruct(shape, jnp.float32)},
        )
        for shape in ((3,), (2**18, 2**18))
    )
    assert jax.tree.structure(small) == jax.tree.structure(large)
    for leaf in jax.tree.leaves(large):
        assert leaf.shape == ()


@pytest.mark.parametrize("sizes", [slow((32, 64)), (5, 3000, 40)])
def test_signs_of_leaves_that_begin_within_a_word(sizes):
    key, distribution = jax.random.key(3), zo.rademacher()
    params = [jnp.zeros(size) for size in sizes]
    total, layout = sum(sizes), layout_of(params)

    @jit
    def three_ways(key):
        at = generator.positions((total,))
        one_by_one = distribution.draw(key, jnp.uint32(0), at)
        direction = distribution.sample(key, params)
        words = stored_elements(
            *(distribution, key[None], jnp.uint32([0])),
            *(layout.leaves, layout.dimension),
        )
        assert sum(x.size for x in jax.tree.leaves(words)) <= total / 32 + len(sizes)
        us = [of_leaf.weighted_sum(jnp.ones(1)) for of_leaf in words]
        return one_by_one, flat(distribution.materialize(direction, params)), flat(us)

    one_by_one, *others = three_ways(key)
    for got in others:
        np.testing.assert_array_equal(got, one_by_one)


def test_materialize_has_the_dtypes_of_the_parameters(distribution):
    params = {"h": jnp.zeros(3, jnp.bfloat16), "f": jnp.zeros(4, jnp.float32)}
    u = jax.eval_shape(lambda: drawn(distribution, 0, params))
    chex.assert_trees_all_equal_shapes_and_dtypes(u, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gaussian", "rademacher", "low_rank(2)"])
def test_sum_over_an_axis_of_directions_is_the_weighted_sum(name):
    distribution, layout = DISTRIBUTIONS[name], layout_of(PARAMS)
    coefficients = np.float32([0.5, -2.0, 0.25, 3.0])

    @jit
    def run(key):
        numbers = jnp.arange(4, dtype=jnp.uint32)
        directions = sample_directions(distribution, key, numbers, layout)
        us = jax.vmap(lambda u: elements(u, layout))(directions)
        weights = jnp.asarray(coefficients)
        d = layout.dimension
        both = [
            [way(weights, directions, leaf, d) for leaf in layout.leaves]
            for way in (sums._sum_at_once, sums._sum_in_turn)
        ]
        return us, both

    us, both = run(jax.random.key(5))
    for summed in both:
        for got, u in zip(summed, us, strict=True):
            u = np.asarray(u, np.float64)
            size = np.tensordot(abs(coefficients), abs(u), 1)
            error = abs(got - np.tensordot(coefficients.astype(np.float64), u, 1))
            # Four products and three sums, each rounded.
            assert np.all(error <= 7 * 2.0**-24 * size)


def test_a_gpu_program_draws_in_one_place_for_all_directions():
    params, distribution = jnp.zeros((64, 48)), zo.gaussian()

    def draws(num_directions):
        def run(key, weights):
            numbers = jnp.arange(num_directions, dtype=jnp.uint32)
            layout = layout_of(params)
            directions = sample_directions(distribution, key, numbers, layout)
            return sums.combine(weights, directions, layout, params)

        traced = jax.jit(run).trace(jax.random.key(0), jnp.ones(num_directions))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return text.count("stablehlo.xor")

    assert draws(2) == draws(8) == draws(32)
