"""Writes the figures of records into the tables of a page.

    python examples/common/tables.py $(git ls-files "docs/*.md")

A page marks the place of each table. Paths are relative to the page. The
script replaces the text between a mark and its end.

    <!-- table: benchmarks/step_time.json table=steps | d distribution step/evaluations
    --> <!-- end -->

stands for the rows of a record that have these values, in these columns.
``table: evidence/tuned.json 2`` is table number 2 of the script that made the record
(``tables(record)``), and ``table: evidence/tuned.json 2 0,4`` has its rows 0 and 4.
``<!-- sources -->`` stands for the provenance of all records of the page: command,
date, versions, device and time, folded.

With ``--figures``, scripts that can (``plot(record)``) draw theirs anew, too.
"""

import functools
import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tabulate import tabulate

from examples.common import cli, figures
from examples.common.record import described, read

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


NAMES = {"radazo": "R-AdaZO", "zo_adamm": "ZO-AdaMM", "zo_sgd": "ZO-SGD"}
UNITS = {"us": "µs", "ms": "ms", "s": "s"}


def worded(name: str) -> str:
    """The name of a column or a value in words: "step_us" is "step, µs"."""
    if "`" in name:
        return name
    for identifier, word in NAMES.items():
        name = re.sub(rf"\b{identifier}(?![a-z]|_jax)", word, name)
    name = re.sub(r"_K=(\d+)$", r", K = \1", name)
    name = re.sub(r"_(us|ms|s)$", lambda unit: f", {UNITS[unit[1]]}", name)
    return re.sub(r"(?<=[a-z])(?<!radazo)_(?=[a-z])", " ", name)


class Table(NamedTuple):
    """Rows of texts, as they are printed and as they stand in the docs."""

    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def format(self, style: str = "simple") -> str:
        align = ("left", *("right" for _ in self.headers[1:]))
        return tabulate(
            [[worded(cell) for cell in row] for row in self.rows],
            [worded(header) for header in self.headers],
            style,
            colalign=align,
            disable_numparse=True,
        )


def shown(value: Any) -> str:
    """A cell: powers of ten as such, other numbers with two decimals."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int) and re.fullmatch("1000+", str(value)):
        return f"10{'³⁴⁵⁶⁷⁸⁹'[len(str(value)) - 4]}"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return "" if value is None else worded(str(value))


def script(content: dict[str, Any]) -> ModuleType:
    """The module that made a record."""
    path = content["command"].removeprefix("python ").removeprefix("-m ").split()[0]
    return importlib.import_module(path.removesuffix(".py").replace("/", "."))


def filled(match: re.Match[str], folder: Path) -> str:
    content, where = read(folder / match["file"]), match["where"].split()
    if match["columns"] is None:
        table = script(content).tables(content)[int(where[0])]
        if where[1:]:
            chosen = [table.rows[int(number)] for number in where[1].split(",")]
            table = table._replace(rows=chosen)
        text = f"\n{table.caption}.\n\n{table.format('github')}\n"
    else:
        columns, wanted = match["columns"].split(), dict(w.split("=", 1) for w in where)
        cells = [
            [shown(row.get(column)) for column in columns]
            for row in content["rows"]
            if all(str(row.get(key)) == value for key, value in wanted.items())
        ]
        heads = [worded(column) for column in columns]
        drawn = tabulate(cells, heads, tablefmt="github", disable_numparse=True)
        text = f"\n{drawn}\n"
    return f"{match['mark']}{text}\n{match['end']}"


def rendered(page: Path) -> str:
    """The page with its tables as their records have them."""
    text = page.read_text(encoding="utf-8")
    text = MARK.sub(functools.partial(filled, folder=page.parent), text)
    return SOURCES.sub(lambda match: match[1] + sources(page) + match[2], text)


def records(page: Path) -> list[Path]:
    """The files that a page's tables are made of, in their order."""
    marks = MARK.finditer(page.read_text(encoding="utf-8"))
    return list(dict.fromkeys(page.parent / mark["file"] for mark in marks))


def sources(page: Path) -> str:
    """The provenance of the records of a page, a line each."""
    lines = [
        f"- [{path.name}]({os.path.relpath(path, page.parent)}): "
        f"{described(read(path))}"
        for path in records(page)
    ]
    return FOLDED.format("\n".join(lines))


def draw(path: Path) -> None:
    """Draws a record's figure again, if there is one next to it."""
    content = read(path)
    plot = getattr(script(content), "plot", None)
    if plot is not None and path.with_suffix(".png").exists():
        figures.save(plot(content), path.with_suffix(".png"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument("--figures", action="store_true", help="draw them anew")
    args = parser.parse_args(argv)
    for page in args.pages:
        page.write_text(rendered(page), encoding="utf-8")
    for path in {path for page in args.pages for path in records(page)}:
        if args.figures:
            draw(path)


if __name__ == "__main__":
    main()
