"""A page for each public name, and tables that link to them.

A page in `docs/api` lists names as lines `::: radazo_jax.name`. The site shows lines
that follow one another as a table of summaries. Each name has a page with its
docstring, next to the page that lists it in the navigation.
"""

import functools
import pathlib
import re
from typing import Any

import griffe
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FOLDER = "api/"
NAME = re.compile(r"^::: radazo_jax\.([\w.]+)$", re.MULTILINE)
NAMES = re.compile(r"(?:^::: radazo_jax\.[\w.]+\n*)+", re.MULTILINE)
PAGE = """---
title: {name}
---

::: radazo_jax.{name}
    options:
      heading: {name}
      heading_level: 1
"""


def on_config(config: Any) -> Any:
    """Adds the pages of names to the navigation; MkDocs calls this once."""
    (reference,) = (item for item in config.nav if "Reference" in item)
    reference["Reference"] = [
        _with_names(item, pathlib.Path(config.docs_dir))
        for item in reference["Reference"]
    ]
    return config


def _with_names(item: Any, docs: pathlib.Path) -> Any:
    if isinstance(item, str):
        return item
    ((title, page),) = item.items()
    names = NAME.findall((docs / page).read_text(encoding="utf-8"))
    return {title: [page, *(f"{FOLDER}{name}.md" for name in names)] if names else page}


def on_files(files: Files, config: Any) -> Files:
    """Makes a page for each name; MkDocs calls this once."""
    for file in files.documentation_pages():
        if file.src_uri.startswith(FOLDER):
            for name in NAME.findall(file.content_string):
                content = PAGE.format(name=name)
                files.append(
                    File.generated(config, f"{FOLDER}{name}.md", content=content)
                )
    return files


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Makes tables of the names; MkDocs calls this for each page."""
    del kwargs
    if page.file.generated_by or not page.file.src_uri.startswith(FOLDER):
        return markdown
    return NAMES.sub(_table, markdown)


def _table(lines: re.Match[str]) -> str:
    rows = ["| Name | Summary |", "|---|---|"]
    for name in NAME.findall(lines[0]):
        docstring = _package()[name].docstring
        summary = " ".join(docstring.value.split("\n\n")[0].split())
        # A long name may break between its words on a narrow screen.
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[._])", "<wbr>", name)
        shown = words.replace("_", r"\_")
        # The identifier keeps links to the name on this page.
        link = f"[<code>{shown}</code>]({name}.md){{#radazo_jax.{name}}}"
        rows.append(f"| {link} | {summary.replace('|', '&#124;')} |")
    return "\n".join(rows) + "\n\n"


@functools.cache
def _package() -> griffe.Object | griffe.Alias:
    root = pathlib.Path(__file__).parents[2]
    return griffe.load("radazo_jax", search_paths=[root])
