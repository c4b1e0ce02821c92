"""The order of what the search finds: guides first, results of experiments last."""

from typing import Any

from mkdocs.structure.pages import Page

BOOSTS = {
    "guides/": 2.0,
    "recipes/": 2.0,
    "faq.md": 2.0,
    "api/minimize.md": 4.0,
    "research/": 0.5,
}


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Sets the weight of a page in the search; MkDocs calls this for each page."""
    del kwargs
    for path, boost in BOOSTS.items():
        if page.file.src_uri.startswith(path):
            page.meta["search"] = {"boost": boost}
    return markdown
