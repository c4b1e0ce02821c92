"""Writes the figures of a benchmark's record into the tables of a page.

A page marks where a table goes, and of which rows and columns of which record:

    <!-- table: benchmarks/step_time.json table=steps | d law step/evaluations -->
    <!-- end -->

What stands between the marks is replaced by the table and by the command, versions and
date of its record; paths are relative to the page. With ``--check`` nothing is written,
and the exit status says whether anything would change.

    python examples/benchmarks/tables.py docs/benchmarks.md
"""

import argparse
import functools
import json
import pathlib
import re
import sys
from typing import Any

from tabulate import tabulate

MARK = re.compile(
    r"(<!-- table: (?P<file>\S+)(?P<where>[^|\n]*)\| (?P<columns>.*?) -->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)


def shown(value: Any) -> str:
    """A cell: powers of ten as such, other numbers with two decimals."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int) and re.fullmatch("1000+", str(value)):
        return f"10{'³⁴⁵⁶'[len(str(value)) - 4]}"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return "" if value is None else str(value)


def provenance(record: dict[str, Any], file: str) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items())
    return (
        f"`{record['command']}`, {record['date']}; {versions}; {record['device']}, "
        f"{record['cpu_count']} cores. The figures are in [{file}]({file})."
    )


def table(match: re.Match[str], folder: pathlib.Path) -> str:
    file = match["file"]
    record = json.loads((folder / file).read_text(encoding="utf-8"))
    where = dict(pair.split("=", 1) for pair in match["where"].split())
    columns = match["columns"].split()
    cells = [
        [shown(row.get(column)) for column in columns]
        for row in record["rows"]
        if all(str(row.get(key)) == value for key, value in where.items())
    ]
    drawn = tabulate(cells, headers=columns, tablefmt="github", disable_numparse=True)
    return f"{match[1]}\n{drawn}\n\n{provenance(record, file)}\n\n{match[5]}"


def rendered(page: pathlib.Path) -> str:
    """The page with its tables as their records have them."""
    text = page.read_text(encoding="utf-8")
    return MARK.sub(functools.partial(table, folder=page.parent), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=pathlib.Path, nargs="+")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = [p for p in arguments.pages if rendered(p) != p.read_text("utf-8")]
    if arguments.check and stale:
        sys.exit(f"tables are not those of their records: {', '.join(map(str, stale))}")
    for page in stale:
        page.write_text(rendered(page), encoding="utf-8")


if __name__ == "__main__":
    main()
