"""Rules for every example, even if the packages that it needs are not installed."""

import ast
import importlib
import pathlib
from importlib.util import find_spec

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def imported(path):
    """The pairs of a module of the project and a name that a file imports from it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None


def defined(module):
    """The names at the top level of a module of the examples, which is not run."""
    path = ROOT / module.replace(".", "/")
    if path.is_dir():
        names = {entry.stem for entry in path.iterdir()}
        path = path / "__init__.py"
    else:
        names, path = set(), path.with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    for node in (n for statement in body for n in ast.walk(statement)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=None) | ast.alias(asname=name):
                names.add(name)
    return names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_an_example_imports_from_the_project_is_there(path):
    for module, name in imported(path):
        package = module.split(".")[0]
        if package == "examples":
            assert name is None or name in defined(module), f"{module}.{name}"
        elif package == "radazo_jax":
            found = importlib.import_module(module)
            there = name is None or hasattr(found, name)
            assert there or find_spec(f"{module}.{name}"), f"{module}.{name}"
