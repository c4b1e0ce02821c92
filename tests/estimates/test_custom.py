"""Custom estimators and distributions work wherever the built-in ones do."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.tables import DISTRIBUTIONS, jit, slow

CENTER, CURVATURES = jnp.arange(6.0), jnp.linspace(0.5, 2, 6)


def quadratic(x):
    return jnp.sum(CURVATURES * (x - CENTER) ** 2) / 2


# --- Distributions ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scaled(zo.Distribution):
    width: float = 1.0

    def factor(self, dimension):
        return 1 / self.width**2

    def draw(self, key, number, at):
        return self.width * zo.random.normal(key, at)


class WithoutReplacement(zo.Distribution):
    """Coordinates in a random order, each once."""

    sequential = True

    def factor(self, dimension):
        return float(dimension)

    def draw(self, key, number, at):
        order = jax.random.permutation(key, at.dimension).astype(jnp.uint32)
        return (at.lo == order[number % at.dimension]).astype(jnp.float32)


def test_all_coordinates_without_replacement_make_the_gradient():
    estimator = zo.central_difference(WithoutReplacement(), 6, smoothing=0.1)
    _, gradient = jit(zo.value_and_grad(quadratic, estimator))(0, jnp.ones(6))
    expected = CURVATURES * (1 - CENTER)
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "drawn",
    [
        lambda at: jnp.float32(1),
        lambda at: jnp.ones(1),
        lambda at: jnp.ones((2, *at.lo.shape)),
        lambda at: jnp.ones(at.lo.shape, jnp.int32),
        lambda at: jnp.ones(at.lo.shape, jnp.complex64),
        lambda at: [1.0] * at.lo.size,
        lambda at: None,
    ],
)
def test_what_is_no_array_of_the_positions_is_refused(drawn):
    """A single number made a gradient of shape ()."""

    class Drawn(Scaled):
        def draw(self, key, number, at):
            return drawn(at)

    value_and_grad = zo.value_and_grad(quadratic, zo.forward_difference(Drawn(), 2))
    with pytest.raises(TypeError, match=r"draw of .* must return float32 of the shape"):
        jax.eval_shape(value_and_grad, jax.random.key(0), jnp.ones(6))


SCALED = DISTRIBUTIONS | {"scaled": Scaled(2.0)}


@pytest.mark.parametrize("distribution", ["low_rank", "scaled", slow("sphere")])
def test_the_scale_of_a_direction_scales_it(distribution):
    distribution = SCALED[distribution]
    params, x = {"w": jnp.ones((5, 4)), "b": jnp.zeros(3)}, jnp.ones((2, 5))

    @jit
    def both(key):
        direction = distribution.sample(key, params)
        twice = dataclasses.replace(direction, scale=2 * direction.scale)
        fun = zo.perturb(lambda p, x: x @ p["w"])
        return (
            distribution.materialize(direction, params),
            distribution.materialize(twice, params),
            fun(params, direction, 0.2, x),
            fun(params, twice, 0.1, x),
        )

    u, v, *moved = both(jax.random.key(0))
    chex.assert_trees_all_close(jax.tree.map(lambda x: 2 * x, u), v, rtol=1e-6)
    np.testing.assert_allclose(*moved, rtol=1e-5)
