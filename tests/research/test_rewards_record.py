"""The record of the runs on a reward."""

import pathlib

import numpy as np
import pytest

from examples.common.record import read
from examples.research.benchmarks import rewards

PATH = pathlib.Path(__file__).parents[2] / "docs" / "evidence" / "rewards.json"


@pytest.fixture(scope="module")
def runs():
    return rewards.of_runs(read(PATH))


def gains(rows):
    return [row["evaluations"][-1][1] - row["evaluations"][0][1] for row in rows]


def test_each_gains_more_than_two_standard_errors(runs):
    assert set(runs) == {"radazo", "grpo"}
    for rows in runs.values():
        assert [row["seed"] for row in rows] == [1, 2, 3]
        gain = np.array(gains(rows))
        assert gain.mean() > 2 * gain.std(ddof=1) / np.sqrt(3)
        # Held-out sums of a run: 1,000 of at most 1/4 variance.
        assert gain.min() > 2 * np.sqrt(0.5 / 1000)


def test_the_policy_gradient_ends_higher_with_as_many_tokens(runs):
    ends = {name: np.mean(gains(rows)) for name, rows in runs.items()}
    assert ends["grpo"] > ends["radazo"]
    generated = [row["generated"] for rows in runs.values() for row in rows]
    assert max(generated) < 1.02 * min(generated)


def test_runs_have_the_setting_that_the_search_found_best(runs):
    searched = [row for row in read(PATH)["rows"] if not row["seed"]]
    for method, rows in runs.items():
        best = rewards.best(searched, method)
        assert all(row | best == row for row in rows)


def test_journals_were_replayed(runs):
    rows = read(PATH)["rows"]
    assert all(row["replayed"] for row in rows if row["method"] == "radazo")
