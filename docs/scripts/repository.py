"""Links to the repository: its own, and links to files that are not on the site.

The address is `repo_url` of `mkdocs.yml`, or `REPOSITORY_URL` in the environment. With
it, each page links to the repository, and files that are not on the site open there.
Without it, the site shows the path of such a file instead.
"""

import os
import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s:#]+)(?:#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the address of the repository; MkDocs calls this once."""
    config.repo_url = os.environ.get("REPOSITORY_URL") or config.repo_url
    if config.repo_url:
        config.repo_name = config.site_name
    return config


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, **kwargs: object
) -> str:
    """Names files that are not on the site; MkDocs calls this for each page."""
    del kwargs
    folder = pathlib.Path(page.file.abs_src_path or ROOT / "docs").resolve().parent
    address = (config.repo_url or "").rstrip("/")
    return LINK.sub(lambda link: _named(link, folder, address), markdown)


def _named(link: re.Match[str], folder: pathlib.Path, address: str) -> str:
    """The link, or one to the repository, or the path in code."""
    path = (folder / link["target"]).resolve()
    if not path.is_relative_to(ROOT) or not path.exists():
        return link[0]
    if path.is_relative_to(ROOT / "docs") and path.suffix not in (".json", ".py"):
        return link[0]
    name = path.relative_to(ROOT).as_posix()
    return f"[{link['text']}]({address}/blob/HEAD/{name})" if address else f"`{name}`"
