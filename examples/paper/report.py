"""Writes the tables of docs/evidence.md, and draws its figures, from the JSON files.

    python examples/paper/report.py          # after the experiments
    python examples/paper/report.py --check  # fails if the page is not up to date

The page is prose with places for tables, `<!-- table: NAME I -->` … `<!-- end -->`:
table number I of the script that wrote NAME.json. What made a file stands at
`<!-- source: NAME -->`. The picture of the attack is the only one that is not drawn
anew: it shows images, which are not in the JSON.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attack
import common
import matplotlib.pyplot as plt
import moments
import synthetic
import tuned
from common import Table

DOCS = Path(__file__).resolve().parents[2] / "docs"
TABLES: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "synthetic": synthetic.tables,
    "synthetic_long": synthetic.tables,
    "moments": moments.tables,
    "attack": attack.tables,
    "tuned": tuned.tables,
}
FIGURES: dict[str, Callable[[dict[str, Any]], plt.Figure]] = {
    "synthetic": synthetic.plot,
    "synthetic_long": synthetic.plot,
    "moments": moments.plot,
    "tuned": tuned.plot,
}
_PLACE = re.compile(
    r"(<!-- (table|source|total):? ?(\w*) ?(\d*) -->\n).*?(<!-- end -->)", re.DOTALL
)


def source(content: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in content["versions"].items())
    return (
        f"`{content['command']}` ({content['date']}, {content['device']}, {versions}; "
        f"{content['seconds'] / 60:.1f} minutes)"
    )


def total(evidence: Path) -> str:
    seconds = sum(common.read(evidence / f"{name}.json")["seconds"] for name in TABLES)
    return f"All of them together took {seconds / 60:.0f} minutes."


def render(page: str, evidence: Path) -> str:
    """The page, with every place filled from the JSON files of a folder."""

    def fill(match: re.Match[str]) -> str:
        head, kind, name, number, end = match.groups()
        if kind == "total":
            return f"{head}{total(evidence)}\n{end}"
        content = common.read(evidence / f"{name}.json")
        if kind == "source":
            return f"{head}{source(content)}\n{end}"
        table = TABLES[name](content)[int(number)]
        return f"{head}\n{table.caption}.\n\n{table.format('github')}\n\n{end}"

    return _PLACE.sub(fill, page)


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    path = DOCS / "evidence.md"
    page = path.read_text(encoding="utf-8")
    rendered = render(page, DOCS / "evidence")
    if args.check:
        if rendered != page:
            parser.exit(1, f"{path} is not up to date: run examples/paper/report.py\n")
        return
    path.write_text(rendered, encoding="utf-8")
    for name, plot in FIGURES.items():
        content = common.read(DOCS / "evidence" / f"{name}.json")
        common.save(plot(content), DOCS / "evidence" / f"{name}.png")


if __name__ == "__main__":
    main()
