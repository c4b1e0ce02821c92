"""Parameters of four bits: steps from outside, and rounding to their few numbers."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import called

FLOAT4 = jnp.float4_e2m1fn
# All sixteen numbers of the format, by the OCP specification of microscaling formats.
NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
NUMBERS = np.array(sorted({*NUMBERS, *(-x for x in NUMBERS)}), np.float32)


@pytest.mark.slow
def test_a_run_on_four_bits_is_resumed_from_its_journal(tmp_path):
    start = {"a": np.ones(4, ml_dtypes.float4_e2m1fn), "b": np.ones(3, np.float32)}
    method = (
        zo.zo_sgd(0.1),
        zo.central_difference(zo.rademacher(), smoothing=1.0, num_directions=2),
    )

    def fun(p):
        return float(np.sum(p["b"] ** 2))

    def run(steps, **kwargs):
        return called(fun, start, *method, num_steps=steps, progress=False, **kwargs)

    run(3, journal=tmp_path / "run")
    resumed = run(6, journal=tmp_path / "run").params
    expected = run(6).params
    for name in start:
        np.testing.assert_array_equal(
            np.asarray(resumed[name], np.float32),
            np.asarray(expected[name], np.float32),
        )


# Sums of two numbers of the format that lie between two of them.
@pytest.mark.slow
@pytest.mark.parametrize(("p", "u"), [(4, 1.5), (2, 0.5), (-3, -0.5), (-6, 1)])
def test_the_mean_of_rounded_sums_is_the_sum(p, u):
    below = NUMBERS[p + u > NUMBERS].max()
    above = NUMBERS[p + u < NUMBERS].min()
    params = jnp.full(20_000, p, FLOAT4)
    optimizer = zo.transforms.stochastic_rounding(0)
    updates, _ = optimizer.update(
        jnp.full(20_000, u, FLOAT4), optimizer.init(params), params
    )
    after = np.asarray(optax.apply_updates(params, updates), np.float32)
    assert set(np.unique(after)) == {below, above}
    deviation = (above - below) / 2 / np.sqrt(20_000)
    assert abs(after.mean() - (p + u)) < 5 * deviation


@pytest.mark.slow
def test_sums_beyond_the_largest_number_stay_there():
    params = jnp.array([6, -6, 4], FLOAT4)
    optimizer = zo.transforms.stochastic_rounding(0)
    updates, _ = optimizer.update(
        jnp.array([1, -1, 4], FLOAT4), optimizer.init(params), params
    )
    after = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(np.asarray(after, np.float32), [6, -6, 6])
