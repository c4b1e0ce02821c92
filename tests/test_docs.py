"""The tables of the pages agree with the records that they name."""

import json
import pathlib
import re

import pytest

from examples.common import tables

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
WITH_TABLES = [page for page in PAGES if tables.records(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_their_records(page):
    assert tables.rendered(page) == page.read_text(encoding="utf-8")


def test_pages_with_tables_say_how_they_were_measured():
    assert len(WITH_TABLES) >= 8
    for page in WITH_TABLES:
        assert page.read_text(encoding="utf-8").count("<!-- sources -->") == 1, page
        assert all(path.is_file() for path in tables.records(page))


def test_pages_have_titles_of_their_own():
    titles = [page.read_text(encoding="utf-8").partition("\n")[0] for page in PAGES]
    assert all(title.startswith("# ") for title in titles)
    assert len(set(titles)) == len(titles)


def test_pages_are_short():
    """Results of experiments may be longer."""
    research = {ROOT / "docs" / name for name in ("benchmarks.md", "board.md")}
    research |= set((ROOT / "docs" / "research").glob("*.md"))
    limits = {page: 2500 for page in PAGES if page not in research}
    limits |= {ROOT / "README.md": 700, ROOT / "docs" / "design.md": 1800}
    for page, limit in limits.items():
        words = len(page.read_text(encoding="utf-8").split())
        assert words <= limit, f"{page.relative_to(ROOT)} has {words} words"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_tables_are_words(page):
    """Identifiers stand in code, or are the names of packages and their methods."""
    rows = re.findall(r"^\|.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for row in rows:
        text = re.sub(r"`[^`]*`|\]\(\S*\)|radazo_jax|Open_ES", "", row)
        assert not re.search(r"[a-z]_[a-z]", text), row


def test_a_table_is_replaced(tmp_path):
    record = {
        "seconds": 90,
        "command": "python x.py",
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
    made = "`python x.py`, 2026-01-01; jax 0; cpu (cpu), 2 cores; 1.5 minutes"
    assert f"- [record.json](record.json): {made}\n" in found
    page.write_text(found, encoding="utf-8")
    assert tables.rendered(page) == found


def test_a_table_that_a_script_makes_of_its_record(tmp_path):
    """The page also says which command made it."""
    record = {
        "command": "python examples/research/paper/synthetic.py --steps 2",
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
    assert (
        "`python examples/research/paper/synthetic.py --steps 2`, 2026-01-01; jax 0;"
        in found
    )
