"""Estimates and runs of finite functions under flags that look for mistakes."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

import radazo_jax as zo

ESTIMATORS = {
    "forward": zo.forward_difference(),
    "central": zo.central_difference(num_directions=1),
    "low rank": zo.central_difference(zo.low_rank()),
    "evolution": zo.evolution_strategy(),
}

WITH_MEMORY = [
    zo.contrib.query_reuse(),
    zo.contrib.residual_feedback(),
    zo.contrib.linear_interpolation(),
    zo.contrib.gaussian_process(),
    zo.contrib.coordinate_wise(2),
]


@contextlib.contextmanager
def explicit_axes():
    kind = jax.sharding.AxisType.Explicit
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("m",), axis_types=(kind,))):
        yield


FLAGS = ("debug_nans", "debug_infs", "debug_key_reuse", None)


@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS)
def test_finite_functions_stay_finite(flag):
    def loss(x):
        return jnp.sum((x - 1) ** 2)

    with explicit_axes() if flag is None else getattr(jax, flag)(True):
        params = jnp.zeros((8, 4))
        for estimator in ESTIMATORS.values():
            value, _ = zo.value_and_grad(loss, estimator)(jax.random.key(0), params)
            assert abs(float(value) - 32) < 1
            run = zo.minimize(
                loss, params, zo.radazo(1e-2), estimator, num_steps=2, progress=False
            )
            assert float(loss(run.params)) < 32


@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS[:3])
@pytest.mark.parametrize("estimator", WITH_MEMORY, ids=repr)
def test_memories_that_are_empty_hold_finite_numbers(flag, estimator):
    with getattr(jax, flag)(True):
        run = zo.minimize(
            lambda x: jnp.sum((x - 1) ** 2),
            jnp.zeros(3),
            zo.radazo(1e-2),
            estimator,
            num_steps=2,
            progress=False,
        )
    assert jnp.all(jnp.isfinite(run.params))
