"""Estimates and runs of finite functions under flags that look for mistakes."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

import radazo_jax as zo

ESTIMATORS = [
    zo.forward_difference(),
    zo.central_difference(num_directions=1),
    zo.central_difference(zo.low_rank()),
    zo.evolution_strategy(),
]

WITH_MEMORY = [
    zo.contrib.query_reuse(),
    zo.contrib.residual_feedback(),
    zo.contrib.linear_interpolation(),
    zo.contrib.gaussian_process(),
    zo.contrib.coordinate_wise(2),
]


@contextlib.contextmanager
def finite():
    with jax.debug_nans(True), jax.debug_infs(True):
        yield


def key_reuse():
    return jax.debug_key_reuse(True)


@contextlib.contextmanager
def explicit_axes():
    kind = jax.sharding.AxisType.Explicit
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("m",), axis_types=(kind,))):
        yield


def loss(x):
    return jnp.sum((x - 1) ** 2)


def run(estimator, params):
    return zo.train(
        loss, params, zo.radazo(1e-2), estimator, num_steps=2, progress=False
    ).params


@pytest.mark.slow
@pytest.mark.parametrize("flags", [finite, key_reuse, explicit_axes])
def test_finite_functions_stay_finite(flags):
    with flags():
        params = jnp.zeros((8, 4))
        for estimator in ESTIMATORS:
            value, _ = zo.value_and_grad(loss, estimator)(jax.random.key(0), params)
            assert abs(float(value) - 32) < 1
            assert float(loss(run(estimator, params))) < 32


@pytest.mark.slow
@pytest.mark.parametrize("flags", [finite, key_reuse])
@pytest.mark.parametrize("estimator", WITH_MEMORY, ids=repr)
def test_memories_that_are_empty_hold_finite_numbers(flags, estimator):
    with flags():
        assert jnp.all(jnp.isfinite(run(estimator, jnp.zeros(3))))
