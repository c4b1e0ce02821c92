"""Equal arguments compile once."""

import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo

START = np.ones(3, np.float32)


def loss(p):
    return jnp.sum(p**2)


def python_loss(p):
    return float(np.sum(p**2))


def optimizer(rate=1e-2):
    return zo.radazo(rate)


def estimator(smoothing=5e-3):
    return zo.forward_difference(zo.rademacher(), 1, smoothing)


@contextlib.contextmanager
def compilations(caplog):
    """Counts the programs that are compiled inside."""
    found = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        yield found
        texts = [record.getMessage() for record in caplog.records]
    found += [text for text in texts if text.startswith("Finished XLA compilation")]


def run(call, fun, optimizer, estimator):
    return call(*(fun, START, optimizer, estimator), num_steps=2, key=0, progress=False)


CALLS = [
    (zo.minimize, loss),
    pytest.param(zo.minimize_black_box, python_loss, marks=pytest.mark.slow),
]
of_each_call = pytest.mark.parametrize(("call", "fun"), CALLS)
AGAIN = pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="programs are cached by the identity of what configures the run",
)


@AGAIN
@of_each_call
@pytest.mark.parametrize(
    "renewed", [pytest.param("optimizer", marks=pytest.mark.slow), "estimator"]
)
def test_an_equal_new_argument_compiles_nothing(call, fun, renewed, caplog):
    kept = {"optimizer": optimizer(), "estimator": estimator()}
    run(call, fun, **kept)
    new = {"optimizer": optimizer, "estimator": estimator}[renewed]()
    with compilations(caplog) as found:
        run(call, fun, **kept | {renewed: new})
    assert not found


@pytest.mark.slow
@AGAIN
def test_an_equal_new_function_compiles_nothing(caplog):
    kept = optimizer(), estimator()
    run(zo.minimize, lambda p: jnp.sum(jnp.cos(p)), *kept)
    with compilations(caplog) as found:
        run(zo.minimize, lambda p: jnp.sum(jnp.cos(p)), *kept)
    assert not found


@pytest.mark.slow
@of_each_call
def test_the_same_arguments_compile_nothing(call, fun, caplog):
    kept = optimizer(), estimator()
    run(call, fun, *kept)
    with compilations(caplog) as found:
        run(call, fun, *kept)
    assert not found
    with compilations(caplog) as found:
        run(call, fun, optimizer(2e-2), estimator(1e-2))
    assert found


@pytest.mark.parametrize(
    "jitted",
    [
        pytest.param(False, marks=AGAIN, id="not jitted"),
        pytest.param(True, marks=pytest.mark.slow, id="jitted"),
    ],
)
def test_value_and_grad_compiles_once(jitted, caplog):
    function = zo.value_and_grad(loss, estimator())
    function = jax.jit(function) if jitted else function
    keys = jax.random.split(jax.random.key(0))
    params = jnp.ones(3)
    function(keys[0], params)
    with compilations(caplog) as found:
        function(keys[1], params)
    assert not found
