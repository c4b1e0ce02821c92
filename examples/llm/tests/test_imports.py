"""The program and its research use no other project, and the library in public."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FILES = [
    path
    for folder in ("radazo_llm", "research", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def imported(tree):
    """The modules of a file, with the names that are imported from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(text):
    """The imports of a file from other projects, or from private modules."""
    for name in imported(ast.parse(text)):
        top, *rest = name.split(".")
        private = top == "radazo_jax" and any(part.startswith("_") for part in rest)
        if top == "examples" or private:
            yield name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_imported_of_other_projects_or_in_private(path):
    assert not [*faults(path.read_text("utf-8"))]


def test_private_attributes_of_the_library_are_not_used():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "_src":
                raise AssertionError(f"{path}:{node.lineno}")


def test_the_program_does_not_import_its_research():
    for path in (ROOT / "radazo_llm").rglob("*.py"):
        names = imported(ast.parse(path.read_text("utf-8")))
        assert not [name for name in names if name.split(".")[0] == "research"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import examples.common.cli", ["examples.common.cli"]),
        ("from examples.research import paper", ["examples.research.paper"]),
        ("from radazo_jax._src import trees", ["radazo_jax._src.trees"]),
        ("from radazo_jax import runs", []),
    ],
)
def test_the_scan_finds_them(line, found):
    assert [*faults(line)] == found
