"""The board of minibatches: what the page says of its record, and its measures."""

import jax
import numpy as np
import pytest

from board import minibatches
from common import RECORDS
from common.record import read

_RECORDS = RECORDS / "board"


@pytest.fixture(autouse=True)
def _settings_of_a_user():
    """Problems mix ranks and dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_the_measured_rate_on_minibatches_is_as_the_page_says():
    """It loses little, also to the best rate in hindsight, and diverges nowhere."""
    rows = read(_RECORDS / "minibatches.json")["rows"]
    found = np.array([minibatches.lost(row)[minibatches.RULE] for row in rows])
    best = [minibatches.lost(row, "best")[minibatches.RULE] for row in rows]
    assert {row["problem"] for row in rows} == set(minibatches.PROBLEMS)
    assert np.mean(best) <= 0.1 and found.max() <= 0.75
    page = (_RECORDS / "README.md").read_text(encoding="utf-8")
    page = " ".join(page.partition("## Minibatches")[2].split())
    mean, worst = 100 * found.mean(), 100 * found.max()
    assert f"loses {mean:.0f} % of what a searched η gains" in page
    assert f"{worst:.0f} % in its worst run" in page


def test_the_loss_of_each_problem_is_finite():
    for name, make in minibatches.PROBLEMS.items():
        problem = make()
        assert np.isfinite(problem.loss(problem.start, problem.held_out)), name


def test_the_searched_rate_loses_nothing():
    ends = {name: [3.0, 2.0] for name in minibatches.METHODS}
    ends |= {
        "searched": [1.0, 1.0],
        "rule × 8/3": [None, 2.0],
        "rule × 4/3": [0.0, 0.0],
    }
    row = {"start": 5.0, "ends": ends}
    found = minibatches.lost(row)
    np.testing.assert_array_equal(found["searched"], [0, 0])
    np.testing.assert_array_equal(found["rule × 8/3"], [np.inf, 0.25])
    np.testing.assert_array_equal(found[minibatches.RULE], [0.5, 0.25])
    best = minibatches.lost(row, "best")
    np.testing.assert_array_equal(best[minibatches.RULE], [0.6, 0.4])
    # The start does not count.
    assert minibatches.ratio(row, minibatches.SEARCHED) == 0
    np.testing.assert_allclose(minibatches.ratio(row, minibatches.RULE), np.log(2.5))
