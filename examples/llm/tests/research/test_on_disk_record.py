"""The record of the guide's commands on four files, and what it says."""

import pytest

from research import on_disk
from research.common import RECORDS, read

ROWS = read(RECORDS / "on_disk.json")["rows"]
RUNS = [row for row in ROWS if row["start"] == "model"]


def gain(row):
    sign = -1 if row["metric"] == "test_loss" else 1
    return sign * (row["tuned"] - row["untuned"])


def test_each_run_is_one_of_a_file_and_a_seed():
    runs = [(row["case"], row["seed"]) for row in RUNS]
    assert len(set(runs)) == len(runs)
    assert {name for name, _ in runs} <= on_disk.OPTIONS.keys()
    assert {seed for _, seed in runs} <= {0, 1, 2}


@pytest.mark.parametrize("row", RUNS, ids=lambda row: f"{row['case']}-{row['seed']}")
def test_tuning_helps(row):
    assert gain(row) > 0


def test_what_is_exported_has_the_figures_of_the_run():
    """Adapters are added in another order to matrices that were dequantized."""
    ends = {row["case"]: row["tuned"] for row in RUNS if row["seed"] == 0}
    for row in ROWS:
        if row["start"] != "model":
            assert row["untuned"] == pytest.approx(ends[row["case"]], abs=0.01)
