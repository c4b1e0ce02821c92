"""Sentences of the pages that the code can contradict."""

import doctest
import inspect
import json
import pathlib
import re

import pytest

import radazo_jax as zo

ROOT = pathlib.Path(__file__).parents[2]
DECODERS = ROOT / "examples/llm/research/records/llm_memory_gpu.json"
REPLAYED = ROOT / "examples/research/records/benchmarks/all_parameters_gpu.json"


def rows(page):
    """The rows of all tables of a page: lists of cells."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in found]


def test_contributing_draws_every_folder_in_the_order_of_imports():
    picture = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("```")[3]
    drawn = re.findall(r"[├└]── (\w+)/ ", picture)
    source = ROOT / "radazo_jax/_src"
    folders = {path.parent.name for path in source.glob("*/__init__.py")}
    text = (ROOT / "tests/api/test_public_api.py").read_text(encoding="utf-8")
    order = re.findall(
        r'"(\w+)"', re.search(r"^ORDER = (.*?)^\)", text, re.M | re.S)[1]
    )
    assert drawn == [name for name in order if name in folders]
    assert set(drawn) == folders


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
def test_a_page_says_the_memory_of_the_records(page):
    """Text and picture give the memory in multiples of inference."""
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    replayed = memory(
        REPLAYED, "memory/forward", size="13B", method="R-AdaZO, replayed"
    )
    adam = memory(DECODERS, "total/forward", method="adam, remat", tuned="full")
    said = [f"{ratio:.2f}" for ratio in (replayed, adam)]
    found = re.findall(r"R-AdaZO\D*(\d\.\d\d)\D*Adam\D*(\d\.\d\d)", text)
    adapters = [
        f"{memory(DECODERS, 'total/forward', method=method, tuned='lora'):.2f}"
        for method in ("radazo", "adam, remat")
    ]
    assert tuple(said) in found and set(found) <= {tuple(said), tuple(adapters)}


def memory(record, ratio, **case):
    case = {"device": "h100", "size": "13b"} | case
    rows = json.loads(record.read_bytes())["rows"]
    (row,) = (row for row in rows if case.items() <= row.items())
    return row[ratio]
