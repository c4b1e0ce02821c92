"""Sentences of the pages that the code can contradict."""

import doctest
import inspect
import json
import pathlib
import re

import pytest

import radazo_jax as zo

ROOT = pathlib.Path(__file__).parents[2]
RECORDS = ROOT / "examples" / "llm" / "research" / "records"
# GiB of an H100 with 80 GB that a program may use.
LIMIT = 0.95 * 80


def rows(page):
    """The rows of all tables of a page: lists of cells."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in found]


def test_contributing_lists_every_module():
    package = ROOT / "radazo_jax"
    modules = {
        path.relative_to(ROOT).as_posix().removeprefix("radazo_jax/_src/")
        for path in package.rglob("*.py")
        if path.name != "__init__.py" or path.parent == package
    }
    cells = [row[0] for row in rows("CONTRIBUTING.md")]
    listed = [cell.strip("`") for cell in cells if cell.endswith(".py`")]
    assert sorted(listed) == sorted(modules)


def test_contributing_shows_an_error_that_the_code_raises():
    results = doctest.testfile(
        str(ROOT / "CONTRIBUTING.md"),
        module_relative=False,
        globs={"zo": zo},
        optionflags=doctest.ELLIPSIS,
    )
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize("make", [zo.forward_difference, zo.central_difference])
def test_guide_says_which_distribution_is_the_default(make):
    default = inspect.signature(make).parameters["distribution"].default
    distributions = {"sphere", "gaussian", "rademacher", "low_rank", "coordinate"}
    table = {
        row[0].strip("`()"): " ".join(row[1:])
        for row in rows("docs/guides/settings.md")
        if row[0].strip("`()") in distributions
    }
    assert set(table) == distributions
    named = [
        distribution
        for distribution, text in table.items()
        if re.search(r"\bdefault\b", text)
    ]
    assert [getattr(zo, distribution)() for distribution in named] == [default]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_picture_shows_the_memory_that_the_text_says(page):
    record = json.loads((RECORDS / "llm_memory_gpu.json").read_bytes())
    sizes = {
        (row["method"], row["tuned"]): row["total_GiB"]
        for row in record["rows"]
        if (row["device"], row["size"]) == ("h100", "13b")
    }
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    said = float(re.search(r"at most ([\d.]+) times the memory of", text)[1])
    inference, largest = sizes["forward", ""], sizes["adam, remat", "full"]
    for case in (("radazo", "lora"), ("zo_sgd", "full")):
        assert sizes[case] / inference <= said
    assert f"inference {inference:.1f} GiB" in text
    assert f"Adam {largest:.1f} GiB" in text
    assert min(sizes["radazo", "full"], largest) > LIMIT
