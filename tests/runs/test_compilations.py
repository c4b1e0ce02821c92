"""Equal arguments compile once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.compiled import compilations
from tests.helpers.short_runs import METHOD, run, traced
from tests.helpers.tables import slow


@pytest.mark.parametrize("call", [traced, slow(run)])
def test_equal_new_arguments_compile_nothing(call, caplog):
    """The function, if it is traced, the optimizer, and the estimator."""

    def again(rate=1e-2, num_steps=3):
        fun = {"fun": lambda p: jnp.sum(jnp.cos(p))} if call is traced else {}
        estimator = zo.forward_difference(zo.rademacher(), num_directions=2)
        method = zo.radazo(rate), estimator
        return call(num_steps=num_steps, method=method, **fun)

    first = again()
    with compilations(caplog) as found:
        second = again()
        again(num_steps=11)
    assert not found
    np.testing.assert_array_equal(first.params, second.params)
    with compilations(caplog) as found:
        again(rate=2e-2)
    assert found


@pytest.mark.slow
def test_another_learning_rate_on_minibatches_compiles_nothing(caplog):
    """The rate that is measured, and the number of steps, are inputs."""

    def untuned(scale, num_steps):
        return traced(
            lambda x, noise: jnp.sum((x - noise) ** 2),
            jnp.full(3, scale),
            num_steps,
            (None, zo.forward_difference(zo.rademacher(), 4, smoothing=5e-3)),
            sample=lambda key: jax.random.normal(key, (3,)),
        ).learning_rate.learning_rate

    first = untuned(3.0, 5)
    with compilations(caplog) as found:
        assert untuned(30.0, 8) > 2 * first
    assert not found


@pytest.mark.parametrize("jit", [lambda x: x, slow(jax.jit)], ids=["plain", "jit"])
def test_value_and_grad_compiles_once(jit, caplog):
    function = jit(zo.value_and_grad(lambda p: jnp.sum(p**2), METHOD[1]))
    keys, params = jax.random.split(jax.random.key(0)), jnp.ones(3)
    function(keys[0], params)
    with compilations(caplog) as found:
        function(keys[1], params)
    assert not found
