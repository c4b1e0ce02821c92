"""The record of what steps send and compute, held against the limits of its page."""

import math

import pytest

from benchmarks import scaling
from common import RECORDS
from common.record import read


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_record_meets_the_bars(platform):
    rows = read(RECORDS / "benchmarks" / f"scaling_{platform}.json")["rows"]
    steps = [row for row in rows if row["table"] == "steps"]
    few = {"rademacher", "low_rank"} if platform == "gpu" else set(scaling.MEASURED)
    assert {row["distribution"] for row in steps} == few
    most = {"cpu": 8, "gpu": 16, "tpu": 256}
    assert max(row["chips"] for row in steps) == most[platform]
    for row in steps:
        assert row["host_transfers"] == []
        if row["replicated"]:
            assert row["sent_bytes"] <= 4 * row["K+1"] + 64, row
        else:
            assert row["largest_bytes"] <= 1e6 * row["forward_largest_MB"], row
        if row["evaluations_spread"]:
            # One more evaluation than its share, if K + 1 cannot be divided.
            most = math.ceil(row["K+1"] / row["chips"]) / (row["K+1"] / row["chips"])
            assert 0.95 <= row["flops/ideal"] <= 1.05 * most, row
