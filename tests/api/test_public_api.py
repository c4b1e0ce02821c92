"""Public names: the pages that document them, and the parts of their docstrings."""

import functools
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import radazo_jax
import radazo_jax.nnx

ROOT = pathlib.Path(__file__).parents[2]

# The modules whose names are public.
PUBLIC_MODULES = {
    "": radazo_jax,
    "checks.": radazo_jax.checks,
    "contrib.": radazo_jax.contrib,
    "distributions.": radazo_jax.distributions,
    "estimators.": radazo_jax.estimators,
    "methods.": radazo_jax.methods,
    "nnx.": radazo_jax.nnx,
    "random.": radazo_jax.random,
    "runs.": radazo_jax.runs,
    "shaping.": radazo_jax.shaping,
    "transforms.": radazo_jax.transforms,
}
# Names that a submodule shares with `radazo_jax` are documented there.
PUBLIC = [
    f"{prefix}{name}"
    for prefix, module in PUBLIC_MODULES.items()
    for name in module.__all__
    if not prefix or name not in radazo_jax.__all__ or prefix == "nnx."
]


def public(name):
    return functools.reduce(getattr, name.split("."), radazo_jax)


FUNCTIONS = [n for n in PUBLIC if inspect.isfunction(public(n))]
TYPES = [n for n in PUBLIC if inspect.isclass(public(n))]


def documented_names():
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return re.findall(r"^::: radazo_jax\.([\w.]+)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_documents_arguments_and_result_with_an_example(name):
    function = public(name)
    doc, parameters = inspect.getdoc(function), inspect.signature(function).parameters
    sections = ["Returns", *(["Args"] if parameters else [])]
    assert all(re.search(rf"^{each}:$", doc, re.MULTILINE) for each in sections)
    assert ">>> " in doc
    for parameter in parameters:
        pattern = rf"^ +\*{{0,2}}{parameter}(, .*| \(.*\))?:"
        assert re.search(pattern, doc, re.MULTILINE), f"{parameter} not documented"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_misspelled_argument_is_named(name):
    function = public(name)
    kinds = inspect.signature(function).parameters.values()
    named = [
        x.name for x in kinds if x.kind in (x.KEYWORD_ONLY, x.POSITIONAL_OR_KEYWORD)
    ]
    if not named:
        pytest.skip("has no arguments")
    with pytest.raises(TypeError) as error:
        function(**{f"{named[-1]}_": 1})
    text = str(error.value)
    assert f"got {named[-1]}_. Pass {named[-1]}" in text and "\n" not in text


@pytest.mark.parametrize("name", TYPES)
def test_type_documents_its_fields(name):
    """Under `Attributes:`, or by a comment at the declaration."""
    type_ = public(name)
    doc, source = inspect.getdoc(type_), inspect.getsource(type_)
    # A NamedTuple without a docstring is given one: its own signature.
    own = f"{name.rpartition('.')[2]}("
    assert type_.__doc__ and not doc.startswith(own), "no docstring"
    for field in inspect.get_annotations(type_):
        if field.startswith("_"):
            continue
        listed = re.search(rf"^ +{field}( \(.*\))?:", doc, re.MULTILINE)
        commented = re.search(rf"^ +{field}: .*  # \S", source, re.MULTILINE)
        assert listed or commented, f"{field} not documented"


def test_all_is_exactly_what_the_reference_lists():
    names = documented_names()
    assert len(names) == len(set(names)), "listed twice"
    assert set(names) == set(PUBLIC)


def test_all_has_no_duplicates_and_nothing_public_is_left_out():
    assert len(PUBLIC) == len(set(PUBLIC))
    for prefix, module in PUBLIC_MODULES.items():
        # Other modules re-export what is defined under `_src`.
        defines = prefix == "nnx."
        source = module.__name__ if defines else "radazo_jax"
        visible = {
            f"{prefix}{name}"
            for name, value in vars(module).items()
            if not name.startswith("_")
            and not inspect.ismodule(value)
            and getattr(value, "__module__", "").startswith(source)
        }
        assert visible <= {f"{prefix}{name}" for name in module.__all__}


def test_submodules_share_objects_with_the_package():
    for module in PUBLIC_MODULES.values():
        if module.__name__ == "radazo_jax.nnx":
            continue
        for name in set(module.__all__) & set(radazo_jax.__all__):
            assert getattr(module, name) is getattr(radazo_jax, name)


def test_version_is_the_same_everywhere():
    version = radazo_jax.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == version
    assert re.search(r"^## \[(.+?)\]", changelog, re.MULTILINE)[1] == version


def test_import_needs_the_runtime_dependencies_alone():
    optional = {
        "chex",
        "distributed",
        "flax",
        "matplotlib",
        "scipy",
        "sklearn",
        "tabulate",
        "tqdm",
    }
    # The imports of JAX and Optax do not count.
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


def test_each_fault_has_its_test():
    """Also if folders are renamed: a test is found by its file and its name."""
    text = (ROOT / "tests" / "FAULTS.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+\.py)::(\w+)`", text))
    found = {
        (path.name, name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.M)
    }
    assert len(named) > 100 and named - found == set()
