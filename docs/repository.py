"""Links to files of the repository that are not on the site.

They resolve where the pages are read in the repository. The site shows the path of the
file instead, from the root of the repository.
"""

import pathlib
import re

from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\((?P<target>[^)\s:#]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Page, **kwargs: object) -> str:
    """Names files that are not on the site; MkDocs calls this for each page."""
    del kwargs
    folder = pathlib.Path(page.file.abs_src_path or ROOT / "docs").resolve().parent
    return LINK.sub(lambda link: _named(link, folder), markdown)


def _named(link: re.Match[str], folder: pathlib.Path) -> str:
    """The link, or the path in code if its file is not on the site."""
    path = (folder / link["target"]).resolve()
    if not path.is_relative_to(ROOT) or not path.exists():
        return link[0]
    if path.is_relative_to(ROOT / "docs") and path.suffix not in (".json", ".py"):
        return link[0]
    return f"`{path.relative_to(ROOT).as_posix()}`"
