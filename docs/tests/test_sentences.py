"""Sentences of the pages that the code can contradict."""

import doctest
import inspect
import json
import math
import pathlib
import re
import statistics

import pytest

import radazo_jax as zo

ROOT = pathlib.Path(__file__).parents[2]
DECODERS = ROOT / "examples/llm/research/records/llm_memory_gpu.json"
BOARD = ROOT / "examples/research/records/board"
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
    text = (ROOT / "tests/api/test_house.py").read_text(encoding="utf-8")
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


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_page_compares_tools_as_the_record_does(page):
    """Shares of targets within 30 (d + 1) evaluations, in percent."""
    found = read("classes.json")

    def share(kind, tool):
        counts = [
            (count, 30 * (row["dimension"] + 1))
            for row in found
            if (row["kind"], row["method"]) == (kind, tool)
            for count in row["evaluations"]
        ]
        reached = [count is not None and count <= limit for count, limit in counts]
        return round(100 * sum(reached) / len(reached))

    tools = "lbfgsb", "powell", "default"
    first, second, third = (share("steps", tool) for tool in tools)
    cma, default = (share("free", tool) for tool in ("cma", "default"))
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert f"{first} % of" in text
    assert f"Powell {second} %, and the default method {third} %." in text
    assert f"smooth functions, CMA reaches {cma} % and the default method" in text
    assert f"the default method {default} %." in text
    if page != "README.md":
        first, second, third = (share("nan-20", tool) for tool in tools)
        assert f"they reach {first}, {second} and {third} %." in text


def test_home_says_the_evaluations_of_fits():
    """Medians until a thousandth of the gap is left."""
    medians = [
        statistics.median(
            math.inf if row["evaluations"][2] is None else row["evaluations"][2]
            for row in read("fits.json")
            if row["tool"] == tool
        )
        for tool in ("least_squares", "trf", "dfols")
    ]
    said = "a median of {} evaluations to a thousandth of the gap. SciPy's"
    said += " `least_squares` needs {}, DFO-LS {} |"
    assert said.format(*medians) in (ROOT / "docs/index.md").read_text("utf-8")


def read(name):
    return json.loads((BOARD / name).read_bytes())["rows"]


def test_entries_show_lines_and_results_of_the_programs_below():
    """The code of a card is code of the program that runs, and so is its result."""
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    entries, _, programs = text.partition("## Install")
    shown = re.findall(
        r"``` \{ .python \}\n(.*?)```\n\n *```text\n(.*?)```", entries, re.DOTALL
    )
    ran = re.findall(r"```python\n(.*?)```\n\n *```text\n(.*?)```", programs, re.DOTALL)
    assert len(shown) == 3
    for (code, result), (program, printed) in zip(shown, ran, strict=False):
        assert "".join(code.split()) in "".join(program.split())
        assert result.strip() in printed
