"""The language of docstrings, comments and pages: patterns that the style avoids."""

import language
import pytest

# Pattern -> the most matches in each area of `language.AREAS`. Counts may only fall:
# lower a limit after you rewrite a sentence. `python .ci/language.py` prints them.
LIMITS = {
    "where": (1, 0, 0, 0),
    "that of": (0, 0, 0, 0),
    "summary": (0, 0, 0, 0),
    "field": (0, 0, 0, 0),
    "behind": (0, 0, 0, 0),
    "for": (1, 0, 0, 0),
    "is to": (0, 0, 0, 0),
    "more": (0, 0, 0, 0),
    "in place of": (0, 0, 0, 0),
    "ours": (0, 0, 0, 0),
    "of your own": (0, 0, 0, 0),
    "as described": (0, 0, 0, 0),
    "metaphor": (0, 0, 0, 0),
    "go on": (0, 0, 0, 0),
}


@pytest.fixture(scope="module")
def counts():
    return {area: language.counts(area) for area in language.AREAS}


def test_there_is_a_limit_for_each_pattern():
    assert set(LIMITS) == set(language.PATTERNS)


@pytest.mark.parametrize("name", language.PATTERNS)
def test_a_pattern_does_not_become_more_frequent(counts, name):
    for area, limit in zip(language.AREAS, LIMITS[name], strict=True):
        found = counts[area][name]
        assert found <= limit, f"{found} in {area}: python .ci/language.py FILE"


def test_prose_is_found_and_code_is_not(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""What a module does.\n\n>>> where = 1\n"""\n'
        "x = 'where'  # Where it is.\n"
        "# It goes\n# on, `where` it is.\n"
    )
    page = tmp_path / "page.md"
    page.write_text("Ours.\n\n```python\nwhere\n```\n\n| where |\n|---|\n\n    where\n")
    found = [
        line.split(": ")[1] for path in (module, page) for line in language.lines(path)
    ]
    assert sorted(found) == ["ours", "summary", "where"]
