"""Counts the words of the site's pages, by group of the navigation.

    python docs/scripts/words.py                # of this site
    python docs/scripts/words.py FOLDER [...]   # of others with a `mkdocs.yml`

Words are those of the Markdown, with tables. Docstrings, which the reference shows, are
not counted.
"""

import argparse
import pathlib
from collections.abc import Iterator
from typing import Any

import yaml

DOCS = pathlib.Path(__file__).resolve().parents[1]


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


def show(name: str, found: dict[str, int]) -> None:
    """Prints the words and the share of each group."""
    total = sum(found.values())
    print(f"{'words':>8} {'share':>7}  {name}")
    for group, count in [*found.items(), ("all", total)]:
        print(f"{count:8,} {count / total:7.1%}  {group}")


def main() -> None:
    """Prints the words of folders."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=pathlib.Path, metavar="FOLDER")
    for folder in parser.parse_args().folders or [DOCS]:
        show(str(folder), counts(folder))


if __name__ == "__main__":
    main()
