"""Links from the first use of a term on a page to its entry in the glossary.

`TERMS` lists the terms that a reader of JAX and Optax cannot know, by the headings of
their entries. They are linked in running text, on the pages that newcomers read: not in
headings, code and tables. The build fails if a term has no entry.
"""

import collections
import html
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from markdown.extensions.toc import slugify
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

GLOSSARY = "glossary.md"
GROUPS = ("Learn", "Guides")
# More links on a page would be noise.
LIMIT = 6
TERMS = {
    "Adapter": r"adapters?",
    "Antithetic pair": r"antithetic\s+pairs?",
    "Ask and tell": r"ask\s+and\s+tell",
    "Black box": r"black\s+box(?:es)?",
    "CMA-ES": r"CMA(?:-ES)?",
    "Default method": r"default\s+method",
    "Direction (u)": r"directions?",
    "Distribution": r"distributions?",
    "Estimator": r"estimators?",
    "Evaluator": r"evaluators?",
    "Evolution strategy": r"evolution\s+strateg(?:y|ies)",
    "Forward and central differences": r"(?:forward|central)\s+differences?",
    "Journal": r"journals?",
    "Low rank": r"low[\s-]rank",
    "Perturbation": r"perturb(?:ations?|ed)",
    "Population": r"populations?",
    "R-AdaZO": r"R-AdaZO",
    "Replay": r"replay(?:s|ed)?",
    "Shaping": r"shaping",
    "Skipped step": r"skipped",
    "Smoothing (μ, `smoothing`)": r"smoothing",
    "Stage": r"stages?",
    "Zeroth-order": r"zeroth-order",
}
# A sentence may begin with a term. The words of a title are not uses of it.
PATTERNS = {
    term: re.compile(rf"(?<![\w-])(?i:{pattern[0]}){pattern[1:]}(?![\w-])")
    for term, pattern in TERMS.items()
}
ENTRY = re.compile(r"^## (?P<term>.+)\n\n(?P<text>(?:.+\n)+)", re.MULTILINE)
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<page>[^)#]+)[^)]*\)")
TAG = re.compile(r"""(<!--.*?-->|<(?:[^<>"']|"[^"]*"|'[^']*')+>)""", re.DOTALL)
NAME = re.compile(r"<(?P<close>/?)(?P<name>\w+)")
RUNNING = {"li", "p"}
OTHER = {"code", "label", "math", "pre", "summary", "table"}
OTHER |= {f"h{level}" for level in range(1, 7)}


class Entry(NamedTuple):
    """The definition of a term, as text, and the pages to which it links."""

    definition: str
    pages: set[str]


def on_page_content(content: str, page: Page, files: Files, **kwargs: Any) -> str:
    """Links the terms of a page; MkDocs calls this for each page."""
    del kwargs
    group = page.ancestors[-1].title if page.ancestors else None
    if not page.is_homepage and group not in GROUPS:
        return content
    glossary = files.get_file_from_path(GLOSSARY)
    assert glossary is not None
    found = entries(glossary.content_string)
    # The page that explains a term does not send its reader away.
    new = {t: found[t] for t in TERMS if page.file.src_uri not in found[t].pages}
    return linked(content, new, glossary.url_relative_to(page.file))


def entries(glossary: str) -> dict[str, Entry]:
    """The entries of the glossary, by their headings."""
    found = {}
    for entry in ENTRY.finditer(glossary):
        text = " ".join(entry["text"].split())
        pages = {link["page"] for link in LINK.finditer(text)}
        text = re.sub(rf": {LINK.pattern}\.$", ".", text)
        text = re.sub(r"[`*]", "", LINK.sub(r"\g<text>", text))
        found[entry["term"]] = Entry(text, pages)
    return found


def linked(content: str, new: dict[str, Entry], glossary: str) -> str:
    """HTML in which the first use of each new term is a link, up to `LIMIT` of them."""
    shown, waiting, count = [], dict(new), 0
    for kind, part in _parts(content):
        found = [(PATTERNS[term].search(part), term) for term in waiting]
        uses = sorted((use.span(), term) for use, term in found if use)
        done = 0
        for (start, end), term in uses:
            if kind == "link":  # The author has chosen what explains the term.
                del waiting[term]
            if kind == "text" and count < LIMIT and start >= done:
                link = _link(part[start:end], term, waiting.pop(term), glossary)
                shown += [part[done:start], link]
                done, count = end, count + 1
        shown.append(part[done:])
    return "".join(shown)


def _parts(content: str) -> Iterator[tuple[str, str]]:
    """The tags and texts of HTML: `text` is running text, `link` is inside a link."""
    inside: collections.Counter[str] = collections.Counter()
    for part in TAG.split(content):
        tag = NAME.match(part)
        if tag:
            inside[tag["name"]] += -1 if tag["close"] else 1
            yield "tag", part
        elif any(inside[name] for name in OTHER):
            yield "other", part
        elif inside["a"]:
            yield "link", part
        else:
            running = any(inside[name] for name in RUNNING)
            yield ("text" if running else "other"), part


def _link(use: str, term: str, entry: Entry, glossary: str) -> str:
    target = html.escape(f"{glossary}#{slugify(term, '-')}")
    title = html.escape(entry.definition)
    return f'<a class="term" href="{target}" title="{title}">{use}</a>'
