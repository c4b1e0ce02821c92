"""The order of the house, which a reader of one file cannot check.

A folder has few modules, a module and a function are short enough to read, a name has
one meaning, and imports go one way.
"""

import ast
import collections
import functools
import pathlib

import pytest
from code_lines import code_lines, lines_of_functions

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "radazo_jax"
SOURCE = "radazo_jax._src"
MODULES = sorted(PACKAGE.rglob("*.py"))

MAX_MODULES, MAX_LINES, MAX_LINES_OF_A_FUNCTION = 12, 450, 60  # Lines of code.

# Names that stand in several modules for the same thing: the steps of each method, and
# `value_and_grad`, which modules of NNX have, too.
SHARED = {"steps", "value_and_grad"}

# The folders, in order: a module may import from its own folder and from earlier ones.
ORDER = (
    *("base", "directions", "perturb", "estimates", "contrib", "optimizers", "steps"),
    *("measure", "runs", "train", "methods", "host", "workers"),
)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def own_imports(path):
    """The modules of the package that a file imports, anywhere in it."""
    known = {module_name(p) for p in MODULES}
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name the package"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {x if x in known else node.module for x in inner}
    return found & known


def folder(module):
    """The folder under `_src` that a module is in; "" for a public module."""
    return module.removeprefix(f"{SOURCE}.").split(".")[0] if SOURCE in module else ""


def public_names(path):
    """The classes, and the functions without an underscore, of a module."""
    return [
        node.name
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        if not node.name.startswith("_")
    ]


@pytest.mark.parametrize("name", ORDER)
def test_a_folder_has_few_modules(name):
    modules = {p.name for p in (PACKAGE / "_src" / name).glob("*.py")} - {"__init__.py"}
    assert len(modules) <= MAX_MODULES, sorted(modules)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_is_short_enough_to_read(path):
    assert code_lines(path) <= MAX_LINES
    lengths = lines_of_functions(path)
    assert {k: n for k, n in lengths.items() if n > MAX_LINES_OF_A_FUNCTION} == {}


def test_a_name_has_one_meaning():
    places = collections.defaultdict(list)
    for path in MODULES:
        for name in public_names(path):
            places[name].append(module_name(path))
    twice = {name for name, found in places.items() if len(found) > 1}
    assert twice == SHARED, {name: places[name] for name in twice ^ SHARED}


def test_folders_import_downward_only():
    folders = {p.name for p in (PACKAGE / "_src").iterdir() if p.is_dir()}
    assert folders - {"__pycache__"} == set(ORDER)
    for path in MODULES:
        module = module_name(path)
        if folder(module) in ("", SOURCE, "contrib"):
            continue
        for other in own_imports(path) - {SOURCE}:
            assert other.startswith(SOURCE), f"{module} imports the public {other}"
            assert ORDER.index(folder(other)) <= ORDER.index(folder(module)), (
                f"{module} imports {other}, of a later folder"
            )


def test_the_estimators_of_papers_are_written_with_public_names():
    """An outsider could write them."""
    for path in sorted((PACKAGE / "_src" / "contrib").glob("*.py")):
        private = {x for x in own_imports(path) if x.startswith(SOURCE)}
        assert {folder(x) for x in private} <= {"contrib"}, path.name


def test_no_module_imports_itself_by_some_path():
    graph = {module_name(path): own_imports(path) for path in MODULES}
    graph[SOURCE] = set()
    for module in graph:
        seen, todo = set(), list(graph[module])
        while todo:
            other = todo.pop()
            if other not in seen:
                seen.add(other)
                todo += graph[other]
        assert module not in seen
