"""Some distributions with some models.

`python -m campaigns.differential` takes each with each.
"""

import itertools

import jax
import pytest

from campaigns.differential.models import MODELS, haiku_mlp
from campaigns.differential.statistic import LARGEST, along_vectors, distances
from campaigns.distributions import DISTRIBUTIONS


@pytest.fixture(autouse=True)
def as_frameworks_need_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "distribution"),
    list(zip(MODELS, itertools.cycle(DISTRIBUTIONS), strict=False)),
)
def test_the_mean_of_estimates_is_the_gradient(model, distribution):
    """Each model with one distribution, and each distribution with one model."""
    try:
        loss, params = model()
    except ImportError as missing:
        pytest.skip(str(missing))
    found = distances(*along_vectors(loss, params, DISTRIBUTIONS[distribution]))
    assert found.max() < LARGEST, found


@pytest.mark.slow
def test_a_bias_is_found():
    """Estimates that are 15 percent too long: seven standard errors."""
    drawn, expected = along_vectors(*haiku_mlp(), DISTRIBUTIONS["gaussian"])
    assert distances(drawn, expected).max() < LARGEST
    assert distances(1.15 * drawn, expected).max() > LARGEST
