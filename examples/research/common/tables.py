"""Writes the figures of records into the tables of pages.

    python -m common.tables $(git ls-files "../../docs/*.md" "*.md")

A page marks the place of each table. The path of a record is relative to the page, or
to the repository. The script replaces the text between a mark and its end.

    <!-- table: benchmarks/ask_tell.json table=ask_tell | d ask_tell_ms -->
    <!-- end -->

stands for the rows of a record that have these values, in these columns.
``table: evidence/tuned.json 2`` is table number 2 of the module that made the record
(``tables(record)``), and ``table: evidence/tuned.json 2 0,4`` has its rows 0 and 4.
``<!-- sources -->`` stands for the provenance of all records of the page: command,
date, versions, device and time, folded.

With ``--figures``, modules that can (``plot(record)``) draw the images of the page
that are named like one of its records.
"""

import functools
import importlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import click
from tabulate import tabulate

from common import ROOT, figures
from common.record import described, read

MARK = re.compile(
    r"(?P<mark><!-- table: (?P<file>[^ |\n]+)(?P<where>[^|\n]*?)"
    r"(?:\| (?P<columns>[^\n]*?))? -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)
SOURCES = re.compile(r"(<!-- sources -->\n).*?(<!-- end -->)", re.DOTALL)
FOLDED = """<details markdown="1">
<summary>How the figures were measured</summary>

The commands run in `examples/research`.

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

    def show(self) -> None:
        """Prints the table, if it has rows."""
        if self.rows:
            print(self.caption, self.format(), sep="\n\n", end="\n\n")


def shown(value: Any) -> str:
    """A cell: powers of ten as such, other numbers with two decimals."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int) and re.fullmatch("1000+", str(value)):
        return f"10{'³⁴⁵⁶⁷⁸⁹'[len(str(value)) - 4]}"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return "" if value is None else worded(str(value))


def maker(content: dict[str, Any]) -> ModuleType:
    """The module that made a record."""
    name = re.match(r"python -m (\S+)", content["command"])
    if name is None:
        raise click.ClickException(
            "command of a record must be `python -m MODULE …`; "
            f"got {content['command']}. Run the module by its name."
        )
    return importlib.import_module(name[1])


def located(page: Path, name: str) -> Path:
    """The record that a page names."""
    for folder in (page.parent, ROOT):
        if (folder / name).is_file():
            return folder / name
    raise click.ClickException(
        f"table in {page} must name a record beside the page or from the root of the "
        f"repository; got {name}. Correct the path."
    )


def filled(match: re.Match[str], page: Path) -> str:
    content, where = read(located(page, match["file"])), match["where"].split()
    if match["columns"] is None:
        table = maker(content).tables(content)[int(where[0])]
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
    text = MARK.sub(functools.partial(filled, page=page), text)
    return SOURCES.sub(lambda match: match[1] + sources(page) + match[2], text)


def records(page: Path) -> list[Path]:
    """The files that a page's tables are made of, in their order."""
    marks = MARK.finditer(page.read_text(encoding="utf-8"))
    return list(dict.fromkeys(located(page, mark["file"]) for mark in marks))


def sources(page: Path) -> str:
    """The provenance of the records of a page, a line each."""
    lines = [
        f"- [{path.name}]({os.path.relpath(path.resolve(), page.resolve().parent)}): "
        f"{described(read(path))}"
        for path in records(page)
    ]
    return FOLDED.format("\n".join(lines))


def images(page: Path) -> Iterator[tuple[Path, Path]]:
    """The images of a page that show one of its records, each with the record."""
    shown = re.findall(r"!\[[^\]]*\]\(([^)\s]+\.png)", page.read_text(encoding="utf-8"))
    for image in map(page.parent.joinpath, shown):
        for path in records(page):
            if path.stem == image.stem:
                yield image, path


@click.command(help=__doc__.partition("\n")[0])
@click.argument(
    "pages",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--figures", "draw", is_flag=True, help="Draws the figures, too.")
def main(pages: Sequence[Path], draw: bool) -> None:
    for page in pages:
        page.write_text(rendered(page), encoding="utf-8")
    drawn = {pair for page in pages for pair in images(page)} if draw else set()
    for image, path in drawn:
        content = read(path)
        if plot := getattr(maker(content), "plot", None):
            figures.save(plot(content), image)


if __name__ == "__main__":
    main()
