"""The record of the command on a file of prompts and a metric."""

from research import own_metric
from research.common import RECORDS, read


def test_the_accuracy_rises_by_more_than_two_errors_with_each_seed():
    rows = read(RECORDS / "own_metric.json")["rows"]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["held_out"] >= 500
        assert own_metric.errors_of(row) > 2
        first, last = row["evaluations"][0], row["evaluations"][-1]
        assert f"step 0: held-out reward {first[1]:.4f}" in row["printed"]
        assert f"step {last[0]}: held-out reward {last[1]:.4f}" in row["printed"]
