"""Points evaluated together or in turn: what is chosen, its values and its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.directions import storage
from radazo_jax._src.directions.distribution import sample_directions
from tests.helpers.tables import DISTRIBUTIONS, every

KEY = jax.random.key(0)
SMALL, MIDDLE, LARGE = (8, 16), (128, 96), (2048, 2048)


def tree(shape):
    rows, columns = shape
    return {"in": jnp.zeros((rows, columns)), "out": jnp.zeros((columns, 3))}


def loss(params):
    x = jnp.linspace(-1, 1, 4 * len(params["in"])).reshape(4, -1)
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - 1) ** 2)


def estimate(distribution, batch_size=None, num_directions=10):
    estimator = zo.forward_difference(distribution, num_directions, smoothing=0.1)
    return zo.value_and_grad(loss, estimator, evaluator=zo.vectorized(batch_size))


def program(shape, batch_size, distribution):
    """The program of a step as text; nothing is allocated."""
    made = estimate(distribution, batch_size, 5)
    return str(jax.make_jaxpr(made)(KEY, jax.eval_shape(lambda: tree(shape))))


@pytest.mark.parametrize(
    ("shape", "platform", "distribution", "chosen"),
    [
        (SMALL, "cpu", zo.sphere(), 5),
        (MIDDLE, "gpu", zo.sphere(), 5),
        (MIDDLE, "cpu", zo.low_rank(), 5),
        (LARGE, "gpu", zo.sphere(), 1),
        (LARGE, "cpu", zo.low_rank(), 1),
    ],
)
def test_what_is_chosen(shape, platform, distribution, chosen, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    default = program(shape, None, distribution)
    assert default == program(shape, chosen, distribution)
    assert default != program(shape, 6 - chosen, distribution)


@pytest.mark.parametrize(
    ("distribution", "limit"), [(zo.orthonormal(), 2.5), (zo.sphere(), 4.0)], ids=repr
)
def test_a_cpu_takes_points_in_turn_in_a_fraction_of_the_memory(distribution, limit):
    """In units of the parameters: θ + su, u, the gradient, and signs as bits."""
    params = jax.eval_shape(lambda: tree((1024, 512)))

    def held(batch_size):
        step = jax.jit(estimate(distribution, batch_size)).lower(KEY, params)
        found = step.compile().memory_analysis().temp_size_in_bytes
        return found / sum(4 * x.size for x in jax.tree.leaves(params))

    assert held(None) < limit
    assert held(10) > 10


@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("name", every(DISTRIBUTIONS, "sphere", "orthonormal"))
def test_values_in_turn_are_those_together(name, central):
    make = zo.central_difference if central else zo.forward_difference
    estimator = make(DISTRIBUTIONS[name], 10, smoothing=0.1)
    params = jax.tree.map(lambda x: x + 0.3, tree(MIDDLE))

    def at(batch_size):
        evaluator = zo.vectorized(batch_size)
        made = zo.value_and_grad(loss, estimator, evaluator=evaluator)
        return jax.jit(made)(KEY, params)

    (value, gradient), (expected, wanted) = at(None), at(10)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for found, other in zip(*map(jax.tree.leaves, (gradient, wanted)), strict=True):
        scale = np.abs(other).max()
        # Differences of values of about 1 are divided by 0.1.
        np.testing.assert_allclose(found, other, atol=1e-4 * scale + 1e-9)


@pytest.mark.parametrize("name", every(DISTRIBUTIONS, "sphere", "orthonormal"))
def test_a_direction_that_is_drawn_as_one_array_is_the_same(name):
    """Its norm and its elements agree to the last bit."""
    distribution, params = DISTRIBUTIONS[name], tree((12, 11))
    layout = distribution._layout(params)
    number = jnp.zeros(1, jnp.uint32)
    alone = storage.sample_one(distribution, KEY, layout)
    drawn = sample_directions(distribution, KEY, number, layout)
    assert alone.cached is not None and drawn.cached is None
    found, expected = (
        jax.tree.map(lambda x: x[0], u).tree(layout) for u in (alone, drawn)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
