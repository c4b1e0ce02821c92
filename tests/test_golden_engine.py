"""The engine computes what was recorded before it was rebuilt."""

import numpy as np
import pytest
from golden.engine import make_engine
from tables import assert_same_draws, slow

RECORD = np.load(make_engine.FILE)
NAMES = list(make_engine.names())
# Directions are equal to the bit, but for laws of sums. Sums may be taken in another
# order, and a run amplifies that.
TOLERANCES = {"gradient": 2e-5, "run": 2e-3}


def recorded(name):
    prefix = "/".join(map(str, name))
    found = [key for key in RECORD.files if key.rpartition("/")[0] == prefix]
    return [RECORD[f"{prefix}/{i}"] for i in range(len(found))]


@pytest.mark.parametrize(
    "name",
    [name if name[0] == "directions" else slow(name) for name in NAMES],
    ids=lambda name: "-".join(map(str, name)),
)
def test_is_what_was_recorded(name):
    got, expected = make_engine.compute(*name), recorded(name)
    assert expected
    for a, b in zip(got, expected, strict=True):
        if name[0] == "directions":
            assert_same_draws(name[1], a, b)
        else:
            largest = max(np.abs(b).max(initial=0), 1e-3)
            np.testing.assert_allclose(a, b, atol=TOLERANCES[name[0]] * largest)
