"""Counts the words of the site's pages, by group of the navigation.

    python docs/words.py                # of this folder
    python docs/words.py FOLDER [...]   # of others with a `mkdocs.yml`

Words are those of the Markdown, with tables. Docstrings, which the reference shows, are
not counted.
"""

import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import yaml


def words(page: pathlib.Path) -> int:
    """How many words a page has, with its tables."""
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


def main(folders: list[str]) -> None:
    """Prints the words and the share of each group."""
    for folder in folders or [str(pathlib.Path(__file__).parent)]:
        found = counts(pathlib.Path(folder))
        total = sum(found.values())
        print(f"{'words':>8} {'share':>7}  {folder}")
        for name, count in [*found.items(), ("all", total)]:
            print(f"{count:8,} {count / total:7.1%}  {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
