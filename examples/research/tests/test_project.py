"""The project is whole: its commands run, and it needs the library's public names."""

import ast
import importlib
import json
import re
import shlex

import pytest
from click.testing import CliRunner

from common import RECORDS, RESEARCH

PACKAGES = ("benchmarks", "board", "campaigns", "common", "paper")
SOURCES = sorted(path for name in PACKAGES for path in (RESEARCH / name).rglob("*.py"))
FILES = sorted(RECORDS.rglob("*.json"))


def relative(path):
    return str(path.relative_to(RESEARCH))


def run(command, *more):
    """Runs a record's command in this process, with more arguments."""
    python, option, name, *words = shlex.split(command)
    assert (python, option) == ("python", "-m")
    try:
        module = importlib.import_module(f"{name}.__main__")
    except ModuleNotFoundError:
        module = importlib.import_module(name)
    return CliRunner().invoke(module.main, [*words, *more])


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_the_command_of_each_record_has_no_unknown_option(path):
    """The options are read in their order, and the last one is the wrong one."""
    command = json.loads(path.read_bytes())["command"]
    done = run(command, "--no-such-option")
    assert done.exit_code == 2
    assert "No such option" in done.output and "--no-such-option" in done.output


def imported(path):
    """The modules that a file imports, and names that it takes from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_only_public_names_of_the_library_are_used(path):
    private = [n for n in imported(path) if n.startswith("radazo_jax._")]
    assert not private
    used = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = [ast.unparse(node) for node in used if isinstance(node, ast.Attribute)]
    assert not [n for n in names if re.match(r"(zo|radazo_jax)\.(\w+\.)*_(?!_)", n)]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_nothing_of_other_projects_is_imported(path):
    others = ("examples", "radazo_llm", "tests", "docs")
    assert not [name for name in imported(path) if name.split(".")[0] in others]


def test_functions_are_short():
    """At most 60 lines, docstrings not counted."""
    long = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node):
                    docstring = node.body[0]
                    lines -= docstring.end_lineno - docstring.lineno + 1
                if lines > 60:
                    long.append(f"{relative(path)}: {node.name} has {lines} lines")
    assert long == []
