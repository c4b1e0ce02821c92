"""Custom estimators and distributions work wherever the built-in ones do."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax.estimators import Draw, Estimate, candidates, sample_points
from tests.helpers.compare import Hashed, sample
from tests.helpers.tables import DISTRIBUTIONS, FAST, every, jit


@dataclasses.dataclass(frozen=True)
class TwoPoints(zo.GradientEstimator):
    """Simultaneous perturbation: two points along one direction."""

    distribution: zo.Distribution
    mu: float

    def points(self, draw, params, state):
        scales = [self.mu, -self.mu]
        return sample_points(self.distribution, draw, 1, scales, params), state

    def reduce(self, points, values, params, state):
        above, below = values.along[0]
        slope = (above - below) / (2 * self.mu)
        gradient = points.combine(slope[None])
        value = (above + below) / 2
        return Estimate(value, slope**2, jnp.int32(2), gradient), state


SPSA = TwoPoints(zo.rademacher(), 0.1)
CENTER, CURVATURES = jnp.arange(6.0), jnp.linspace(0.5, 2, 6)


def quadratic(x):
    return jnp.sum(CURVATURES * (x - CENTER) ** 2) / 2


def test_is_the_derivative_along_the_direction():
    """On a quadratic the central difference is exact: (u · ∇f) u."""
    key, x = jax.random.key(3), jnp.ones(6)
    value, gradient = jit(zo.value_and_grad(quadratic, SPSA))(key, x)
    distribution = zo.rademacher()
    direction = sample(distribution, x, jax.random.fold_in(key, 0))
    u = jit(lambda direction: distribution.materialize(direction, x))(direction)
    exact = np.asarray(CURVATURES * (x - CENTER), np.float64)
    np.testing.assert_allclose(gradient, (exact @ u) * u, rtol=1e-4)
    curvature = np.sum(np.asarray(CURVATURES, np.float64)) * 0.1**2 / 2
    np.testing.assert_allclose(value, quadratic(x) + curvature, rtol=1e-5)


@functools.partial(jit, static_argnums=0)
def asked(estimator, key, params):
    points, _ = estimator.points(Draw.once(key), params, ())
    return points, candidates(points, params)


@functools.partial(jit, static_argnums=0)
def told(estimator, points, values, params):
    estimate, _ = estimator.reduce(points, points.split(values), params, ())
    return estimate, estimate.gradient.materialize(params)


@pytest.mark.parametrize("make", [zo.forward_difference, zo.central_difference])
def test_the_slope_is_that_along_the_gradient(make):
    estimator = make(Hashed(), num_directions=4, smoothing=1e-3)
    points, at = asked(estimator, jax.random.key(1), jnp.ones(6))
    # A linear function, whose differences are exact.
    estimate, gradient = told(estimator, points, at @ CURVATURES, jnp.ones(6))
    np.testing.assert_allclose(estimate.slope, gradient @ CURVATURES, rtol=1e-3)


def test_values_of_the_wrong_number():
    estimator = zo.forward_difference(num_directions=3)
    points, _ = estimator.points(Draw.once(0), jnp.ones(2), ())
    message = r"values must have one value per point, shape \(4,\); got shape \(3,\)"
    with pytest.raises(ValueError, match=message):
        points.split(jnp.ones(3))


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


def test_distributions_compare_by_their_fields():
    assert Scaled(1.0) == Scaled(1.0) and hash(Scaled(1.0)) == hash(Scaled(1.0))
    assert Scaled(1.0) != Scaled(2.0)
    value_and_grad = jax.jit(
        lambda distribution, x: zo.value_and_grad(
            quadratic, zo.central_difference(distribution, 3, smoothing=0.1)
        )(0, x)[1],
        static_argnums=0,
    )
    x = jnp.ones(6)
    one, two = value_and_grad(Scaled(1.0), x), value_and_grad(Scaled(2.0), x)
    # On a quadratic, the width of symmetric differences does not matter.
    np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-3)
    assert not np.array_equal(one, two)


def test_all_coordinates_without_replacement_make_the_gradient():
    estimator = zo.central_difference(WithoutReplacement(), 6, smoothing=0.1)
    for batch_size in (None, 1):
        evaluator = zo.vectorized(batch_size)
        value_and_grad = jit(
            zo.value_and_grad(quadratic, estimator, evaluator=evaluator)
        )
        _, gradient = value_and_grad(0, jnp.ones(6))
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


@pytest.mark.parametrize("distribution", every(SCALED, *FAST, "scaled"))
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
