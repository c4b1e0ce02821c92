"""Random functions that change between calls, each in one of many ways."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.short_runs import START, traced
from tests.helpers.tables import slow

# What is computed of a point and of what the function reads.
OPERATIONS = {
    "sum": lambda x, y: jnp.sum(x) * y[0] + y[1],
    "product": lambda x, y: jnp.sum(jnp.cos(x * y[0])) - y[2],
    "gather": lambda x, y: jnp.sum(jnp.take(y, jnp.array([2, 0, 1])) * x),
    "relu": lambda x, y: jnp.sum(jax.nn.relu(x - y)) + y[1],
    "loop": lambda x, y: looped(x[0], jnp.asarray(y)),
    "scan": lambda x, y: jax.lax.scan(lambda c, z: (c * z + y[0], None), x[0], y)[0],
    "branch": lambda x, y: jnp.where(y[0] > 0, jnp.sum(x), y[1] * x[0]),
    "inner jit": lambda x, y: jax.jit(lambda x: jnp.sum(x * y))(x),
    "callback": lambda x, y: host(x, y),
}


def looped(x, y):
    return jax.lax.fori_loop(0, 3, lambda i, v: v * y[0] + y[i], x)


def host(x, y):
    number, shape = np.asarray(y, np.float32)[:3].copy(), jax.ShapeDtypeStruct((), "f4")

    def callback(x):
        return np.float32(np.sum(number * np.asarray(x)))

    return jax.pure_callback(callback, shape, x, vmap_method="sequential")


def draw(rng):
    return np.round(rng.uniform(-2, 2, 3), 2).astype(np.float32)


class Holder:
    """A loss that reads attributes, as a callable object and as a method."""

    def __init__(self, values):
        self.values, self.name = values, "sum"

    def method(self, x):
        return OPERATIONS[self.name](x, self.values)

    __call__ = method


def by_attribute(as_method):
    def make(rng):
        holder = Holder(draw(rng))

        def change():
            holder.values = draw(rng)
            holder.name = str(rng.choice(list(OPERATIONS)))

        return (holder.method if as_method else holder), change

    return make


def by_closure(as_type, in_place=False):
    def make(rng):
        operation, values = random_operation(rng), as_type(draw(rng))

        def loss(x):
            return operation(x, values)

        def change():
            nonlocal values, operation
            if in_place:
                values[:] = draw(rng)
            else:
                values, operation = as_type(draw(rng)), random_operation(rng)

        return loss, change

    return make


def by_partial(rng):
    """A list in a partial; its elements change."""
    held = [draw(rng), random_operation(rng)]

    def change():
        held[:] = draw(rng), random_operation(rng)

    return functools.partial(lambda held, x: held[1](x, held[0]), held), change


def by_default(rng):
    def loss(x, values=None, operation=None):
        return operation(x, values)

    def change():
        loss.__defaults__ = draw(rng), random_operation(rng)

    change()
    return loss, change


def by_module(rng):
    """Data and a function of another module."""
    module = types.ModuleType("data_of_a_test")
    sys.modules[module.__name__] = module
    module.values, module.operation = draw(rng), random_operation(rng)

    def loss(x):
        import data_of_a_test

        return data_of_a_test.operation(x, data_of_a_test.values)

    def change():
        module.values, module.operation = draw(rng), random_operation(rng)

    return loss, change


def by_nested_functions(rng):
    inner = random_operation(rng)
    values = {"a": [draw(rng)]}

    def middle(x):
        return inner(x, values["a"][0])

    def change():
        nonlocal inner
        inner = random_operation(rng)
        values["a"][0] = draw(rng)

    return lambda x: middle(x), change


def by_python_numbers(rng):
    numbers = draw(rng).tolist()

    def loss(x):
        return numbers[0] * jnp.sum(x) + (numbers[1] if numbers[2] > 0 else 5.0)

    def change():
        numbers[:] = draw(rng).tolist()

    return loss, change


def random_operation(rng):
    return OPERATIONS[str(rng.choice(list(OPERATIONS)))]


KINDS = {
    "object": by_attribute(as_method=False),
    "method": by_attribute(as_method=True),
    "NumPy closure": by_closure(np.asarray),
    "NumPy closure in place": by_closure(np.asarray, in_place=True),
    "JAX closure": by_closure(jnp.array),
    "partial": by_partial,
    "default": by_default,
    "module": by_module,
    "nested": by_nested_functions,
    "numbers": by_python_numbers,
}
SEEDS, FAST = 5, "module"


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ((kind, seed) if seed == 0 and kind == FAST else slow(kind, seed))
        for kind in KINDS
        for seed in range(SEEDS)
    ],
)
def test_no_call_uses_what_a_function_was_before(kind, seed):
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    loss, change = KINDS[kind](rng)
    found = []
    for _ in range(3):
        # The loss itself, of which nothing is compiled or remembered.
        with jax.disable_jit():
            expected = float(loss(jnp.asarray(START)))
        found.append(float(traced(loss, num_steps=1).values[0]))
        np.testing.assert_allclose(found[-1], expected, rtol=1e-5, atol=1e-5)
        change()
    assert len(set(found)) > 1, "the changes of a case must change its value"
