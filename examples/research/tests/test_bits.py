"""The rows of the record that are bitwise equal, on this machine."""

import platform
import sys

import numpy as np
import pytest

from campaigns import bits
from common import RECORDS, record

ROWS = record.read(RECORDS / "trust/bits.json")["rows"]
EXACT = {"rademacher", "coordinate", "orthonormal"}


def test_directions_without_rounding_are_equal_everywhere():
    rows = {row["distribution"]: row for row in ROWS if row["what"] == "direction"}
    assert rows.keys() == bits.DISTRIBUTIONS.keys()
    for distribution in EXACT:
        assert {
            rows[distribution][name]
            for name in rows[distribution].keys() - {"what", "distribution"}
        } == {"equal"}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
def test_rows_are_as_the_record_has_them():
    right = bits.elsewhere(sys.executable, *bits.SYSTEMS["as it is"])
    for system in ("AVX2", "1_thread"):
        found = bits.elsewhere(sys.executable, *bits.SYSTEMS[system])
        compared = bits.compared(found, right)
        for row in ROWS:
            if row[system] == "equal":
                name = f"{row['what']} {row['distribution']}"
                assert compared[name] == "equal", (system, name)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
def test_steps_along_signs_are_equal_with_all_instruction_sets():
    """From the same values with ZO-SGD, so workers of both kinds can share a run."""
    found = [
        bits.elsewhere(sys.executable, bits.ISA + name, None, bits.given)
        for name in ("AVX2", "SSE4_2")
    ]
    equal = {name: np.array_equal(found[0][name], found[1][name]) for name in found[0]}
    assert equal == {
        "rademacher zo_sgd": True,
        "orthonormal zo_sgd": False,  # Its elements ±1/√d are rounded.
        "gaussian zo_sgd": False,
        "rademacher radazo": False,
    }
