"""Tests of the command that fills in the tables of pages."""

import json

from common import tables


def test_a_table_is_replaced(tmp_path):
    record = {
        "seconds": 90,
        "command": "python -m x",
        "date": "2026-01-01",
        "versions": {"jax": "0"},
        "device": "cpu (cpu)",
        "cpu_count": 2,
        "rows": [
            {"d": 10000, "distribution": "sphere", "ratio": 1.234},
            {"d": 10000, "distribution": "gaussian", "ratio": 123.4, "met": False},
        ],
    }
    (tmp_path / "record.json").write_text(json.dumps(record), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- table: record.json distribution=gaussian | d distribution ratio met"
        " -->\nold\n<!-- end -->\nb\n<!-- sources -->\n<!-- end -->\n",
        encoding="utf-8",
    )
    found = tables.rendered(page)
    assert found.startswith("a\n<!-- table") and "<!-- end -->\nb\n" in found
    assert "old" not in found and "sphere" not in found
    cells = [cell.strip() for cell in found.splitlines()[5].split("|")]
    assert cells[1:-1] == ["10⁴", "gaussian", "123", "**no**"]
    made = "`python -m x`, 2026-01-01; jax 0; cpu (cpu), 2 cores; 1.5 minutes"
    assert f"- [record.json](record.json): {made}\n" in found
    page.write_text(found, encoding="utf-8")
    assert tables.rendered(page) == found


def test_a_table_that_a_script_makes_of_its_record(tmp_path):
    """The page also says which command made it."""
    record = {
        "command": "python -m paper.synthetic --steps 2",
        "date": "2026-01-01",
        "versions": {"jax": "0"},
        "device": "cpu (cpu), 2 cores",
        "seconds": 90,
        "iterations": [0, 1, 2],
        "gaps": {
            "Cubic": {"R-AdaZO": [[9.0, 3.0, 1.0]], "ZO-AdaMM": [[9.0, 8.0, 4.0]]}
        },
    }
    (tmp_path / "made.json").write_text(json.dumps(record), encoding="utf-8")
    page = tmp_path / "page.md"
    marks = ("table: made.json 0", "table: made.json 0 1", "sources")
    page.write_text("".join(f"<!-- {mark} -->\n<!-- end -->\n" for mark in marks))
    found = tables.rendered(page)
    assert "Cubic: gap after 2 iterations, from 9;" in found
    # The second table has its row 1 alone.
    names = [line.split()[1] for line in found.splitlines() if line.startswith("| ")]
    assert names == ["method", "R-AdaZO", "ZO-AdaMM", "method", "ZO-AdaMM"]
    (row,) = (line for line in found.splitlines() if line.startswith("| R-AdaZO"))
    # ZO-AdaMM's final gap, 4, is reached after one of its two iterations.
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells == ["R-AdaZO", "1.00 ± 0", "1.00 ± 0", "2.00"]
    assert "`python -m paper.synthetic --steps 2`, 2026-01-01; jax 0;" in found
