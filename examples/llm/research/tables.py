"""Writes the tables of records into pages.

    python -m research.tables research/records/README.md

A page marks the place of each table; paths are relative to the page. The text between a
mark and its end is replaced.

    <!-- table: reviews.json 0 --> <!-- end -->

stands for the first table of the script that made the record (``tables(record)``), and

    <!-- table: llm_memory.json size=1.3b | method tuned total_GiB --> <!-- end -->

for the rows of a record that have these values, in these columns. ``<!-- sources -->``
stands for the provenance of all records of the page, folded.
"""

import functools
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from tabulate import tabulate

from research.common import read, worded

MARK = re.compile(
    r"(?P<mark><!-- table: (?P<file>[^ |\n]+)(?P<where>[^|\n]*?)"
    r"(?:\| (?P<columns>[^\n]*?))? -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)
SOURCES = re.compile(r"(<!-- sources -->\n).*?(<!-- end -->)", re.DOTALL)
FOLDED = """<details markdown="1">
<summary>How the figures were measured</summary>

{}

</details>
"""


def script(content: dict[str, Any]) -> ModuleType:
    """The module that made a record."""
    return importlib.import_module(content["command"].split()[2])


def shown(value: Any) -> str:
    """A cell: numbers with two decimals."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return "" if value is None else worded(str(value))


def filled(match: re.Match[str], folder: Path) -> str:
    content, where = read(folder / match["file"]), match["where"].split()
    if match["columns"] is None:
        table = script(content).tables(content)[int(where[0])]
        text = f"\n{table.caption}.\n\n{table.format('github')}\n"
    else:
        columns, wanted = match["columns"].split(), dict(w.split("=", 1) for w in where)
        cells = [
            [shown(row.get(column)) for column in columns]
            for row in content["rows"]
            if all(str(row.get(key)) == value for key, value in wanted.items())
        ]
        heads = [worded(column) for column in columns]
        text = tabulate(cells, heads, tablefmt="github", disable_numparse=True)
        text = f"\n{text}\n"
    return f"{match['mark']}{text}\n{match['end']}"


def rendered(page: Path) -> str:
    """The page with its tables as their records have them."""
    text = page.read_text(encoding="utf-8")
    text = MARK.sub(functools.partial(filled, folder=page.parent), text)
    return SOURCES.sub(lambda match: match[1] + sources(page) + match[2], text)


def sources(page: Path) -> str:
    """The provenance of the records of a page, a line each."""
    marks = MARK.finditer(page.read_text(encoding="utf-8"))
    paths = dict.fromkeys(page.parent / mark["file"] for mark in marks)
    lines = []
    for path in paths:
        # The site has no link to a record, which lies elsewhere.
        beside = path.parent == page.parent
        name = f"[{path.name}]({path.name})" if beside else f"`{path.name}`"
        lines.append(f"- {name}: {described(read(path))}")
    return FOLDED.format("\n".join(lines))


def described(content: dict[str, Any]) -> str:
    """The record's command, date, versions, device and time, for a page.

    A record of an earlier program names the revision.
    """
    versions = ", ".join(f"{name} {v}" for name, v in content["versions"].items())
    revision = f", revision {content['revision']}" if "revision" in content else ""
    cores = f", {content['cpu_count']} cores" if "cpu_count" in content else ""
    minutes = f"; {content['seconds'] / 60:.1f} minutes" if "seconds" in content else ""
    return (
        f"`{content['command']}`, {content['date']}{revision}; {versions}; "
        f"{content['device']}{cores}{minutes}"
    )


@click.command(help=__doc__)
@click.argument("pages", type=click.Path(exists=True, path_type=Path), nargs=-1)
def main(pages: tuple[Path, ...]) -> None:
    for page in pages:
        page.write_text(rendered(page), encoding="utf-8")


if __name__ == "__main__":
    main()
