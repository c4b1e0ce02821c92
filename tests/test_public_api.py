"""The house rules that a reader of one file cannot check."""

import ast
import functools
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import radazo_jax
import radazo_jax.nnx
import radazo_jax.testing
import radazo_jax.theory

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "radazo_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400

# Room -> the rooms it may reach, by any path of imports. A module that is not in
# the table is a helper: it may reach what its users may, and closes no cycle.
REACHES = {
    "counter": set(),
    "directions": {"counter"},
    "exact": {"counter"},
    "laws": {"counter", "directions", "exact"},
    "low_rank": {"counter", "directions", "exact", "laws"},
    "kept": {"counter", "directions"},
    "views": {"counter", "directions", "kept"},
    "products": {"counter", "directions", "kept", "views"},
    "rules": {"counter", "directions", "kept", "views", "products"},
    "perturb": {"counter", "directions", "kept", "views", "products", "rules"},
    "transforms": set(),
    "alias": {"transforms"},
    "synthetic": {"counter"},
    "variance": set(),
    "theory": {"variance"},
}
REACHES["axes"] = REACHES["perturb"] | {"exact", "laws", "low_rank"}
REACHES["sampling"] = {"counter", "directions", "kept"}
REACHES["parallel"] = REACHES["perturb"] | {"perturb", "sampling"}
REACHES["estimators"] = REACHES["axes"] | {"perturb", "axes", "sampling", "parallel"}
REACHES["nnx"] = REACHES["estimators"] | {"estimators"}
REACHES["processes"] = {"counter"}
REACHES["wrappers"] = REACHES["nnx"] | {"processes"}
REACHES["minimize"] = set(REACHES).union(*REACHES.values())

# The front door, and the rooms with a door of their own.
DOORS = {
    "": radazo_jax,
    "nnx.": radazo_jax.nnx,
    "testing.": radazo_jax.testing,
    "theory.": radazo_jax.theory,
}
PUBLIC = [
    f"{prefix}{name}"
    for prefix, module in DOORS.items()
    for name in module.__all__
    if not name.startswith("__")
]


def public(name):
    return functools.reduce(getattr, name.split("."), radazo_jax)


FUNCTIONS = [n for n in PUBLIC if inspect.isfunction(public(n))]
TYPES = [n for n in PUBLIC if inspect.isclass(public(n))]


def documented_names():
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return re.findall(r"^::: radazo_jax\.([\w.]+)$", text, re.MULTILINE)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def own_imports(path):
    """The modules of the package that a file imports, anywhere in it."""
    known = {module_name(p) for p in MODULES}
    base = module_name(path).split(".")
    package = base if path.name == "__init__.py" else base[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*up, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                found.add(inner if inner in known else source)
    return found & known


def reachable(graph, start):
    seen, todo = set(), list(graph[start])
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += graph[module]
    return seen


@pytest.mark.parametrize("name", FUNCTIONS + TYPES)
def test_docstring_is_written(name):
    doc = public(name).__doc__ or ""
    # A NamedTuple without a docstring is given one: its own signature.
    own = f"{name.rpartition('.')[2]}("
    assert doc.strip() and not doc.startswith(own), "no docstring"


def test_what_is_no_function_and_no_type_is_known():
    """A constant has no docstring to look at; it is documented where it stands."""
    assert set(PUBLIC) - set(FUNCTIONS) - set(TYPES) == {"testing.PROBLEMS"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_has_an_example(name):
    assert ">>> " in public(name).__doc__


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_documents_arguments_and_result(name):
    function = public(name)
    doc = inspect.getdoc(function)
    assert re.search(r"^Returns:$", doc, re.MULTILINE)
    parameters = inspect.signature(function).parameters
    if parameters:
        assert re.search(r"^Args:$", doc, re.MULTILINE)
    for parameter in parameters:
        pattern = rf"^ +\*{{0,2}}{parameter}(, .*| \(.*\))?:"
        assert re.search(pattern, doc, re.MULTILINE), f"{parameter} not documented"


@pytest.mark.parametrize("name", TYPES)
def test_type_documents_its_fields(name):
    """Under `Attributes:`, or by a comment where the field is declared."""
    type_ = public(name)
    doc, source = inspect.getdoc(type_), inspect.getsource(type_)
    for field in inspect.get_annotations(type_):
        listed = re.search(rf"^ +{field}( \(.*\))?:", doc, re.MULTILINE)
        commented = re.search(rf"^ +{field}: .*  # \S", source, re.MULTILINE)
        assert listed or commented, f"{field} not documented"


def test_all_is_exactly_what_the_reference_lists():
    names = documented_names()
    assert len(names) == len(set(names)), "listed twice"
    assert set(names) == set(PUBLIC)


def test_all_has_no_duplicates_and_nothing_public_is_left_out():
    assert len(PUBLIC) == len(set(PUBLIC))
    visible = {
        f"{prefix}{name}"
        for prefix, module in DOORS.items()
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert visible == set(PUBLIC)


def test_version_is_the_same_everywhere():
    version = radazo_jax.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == version
    assert re.search(r"^## \[(.+?)\]", changelog, re.MULTILINE)[1] == version


def test_import_needs_the_runtime_dependencies_alone():
    optional = {"chex", "flax", "matplotlib", "scipy", "sklearn", "tabulate", "tqdm"}
    # What JAX and Optax import by themselves is not ours to answer for.
    script = (
        "import sys, jax, jax.numpy, optax; before = set(sys.modules);"
        "import radazo_jax; print(*(set(sys.modules) - before))"
    )
    command = [sys.executable, "-W", "error", "-c", script]
    output = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    )
    imported = {module.partition(".")[0] for module in output.stdout.split()}
    assert "radazo_jax" in imported
    assert not imported & optional


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_module_is_short_enough_to_read(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: split it"


def test_imports_between_rooms_go_one_way():
    graph = {module_name(path): own_imports(path) for path in MODULES}
    # `_src/__init__.py` is empty, and every module under it imports it by name.
    graph["radazo_jax._src"] = set()
    for module in graph:
        reached = reachable(graph, module)
        assert module not in reached, f"{module} imports itself, by some path"
        if module.startswith("radazo_jax._src."):
            assert "radazo_jax" not in reached, f"{module} imports its own front door"

    src = "radazo_jax._src."
    for room, allowed in REACHES.items():
        reached = {m.removeprefix(src) for m in reachable(graph, src + room)}
        assert reached & set(REACHES) <= allowed, f"{room} reaches too far"
