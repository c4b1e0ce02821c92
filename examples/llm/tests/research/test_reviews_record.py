"""The records of the runs on movie reviews, by what the pages say about them."""

from statistics import mean

import pytest

from research import reviews
from research.common import RECORDS, read


@pytest.fixture(scope="module")
def content():
    return read(RECORDS / "reviews.json")


def accuracy(rows):
    return mean(row["evaluations"][-1]["test_accuracy"] for row in rows)


def test_backpropagation_is_ahead_in_fewer_passes_and_less_time(content):
    runs = reviews.of_runs(content)
    first = runs.pop(("adamw", 300))
    for rows in runs.values():
        assert accuracy(rows) < min(accuracy([row]) for row in first) - 0.03
        for name in ("passes", "cpu_s"):
            spent = [r[0]["evaluations"][-1][name] for r in (first, rows)]
            assert spent[0] < spent[1]


def test_forward_passes_end_above_the_threshold_at_the_median(content):
    threshold = reviews.untuned(content)["test_calibrated"]
    runs = reviews.of_runs(content)
    for num_steps, gain in ((1000, 0.02), (10000, 0.08)):
        rows = runs["radazo", num_steps]
        assert [row["seed"] for row in rows] == [1, 2, 3]
        assert accuracy(rows) > threshold + gain
    for method in ("zo_adamm", "zo_sgd"):
        assert 0 < accuracy(runs[method, 1000]) - threshold < 0.03


def test_the_measured_rate_is_cautious_and_steady(content):
    """Compared with the rate of the search, which has more spread."""
    runs = reviews.of_runs(content)
    measured, searched = runs["measured", 1000], runs["radazo", 1000]
    ends = [accuracy([row]) for row in measured]
    assert max(ends) - min(ends) < 0.02
    assert reviews.untuned(content)["test_calibrated"] < accuracy(measured)
    assert 0.02 < accuracy(searched) - accuracy(measured) < 0.03


def test_rates_follow_from_the_search(content):
    """Its best rate is no edge of the grid, and is divided by √n for n times longer."""
    for (method, num_steps), rows in reviews.of_runs(content).items():
        searched = {
            row["learning_rate"]: row["num_steps"]
            for row in content["rows"]
            if row["method"] == method and not row["seed"]
        }
        assert set(searched) == set(reviews.RATES.get(method, ()))
        if method == "measured":
            assert {row["learning_rate"] for row in rows} == {None}
            continue
        best = reviews.best(content["rows"], method)
        assert min(searched) < best < max(searched)
        rate = best * (searched[best] / num_steps) ** 0.5
        # It is rounded to two digits.
        assert {f"{rate:.2g}"} == {f"{row['learning_rate']:g}" for row in rows}
