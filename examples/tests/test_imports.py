"""Imports of the examples, even if the packages that they need are not installed."""

import ast
import importlib
import pathlib
from importlib.util import find_spec

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = [
    path
    for folder in ("", "tpu", "black_boxes")
    for path in sorted((ROOT / "examples" / folder).glob("*.py"))
]


def imported(path):
    """The full names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_import_public_names_and_their_own_folder_alone(path):
    for name in imported(path):
        package, _, rest = name.partition(".")
        if package == "examples":
            assert path.parent.name == rest.split(".")[0], name
        elif package == "radazo_jax":
            module, _, last = name.rpartition(".")
            assert not any(part.startswith("_") for part in name.split(".")), name
            found = importlib.import_module(module or package)
            assert not module or hasattr(found, last) or find_spec(name), name
