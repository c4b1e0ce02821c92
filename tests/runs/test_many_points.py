"""A step with more points than 16 bits can number, on workers."""

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo

POINTS = 2**16 + 5


def make_fun():
    return lambda x: jnp.sum((x - 1) ** 2)


@pytest.mark.slow
def test_workers_evaluate_more_points_than_16_bits_number():
    distributed = pytest.importorskip("distributed")
    method = (
        zo.zo_sgd(0.1),
        zo.forward_difference(zo.rademacher(), num_directions=POINTS - 1),
    )
    start = np.zeros(4, np.float32)
    with (
        distributed.LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            processes=False,
            protocol="tcp://",
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        result = zo.distribute(
            make_fun,
            start,
            *method,
            client=client,
            num_steps=2,
            batch_size=2**14,
            progress=False,
        )
    assert result.num_evaluations == 2 * POINTS
    expected = zo.minimize(make_fun(), start, *method, num_steps=2, progress=False)
    np.testing.assert_allclose(result.params, expected.params, rtol=1e-5)
    assert not np.any(result.history.failed)
