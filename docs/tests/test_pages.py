"""Pages have titles of their own, stay short, and say how they were measured."""

import importlib.util
import pathlib
import re
import unicodedata

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
RECORDS = ROOT / "examples" / "research" / "records"
PAGES = sorted({*DOCS.rglob("*.md")} - {*(DOCS / "scripts").glob("*.md")})
RESEARCH = sorted((DOCS / "research").glob("*.md"))
NOTES = sorted(RECORDS.rglob("*.md"))
MEASURED = "<summary>How the figures were measured</summary>"
TABLE = re.compile(r"^<!-- table: (\S+)", re.MULTILINE)


def relative(page):
    return page.relative_to(ROOT).as_posix()


def anchors(text):
    """Ids of the headings of a page, as Python-Markdown makes them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    given = re.findall(r"\{ ?#([\w-]+)|id=\"([\w-]+)\"", text)
    ids = {name for names in given for name in names if name}
    tabs = re.findall(r'^=== "', text, re.MULTILINE)
    ids |= {f"__tabbed_1_{number}" for number, _ in enumerate(tabs, 1)}
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        heading = re.sub(r"\]\([^)]*\)|\{.*\}", "", heading)
        ascii_only = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore")
        word = re.sub(r"[^\w\s-]", "", ascii_only.decode()).strip().lower()
        ids.add(re.sub(r"[-\s]+", "-", word))
    return ids


@pytest.fixture(scope="module")
def words():
    pytest.importorskip("yaml")
    path = DOCS / "scripts" / "words.py"
    spec = importlib.util.spec_from_file_location("words", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Figures of several panels, which dark pages show inverted, and small screens scrolled.
SCROLLED = {"attack", "fit", "llm", "memory_tpu", "quickstart", "reviews", "synthetic"}
SCROLLED |= {"tuned"}
PHOTOGRAPHS = {"mujoco_rollout"}


def without_twin(pages):
    """Figures without a twin for dark pages, or with letters too small for a phone."""
    for page in pages:
        for path in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text("utf-8")):
            name, light, _ = path.partition("_light.png")
            if not light and pathlib.PurePath(path).stem in SCROLLED | PHOTOGRAPHS:
                continue
            twins = ["_light", "_dark"]
            if "card_" not in name and "_narrow" not in name:
                twins += ["_narrow_light", "_narrow_dark"]
            stem = page.parent / name
            if not all(stem.with_name(f"{stem.name}{x}.png").exists() for x in twins):
                yield path


def test_figures_have_twins_for_dark_pages_and_small_screens():
    assert list(without_twin(PAGES)) == []


def test_a_figure_without_a_twin_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("![a](plot.png) ![b](b_light.png) ![c](card_c_light.png)")
    for name in ("plot", "b_light", "b_dark", "b_narrow_light", "card_c_light"):
        (tmp_path / f"{name}.png").touch()
    assert list(without_twin([page])) == ["plot.png", "b_light.png", "card_c_light.png"]


def test_pages_have_titles_of_their_own():
    pages = PAGES + NOTES
    titles = [page.read_text(encoding="utf-8").partition("\n")[0] for page in pages]
    assert all(title.startswith("# ") for title in titles)
    assert len(set(titles)) == len(titles)


def test_research_is_three_pages():
    names = ["memory_and_speed.md", "optimizers.md", "paper.md"]
    assert [page.name for page in RESEARCH] == names


def test_pages_are_short(words):
    limits = {page: 2500 for page in PAGES} | {page: 1800 for page in RESEARCH}
    limits |= {ROOT / "README.md": 700, DOCS / "design.md": 1800}
    for page, limit in limits.items():
        found = words.words(page)
        assert found <= limit, f"{relative(page)} has {found} words"


def test_research_is_a_fifth_of_the_words_of_the_site(words):
    counts = words.counts(DOCS)
    groups = ["Home", "Learn", "Guides", "Reference", "Explanation", "Research"]
    assert list(counts) == groups and min(counts.values()) > 0
    assert counts["Research"] <= 0.2 * sum(counts.values())


def test_every_page_is_in_the_navigation(words):
    yaml = pytest.importorskip("yaml")
    text = (DOCS / "mkdocs.yml").read_text(encoding="utf-8")
    listed = [
        page
        for group in yaml.safe_load(text)["nav"]
        for items in group.values()
        for page in words.pages(items)
    ]
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def test_the_page_of_scripts_names_each():
    scripts = DOCS / "scripts"
    rows = re.findall(r"^\| `(\w+\.py)`", (scripts / "README.md").read_text(), re.M)
    assert sorted(rows) == sorted(path.name for path in scripts.glob("*.py"))


@pytest.mark.parametrize("page", PAGES + NOTES, ids=relative)
def test_a_page_with_tables_of_records_says_once_how_they_were_measured(page):
    text = page.read_text(encoding="utf-8")
    records = TABLE.findall(text)
    assert text.count(MEASURED) == bool(records)
    provenance = text.partition(MEASURED)[2]
    for record in records:
        folder = record.rpartition("/")[0]
        assert (
            pathlib.PurePath(record).name in provenance or f"`{folder}`" in provenance
        )


@pytest.mark.parametrize("page", RESEARCH, ids=relative)
def test_research_begins_with_its_conclusions(page):
    """A list of them comes before the first section and the first table."""
    start = re.split(r"^## |^<!-- table", page.read_text(encoding="utf-8"), flags=re.M)[
        0
    ]
    assert len(re.findall(r"^- \*\*", start, re.MULTILINE)) >= 4


@pytest.mark.parametrize("page", PAGES + NOTES, ids=relative)
def test_names_in_tables_are_words(page):
    """Identifiers stand in code, or are the names of packages and their methods."""
    rows = re.findall(r"^\|.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for row in rows:
        text = re.sub(r"`[^`]*`|\]\(\S*\)|radazo_jax|Open_ES", "", row)
        assert not re.search(r"[a-z]_[a-z]", text), row


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_to_headings_find_them(page):
    """Pages of the reference get ids from docstrings: the built site tests those."""
    text = page.read_text(encoding="utf-8")
    for path, anchor in re.findall(r"\]\(([\w./-]*)#([^)\s]+)\)", text):
        target = (page.parent / path).resolve() if path else page
        if target.suffix == ".md" and DOCS / "api" not in target.parents:
            assert anchor in anchors(target.read_text(encoding="utf-8")), anchor
