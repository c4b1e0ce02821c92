"""What docs/research/testing.md says is equal to the bit, on the machine at hand."""

import pathlib
import platform
import sys

import pytest

from examples.common import record
from examples.research.benchmarks import bits

ROWS = record.read(pathlib.Path(__file__).parents[2] / "docs/trust/bits.json")["rows"]
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
def test_rows_are_as_the_page_has_them():
    right = bits.elsewhere(sys.executable, *bits.SYSTEMS["as it is"])
    for system in ("AVX2", "1_thread"):
        found = bits.elsewhere(sys.executable, *bits.SYSTEMS[system])
        compared = bits.compared(found, right)
        for row in ROWS:
            if row[system] == "equal":
                name = f"{row['what']} {row['distribution']}"
                assert compared[name] == "equal", (system, name)
