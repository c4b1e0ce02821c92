"""A call uses its function as it is now, whatever changed since the last call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import METHOD, START, traced
from tests.helpers.tables import slow


def first_value(loss, **options):
    """The loss at the start, which is three times its factor."""
    return float(traced(loss, num_steps=1, **options).values[0])


class Problem:
    """A loss that reads an attribute."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def loss(self, p):
        return self.factor * jnp.sum(p**2)

    def on_the_host(self, p):
        """The factor is a constant of the callback, which does not read it again."""
        factor, shape = np.float32(self.factor), jax.ShapeDtypeStruct((), jnp.float32)

        def callback(x):
            return factor * np.sum(np.square(x), dtype=np.float32)

        return jax.pure_callback(callback, shape, p, vmap_method="sequential")


def by_object(take):
    """The loss is a part of a problem, an attribute of which changes."""

    def make(monkeypatch):
        problem = Problem()
        return take(problem), lambda: setattr(problem, "factor", -1.0)

    return make


def by_array(monkeypatch):
    factors = np.ones(3, np.float32)

    def loss(p):
        return jnp.sum(factors * p**2)

    return loss, lambda: np.negative(factors, out=factors)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(by_object(lambda problem: problem.loss), id="method"),
        pytest.param(by_object(lambda problem: problem.on_the_host), id="callback"),
        slow(by_array, id="array"),
    ],
)
def test_the_same_function_is_used_as_it_is_now(kind, monkeypatch):
    loss, change = kind(monkeypatch)
    assert first_value(loss) == 3
    change()
    assert first_value(loss) == -3


@pytest.mark.slow
def test_sample_is_used_as_it_is_now():
    def loss(p, factor):
        return factor * jnp.sum(p**2)

    def sample(key):
        return factors[0] + 0 * jax.random.uniform(key)

    factors = [1.0]
    assert first_value(loss, sample=sample) == 3
    factors[0] = -1.0
    assert first_value(loss, sample=sample) == -3


def test_value_and_grad_uses_its_function_as_it_is_now():
    problem = Problem()
    function = zo.value_and_grad(problem.loss, METHOD[1])
    assert function(jax.random.key(0), START)[0] == 3
    problem.factor = -1.0
    assert function(jax.random.key(0), START)[0] == -3
