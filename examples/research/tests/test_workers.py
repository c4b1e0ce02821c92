"""The measurements of worker processes, small."""

import pytest

from benchmarks import workers

# Dask leaves sockets to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def test_kills_and_joins_change_nothing():
    row = workers.kills(num_workers=2, num_steps=60, num_kills=2)
    assert (row["kills"], row["joins"], row["failed"]) == (2, 2, 0)
    assert row["lines"] == 61  # A header, and a line a step.
    assert row["bitwise_equal"] == "yes"


def test_bytes_of_a_step_do_not_depend_on_the_dimension():
    small, large = (workers.wire(dimension, 16) for dimension in (10**3, 10**5))
    for name in ("sent_bytes", "received_bytes"):
        assert 0 < large[name] <= 1.1 * small[name]
