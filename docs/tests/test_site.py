"""The built site, as HTML: what a reader sees of the docstrings and the tables.

`pip install -e ".[docs]"` installs what this needs; `.ci/run` does. Without it the
tests are skipped.
"""

import doctest
import functools
import html
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import pytest

import radazo_jax
import radazo_jax.nnx

NEEDED = "mkdocs material mkdocstrings bs4 latex2mathml mike mkdocs_glightbox nbclient"
for module in NEEDED.split():
    pytest.importorskip(module, reason=f"the docs extra is not installed: no {module}")

ROOT = pathlib.Path(__file__).parents[2]
MODULES = {
    "": radazo_jax,
    "contrib.": radazo_jax.contrib,
    "distributions.": radazo_jax.distributions,
    "estimators.": radazo_jax.estimators,
    "nnx.": radazo_jax.nnx,
    "random.": radazo_jax.random,
    "runs.": radazo_jax.runs,
    "shaping.": radazo_jax.shaping,
    "transforms.": radazo_jax.transforms,
}
# Names that a submodule shares with `radazo_jax` are documented there.
NAMES = [
    prefix + name
    for prefix, module in MODULES.items()
    for name in module.__all__
    if not prefix or name not in radazo_jax.__all__ or prefix == "nnx."
]


def public(name):
    return functools.reduce(getattr, name.split("."), radazo_jax)


# A constant has none; it is documented at its definition.
DOCUMENTED = {name: inspect.getdoc(public(name)) or "" for name in NAMES}
WITH_EXAMPLE = [name for name, doc in DOCUMENTED.items() if ">>>" in doc]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
WIDTH = 1400


def build(target, notebooks):
    """Builds the site; its notebooks take a minute."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    subprocess.run(
        [*build, "-f", "docs/mkdocs.yml", "--site-dir", str(target)],
        cwd=ROOT,
        check=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "NOTEBOOKS": notebooks},
    )
    return target


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("site"), "no")


@pytest.fixture(scope="session")
def pages(site):
    """Path -> the parsed article of the page."""
    from bs4 import BeautifulSoup

    found = {}
    for path in sorted(site.rglob("index.html")):
        soup = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        found[path] = soup.find("article")
    assert len(found) > 10
    return found


@pytest.fixture(scope="session")
def objects(pages):
    """Public name -> what the site shows of it."""
    headings = {
        heading["id"].removeprefix("radazo_jax."): heading
        for article in pages.values()
        for heading in article.select(".doc-heading[id]")
    }
    return {name: headings[name].find_parent(class_="doc-object") for name in NAMES}


def words(text):
    """The words of a text, without Markdown's marks."""
    return re.sub(r"[`*\\]", "", text).split()


def section(doc, name):
    """The text of a section of a docstring, or None."""
    found = re.search(rf"^{name}:\n((?: .*\n?|\n)+)", doc, re.MULTILINE)
    return found and inspect.cleandoc(found[1])


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_example_is_a_code_block_line_by_line(objects, name):
    shown = [pre.get_text().splitlines() for pre in objects[name].select("pre")]
    shown = [line.rstrip() for lines in shown for line in lines]
    for example in doctest.DocTestParser().get_examples(DOCUMENTED[name]):
        # The site does not show the directives of doctest.
        source = re.sub(r" *# doctest:.*$", "", example.source, flags=re.MULTILINE)
        first, *rest = source.splitlines()
        lines = [f">>> {first}", *(f"... {line}".rstrip() for line in rest)]
        lines += example.want.splitlines()
        start = shown.index(lines[0])
        assert shown[start : start + len(lines)] == lines


@pytest.mark.parametrize("name", NAMES)
def test_result_is_one_text(objects, name):
    expected = section(DOCUMENTED[name], "Returns")
    titles = objects[name].select(".doc-section-title")
    lists = [t.find_next("ul") for t in titles if "Returns" in t.get_text()]
    # The section of a class contains the lists of its methods.
    lists = [x for x in lists if x.find_parent(class_="doc-object") is objects[name]]
    if expected is None:
        assert not lists
        return
    (items,) = lists
    (item,) = items.find_all("li")
    shown = " ".join(item.get_text().split())
    assert words(shown)[-len(words(expected)) :] == words(expected)


def test_a_name_has_a_page_and_a_row_of_a_table(site, pages, objects):
    """The row has the identifier of the name, to which other pages may link."""
    rows = {}
    for path, article in pages.items():
        for link in article.select("table a[id^='radazo_jax.']"):
            rows[link["id"].removeprefix("radazo_jax.")] = (path, link)
    assert set(NAMES) <= set(rows)
    for name in NAMES:
        path, link = rows[name]
        page = (path.parent / link["href"] / "index.html").resolve()
        assert page == site / "api" / name / "index.html"
        heading = pages[page].find("h1")
        assert heading["id"] == f"radazo_jax.{name}"
        assert heading.find_parent(class_="doc-object") is objects[name]
        # The summary in the table is the first sentence of the page.
        summary = " ".join(DOCUMENTED[name].split("\n\n")[0].split())
        cell = " ".join(link.find_parent("tr").find_all("td")[1].get_text().split())
        assert words(cell) == words(summary)


def test_nothing_is_quoted_or_run_together(pages):
    for path, article in pages.items():
        assert not article.select("blockquote blockquote"), path
        if "api" in path.parts:
            assert not article.select("blockquote"), path
        for code in article.select("pre, code"):
            code.extract()
        text = article.get_text()
        # Prompts outside of code, and marks that are not Markdown's.
        for mark in (">>>", "``", "`_", "`", "::: "):
            assert mark not in text, (path, mark)


def hook(name):
    """A module of `docs/scripts`, as MkDocs loads it."""
    path = ROOT / f"docs/scripts/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("address", ["", "https://example.org/radazo_jax/"])
def test_links_to_files_that_are_not_on_the_site(monkeypatch, address):
    """They lead to the repository if its address is known, and else name the file."""
    repository = hook("repository")
    monkeypatch.setenv("REPOSITORY_URL", address)
    config = repository.on_config(
        types.SimpleNamespace(repo_url="", site_name="radazo_jax")
    )
    file = types.SimpleNamespace(abs_src_path=str(ROOT / "docs/faq.md"))
    text = "[runs](../CHANGELOG.md) [pages](index.md)"
    page = types.SimpleNamespace(file=file)
    shown = "`CHANGELOG.md`"
    if address:
        assert config.repo_name == "radazo_jax"
        shown = f"[runs]({address}blob/HEAD/CHANGELOG.md)"
    shown += " [pages](index.md)"
    assert repository.on_page_markdown(text, page, config) == shown


def test_a_site_that_mike_deploys_has_a_list_of_versions(monkeypatch):
    """Other builds have none: a page that looked for it would report an error."""
    from mike.mkdocs_utils import docs_version_var

    version = hook("version")
    monkeypatch.delenv(docs_version_var, raising=False)
    assert version.on_config(types.SimpleNamespace(extra={})).extra == {}
    monkeypatch.setenv(docs_version_var, "0.1.0")
    extra = version.on_config(types.SimpleNamespace(extra={})).extra
    assert extra == {"version": {"provider": "mike"}}


# HTML -> the terms that become links, as they stand there.
LINKED = {
    "<p>An estimator, two estimators, a Journal.</p>": ["estimator", "Journal"],
    "<ul><li>the default\nmethod</li></ul>": ["default\nmethod"],
    "<p>a low-rank direction</p>": ["low-rank", "direction"],
    "<p>an estimation, a GradientEstimator, *Zeroth-Order Optimization*</p>": [],
    "<h2>Journals</h2><p>text</p><p>a journal</p>": ["journal"],
    "<pre>journal</pre><p><code>journal</code></p>": [],
    "<table><tr><td><p>journal</p></td></tr></table>": [],
    "<div>journal</div>": [],
    '<p><img alt="a > journal"> <em>journals</em></p>': ["journals"],
    '<p><a href="x">journals</a> and a journal</p>': [],
    "<p>adapter, journal, stage, shaping, evaluator, estimator, population</p>": [
        "adapter",
        "journal",
        "stage",
        "shaping",
        "evaluator",
        "estimator",
    ],
}


@pytest.mark.parametrize("content", LINKED)
def test_first_uses_of_terms_become_links(content):
    terms = hook("terms")
    glossary = terms.entries((ROOT / "docs" / terms.GLOSSARY).read_text("utf-8"))
    new = {term: glossary[term] for term in terms.TERMS}
    shown = terms.linked(content, new, "../glossary/")
    link = re.compile(r'<a class="term"[^>]*>(.*?)</a>', re.DOTALL)
    assert link.findall(shown) == LINKED[content]
    assert link.sub(r"\1", shown) == content


def test_pages_for_newcomers_link_to_the_glossary(site, pages):
    """Links find an entry, once on a page, and other pages have none."""
    glossary = pages[site / "glossary" / "index.html"]
    definitions = {heading["id"]: heading for heading in glossary.select("h2[id]")}
    numbers, used = {}, set()
    for path, article in pages.items():
        links = article.select("a.term")
        targets = [link["href"].partition("#") for link in links]
        for place, _, term in targets:
            assert (path.parent / place / "index.html").resolve() == (
                site / "glossary" / "index.html"
            )
            assert term in definitions
        assert len({term for *_, term in targets}) == len(links)
        numbers[path.parent.relative_to(site).as_posix()] = len(links)
        used |= {term for *_, term in targets}
    assert max(numbers.values()) == hook("terms").LIMIT
    assert numbers["."] and numbers["faq"] and numbers["recipes/freeze"]
    assert not numbers["methods"] and not numbers["api/minimize"]
    assert len(used) > 15, used


def test_formulas_are_typeset(site):
    """They are MathML, which needs no script and no font of another host."""
    source = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    shown = (site / "methods" / "index.html").read_text(encoding="utf-8")
    formulas = re.findall(r"<math .*?</math>", shown, re.DOTALL)
    assert len(formulas) == source.count("```math") > 10
    for formula in formulas:
        assert "\\" not in html.unescape(formula), formula


MEASURE = """<script>addEventListener("load", () => {
  const wide = [...document.querySelectorAll("article table")].map(table => {
    const around = table.closest(".md-typeset__scrollwrap") || table.parentElement;
    return [table, around].some(x => x.scrollWidth > x.clientWidth + 1)
      ? table.querySelector("tr").innerText : "";
  });
  parent.postMessage([location.pathname, innerWidth, wide], "*");
})</script></body>"""
# One browser measures all pages, each in a frame that is as wide as the window.
COLLECT = """<!doctype html><pre id="measured"></pre><script>
const found = [];
addEventListener("message", event => {
  found.push(event.data);
  document.getElementById("measured").textContent = JSON.stringify(found);
})</script>"""


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium to measure with")
def test_tables_fit_a_window_of_1400_pixels(site, tmp_path):
    frames = []
    for path in sorted(site.rglob("index.html")):
        text = path.read_text(encoding="utf-8")
        if "<table>" in text:
            measured = path.with_name("measured.html")
            measured.write_text(text.replace("</body>", MEASURE), encoding="utf-8")
            source = measured.relative_to(site).as_posix()
            frames.append(f'<iframe src="{source}" width="{WIDTH}" height="2000">')
    collect = site / "collect.html"
    collect.write_text("</iframe>".join([COLLECT, *frames]), encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path}",
        f"--window-size={WIDTH},2000",
        "--virtual-time-budget=10000",
        "--dump-dom",
    ]
    dumped = subprocess.run(
        [BROWSER, *options, collect.as_uri()],
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
    ).stdout
    found = re.search(r'<pre id="measured">(.*?)</pre>', dumped, re.DOTALL)
    pages = json.loads(html.unescape(found[1]))
    assert len({page for page, _, _ in pages}) == len(frames)
    for page, width, wide in pages:
        assert width == WIDTH
        assert not any(wide), (page, wide)
    assert sum(len(wide) for _, _, wide in pages) > 40
