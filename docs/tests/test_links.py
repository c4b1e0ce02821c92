"""Links between Markdown files of the repository, and paths that they name in code.

Links between pages of the site are checked where it is built.
"""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    page
    for folder in ("", "docs", "examples")
    for page in ((ROOT / folder).rglob("*.md") if folder else ROOT.glob("*.md"))
    if page.name != "CHANGELOG.md"
)
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(
    r"\]\((?!https?:|mailto:)(?P<path>[^)\s#]*)(?:#(?P<anchor>[^)\s]*))?\)"
)
PATH = re.compile(r"`((?:docs|examples|radazo_jax|tests|\.ci)/[\w./-]+)`")


def relative(page):
    return page.relative_to(ROOT).as_posix()


def prose(page):
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """The anchors of a page's headings, as renderers of Markdown make them."""
    headings = re.findall(r"^#+ (.*?)(?: *\{#.*\})?$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {re.sub(r" +", "-", heading.strip()) for heading in plain}


def broken(page):
    """The links of a page that lead nowhere; on the site, only those that leave it."""
    for match in LINK.finditer(prose(page)):
        target = (page.parent / match["path"]).resolve() if match["path"] else page
        if DOCS in page.parents and DOCS in target.parents:
            continue
        anchor = match["anchor"]
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            yield match[0]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page):
    assert list(broken(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_paths_named_in_code_exist(page):
    # A folder `out` is made by the programs that write to it.
    named = {path for path in PATH.findall(prose(page)) if not path.endswith("/out/")}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "there.md").write_text("# A heading, `code` too\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md#a-heading-code-too) [b](there.md#other) [c](gone.md) [d](#no)\n"
        "```text\n[e](gone.md)\n```\n",
        encoding="utf-8",
    )
    assert list(broken(page)) == ["](there.md#other)", "](gone.md)", "](#no)"]
