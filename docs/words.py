"""Counts the words of the site's pages, by group of the navigation.

    python docs/words.py                # of this folder
    python docs/words.py FOLDER [...]   # of others with a `mkdocs.yml`
    python docs/words.py --since REVISION

The last one writes the words then and now to `docs/records/words.json`. Words are those
of the Markdown, with tables. Docstrings, which the reference shows, are not counted.
"""

import argparse
import datetime
import io
import json
import pathlib
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from typing import Any

import yaml

DOCS = pathlib.Path(__file__).resolve().parent
RECORD = DOCS / "records" / "words.json"


def words(page: pathlib.Path) -> int:
    """The number of words of a page, with its tables."""
    return len(page.read_text(encoding="utf-8").split())


def pages(items: Any) -> Iterator[str]:
    """The paths of the pages of a part of the navigation."""
    if isinstance(items, str):
        yield items
    for item in items if isinstance(items, list) else ():
        yield from pages(next(iter(item.values())) if isinstance(item, dict) else item)


def counts(docs: pathlib.Path) -> dict[str, int]:
    """The words of each group of the navigation, by its name."""
    text = (docs / "mkdocs.yml").read_text(encoding="utf-8")
    return {
        name: sum(words(docs / page) for page in pages(items))
        for group in yaml.safe_load(text)["nav"]
        for name, items in group.items()
    }


def counts_at(revision: str) -> dict[str, int]:
    """The words of each group at a revision of the repository."""
    archive = _git("archive", revision, "docs")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as file:
            file.extractall(folder, filter="data")
        return counts(pathlib.Path(folder) / "docs")


def compared(revision: str) -> dict[str, Any]:
    """The words of each group at a revision and now, and what made the numbers."""
    then, now = counts_at(revision), counts(DOCS)
    rows = [
        {"group": group, "then": then.get(group, 0), "now": now.get(group, 0)}
        for group in dict.fromkeys([*then, *now])
    ]
    return {
        "command": f"python docs/words.py --since {revision}",
        "date": datetime.date.today().isoformat(),
        "commits": [
            _git("rev-parse", name).decode().strip() for name in (revision, "HEAD")
        ],
        "rows": rows,
    }


def _git(*arguments: str) -> bytes:
    command = ["git", "-C", str(DOCS.parent), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout


def show(name: str, found: dict[str, int]) -> None:
    """Prints the words and the share of each group."""
    total = sum(found.values())
    print(f"{'words':>8} {'share':>7}  {name}")
    for group, count in [*found.items(), ("all", total)]:
        print(f"{count:8,} {count / total:7.1%}  {group}")


def main() -> None:
    """Prints the words of folders, or of a revision and now."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--since", metavar="REVISION")
    arguments = parser.parse_args()
    if arguments.since:
        content = compared(arguments.since)
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        for name in ("then", "now"):
            show(name, {row["group"]: row[name] for row in content["rows"]})
        return
    for folder in arguments.folders or [DOCS]:
        show(str(folder), counts(folder))


if __name__ == "__main__":
    main()
