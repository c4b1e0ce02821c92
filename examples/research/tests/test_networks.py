"""Networks with steps: what the page says of the record, and of its networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from board import minibatches, networks
from common import RECORDS
from common.record import read

ROWS = read(RECORDS / "board" / "networks.json")["rows"]


def test_the_record_is_as_the_page_says():
    """None diverges, all lose less than at the default μ, and the rate is near."""
    assert {row["network"] for row in ROWS} == set(networks.NETWORKS)
    for row in ROWS:
        lost = {name: x.mean() for name, x in minibatches.lost(row).items()}
        ends = np.array(row["ends"][networks.MEASURED])
        assert np.all(ends < 0.85 * np.array(row["start"]))
        if row["network"] != "tanh":
            assert lost[networks.MEASURED] < 0.6 * lost[networks.DEFAULT]
        multiple = row["searched_rate"] / np.mean(row["learning_rates"])
        assert np.any(np.isclose(multiple, [1, 2], rtol=1e-3))
        assert lost[networks.MEASURED] < 0.15
        if row["network"] != "tanh":
            sizes = np.array(row["sizes"]) / row["searched_size"]
            assert np.all((sizes > 0.49) & (sizes < 2.1))


@pytest.mark.parametrize(
    ("activation", "levels"),
    [
        (networks._sign, [-1, 1]),
        (networks._spikes, np.arange(9) / 8),
        (networks._winners, [0, 1]),
        (networks._codes, [0, 1]),
    ],
)
def test_the_values_of_steps_are_exact_and_have_a_slope(activation, levels):
    """A stand-in adds its derivative, and no rounding error."""
    hidden = jax.random.normal(jax.random.key(0), (5, 32))
    assert np.isin(activation(hidden), np.float32(levels)).all()
    weights = jax.random.normal(jax.random.key(1), hidden.shape)
    slope = jax.grad(lambda x: jnp.sum(weights * activation(x)))(hidden)
    assert jnp.any(slope != 0)


def test_a_spiking_unit_fires_at_the_rate_of_its_current():
    """v/2 + c stays below 2c, and above c after a spike; the threshold is 1."""
    currents = jnp.array([[0.49, 1.1]])
    np.testing.assert_array_equal(networks._spikes(currents), [[0.0, 1.0]])
