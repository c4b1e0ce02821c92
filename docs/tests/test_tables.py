"""The tables of pages are those that the commands of their projects make of records."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NOTES = "examples/research/records"
LANGUAGE_MODELS = "examples/llm/research/records"
# A mark, in a table's the name of a record, and what the command writes after it.
MARK = re.compile(
    r"^(<!-- (?:table: (\S+)[^>]*|sources )-->\n).*?(?=^<!-- end -->$)",
    re.MULTILINE | re.DOTALL,
)


def records(page):
    """The records that a page names, from the page or from the root."""
    for _, name in MARK.findall(page.read_text(encoding="utf-8")):
        if not name:
            continue
        found = [folder / name for folder in (page.parent, ROOT)]
        yield next((path.resolve() for path in found if path.is_file()), name)


def of_language_models(page):
    folder = ROOT / LANGUAGE_MODELS
    return all(folder in pathlib.Path(path).parents for path in records(page))


PAGES = [
    page
    for folder in ("docs", NOTES, LANGUAGE_MODELS)
    for page in sorted((ROOT / folder).rglob("*.md"))
    if list(records(page))
]
# Folder of a project -> the module that fills in tables, and a package that it needs.
PROJECTS = {
    "examples/research": ("common.tables", "sklearn"),
    "examples/llm": ("research.tables", "gguf"),
}


def project(page):
    return "examples/llm" if of_language_models(page) else "examples/research"


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A function from a project to copies of its pages, with tables filled in anew."""
    copies = {}

    def fill(name):
        module, needed = PROJECTS[name]
        pytest.importorskip(needed, reason=f"{name} is not installed: no {needed}")
        if name not in copies:
            copies[name] = tmp_path_factory.mktemp("pages")
            _fill(name, module, copies[name])
        return copies[name]

    return fill


def _fill(name, module, target):
    """Empties the tables of copies, and runs the command that fills them in."""
    for folder in ("docs", NOTES, LANGUAGE_MODELS):
        skipped = shutil.ignore_patterns("*.png", "*.py", "__pycache__")
        shutil.copytree(ROOT / folder, target / folder, ignore=skipped)
    pages = [target / page.relative_to(ROOT) for page in PAGES if project(page) == name]
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        page.write_text(MARK.sub(r"\1", text), encoding="utf-8")
    command = [sys.executable, "-m", module, *map(str, pages)]
    done = subprocess.run(command, cwd=ROOT / name, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_those_of_their_records(filled, page):
    copy = filled(project(page)) / page.relative_to(ROOT)
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_tables_of_all_kinds_of_pages_are_compared():
    found = {page.relative_to(ROOT).parts[:2] for page in PAGES}
    assert {("docs", "research"), ("docs", "guides"), ("examples", "research")} <= found
    assert len(PAGES) >= 10
