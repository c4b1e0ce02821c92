"""The limits of memory, held against the records."""

import pytest

from common import RECORDS
from common.record import read

_RECORDS = RECORDS / "benchmarks"
_RUNS = ("perturb", "zo_sgd", "radazo")
_DENSE = ("sphere", "gaussian", "rademacher", "coordinate")
# Record, model, run -> what may be allocated beyond the forward pass and the moments,
# as fractions of the forward pass's allocation and of a layer.
_LIMITS = {
    ("memory_tpu", "decoder", "perturb"): (0.005, 0.0),
    ("memory_tpu", "decoder", "zo_sgd"): (0.02, 0.0),
    ("memory_tpu", "decoder", "radazo"): (0.01, 0.0),
    **{("memory_tpu", "unrolled", run): (0.0, 0.5) for run in _RUNS},
    **{("memory_cpu", "scanned", run): (0.0, 1.5) for run in _RUNS},
    ("memory_tpu_grouped_query", "grouped_query_decoder", "zo_sgd"): (0.02, 0.0),
    ("memory_gpu", "decoder", "zo_sgd"): (0.05, 0.0),
    ("memory_gpu", "grouped_query_decoder", "zo_sgd"): (0.05, 0.0),
}


@pytest.mark.parametrize("case", _LIMITS, ids=" ".join)
def test_records_meet_the_limits(case):
    file, model, run = case
    rows = [row for row in read(_RECORDS / f"{file}.json")["rows"] if "run" in row]
    forward = {
        row["platform"]: row
        for row in rows
        if (row["model"], row["run"]) == (model, "forward")
    }
    found = [row for row in rows if (row["model"], row["run"]) == (model, run)]
    assert {row["distribution"] for row in found} >= set(_DENSE)
    of = "peak_bytes" if file.endswith("grouped_query") else "bytes"
    of_forward, of_layer = _LIMITS[case]
    for row in found:
        if row["distribution"] in _DENSE or model.endswith("decoder"):
            base = forward[row["platform"]]
            limit = of_forward * base[of] + of_layer * base["layer_bytes"]
            assert row[of] - base[of] - row["moments_bytes"] <= limit, row


def test_low_rank_steps_on_gpus_meet_their_limits():
    rows = [row for row in read(_RECORDS / "memory_gpu.json")["rows"] if "run" in row]
    forward = {
        (row["platform"], row["model"]): row["bytes"]
        for row in rows
        if row["run"] == "forward"
    }
    found = [row for row in rows if row["distribution"] == "low_rank"]
    assert {(row["platform"], row["model"]) for row in found} == set(forward)
    for row in found:
        assert row["bytes"] <= 1.02 * forward[row["platform"], row["model"]], row


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_replayed_moments_of_all_parameters_meet_their_limits(platform):
    rows = read(_RECORDS / f"all_parameters_{platform}.json")["rows"]
    found = {(row["device"], row["size"], row["method"]): row for row in rows}
    replayed = [key for key in found if key[2] == "R-AdaZO, replayed"]
    assert {key[0] for key in replayed} == {row["device"] for row in rows}
    for device, size, method in replayed:
        row = found[device, size, method]
        forward, sgd = (found[device, size, name] for name in ("forward", "ZO-SGD"))
        assert row["bytes"] <= 1.06 * forward["bytes"], row
        assert row["product_flops"] <= 1.15 * sgd["product_flops"], row
