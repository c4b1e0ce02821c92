"""The tables of the docs are those of the records they name."""

import importlib.util
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def tables():
    path = ROOT / "examples" / "benchmarks" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_their_records(tables, page):
    assert tables.rendered(page) == page.read_text(encoding="utf-8")


def test_benchmarks_have_tables(tables):
    page = ROOT / "docs" / "benchmarks.md"
    marks = list(tables.MARK.finditer(page.read_text(encoding="utf-8")))
    records = {mark["file"] for mark in marks}
    assert len(marks) >= 5
    assert all((page.parent / record).is_file() for record in records)


def test_a_table_is_replaced(tables, tmp_path):
    record = {
        "command": "python x.py",
        "date": "2026-01-01",
        "versions": {"jax": "0"},
        "device": "cpu (cpu)",
        "cpu_count": 2,
        "rows": [
            {"d": 10000, "law": "sphere", "ratio": 1.234},
            {"d": 10000, "law": "gaussian", "ratio": 123.4, "met": False},
        ],
    }
    (tmp_path / "record.json").write_text(json.dumps(record), encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- table: record.json law=gaussian | d law ratio met -->\nold\n"
        "<!-- end -->\nb\n",
        encoding="utf-8",
    )
    found = tables.rendered(page)
    assert found.startswith("a\n<!-- table") and found.endswith("<!-- end -->\nb\n")
    assert "old" not in found and "sphere" not in found
    cells = [cell.strip() for cell in found.splitlines()[5].split("|")]
    assert cells[1:-1] == ["10⁴", "gaussian", "123", "**no**"]
    assert "`python x.py`, 2026-01-01; jax 0; cpu (cpu), 2 cores" in found
    page.write_text(found, encoding="utf-8")
    assert tables.rendered(page) == found
