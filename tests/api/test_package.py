"""The package as its users meet it: its types, its report, its archives."""

import inspect
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import pytest

import radazo_jax as zo
from radazo_jax._src.base import checks

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "radazo_jax"
OPTIMIZERS = [
    name
    for name in zo.__all__
    if inspect.isfunction(getattr(zo, name))
    and "GradientTransformation"
    in getattr(inspect.signature(getattr(zo, name)).return_annotation, "__name__", "")
]

WRONG = """
zo.radazo(1e-2).update()
zo.forward_difference(num_directions="ten")
zo.runs.History.of([]).losses
"""


def test_each_dependency_has_a_lower_bound():
    """`.ci/lower_bounds` tries them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    needed = {*project["dependencies"], *(one for extra in extras for one in extra)}
    own = {one for one in needed if one.startswith("radazo_jax[")}
    assert [one for one in needed - own if ">=" not in one] == []


@pytest.mark.slow
def test_a_type_checker_knows_what_functions_return(tmp_path):
    """Optax ships no types, and what comes from it is Any."""
    assert len(OPTIMIZERS) > 8
    shown = "".join(f"reveal_type(zo.{name})\n" for name in OPTIMIZERS)
    lines = f"import radazo_jax as zo\n{shown}{WRONG}"
    (tmp_path / "snippet.py").write_text(lines, encoding="utf-8")
    options = [
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "--no-error-summary",
    ]
    command = [sys.executable, "-m", "mypy", *options, "snippet.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    shown = re.findall(r'Revealed type is "def .* -> (\S+)"', done.stdout)
    own = "radazo_jax._src.estimates.contracts.GradientTransformationExtraArgs"
    assert shown == [own] * len(OPTIMIZERS), done.stdout
    errors = re.findall(r"error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert errors == ["call-arg", "arg-type", "attr-defined"], done.stdout


def report(*arguments):
    """Returns the output of `python -m radazo_jax`."""
    command = (sys.executable, "-W", "error", "-m", "radazo_jax", *arguments)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_module_prints_versions_and_devices():
    lines = report().splitlines()
    assert lines[0].startswith(f"radazo_jax {zo.__version__}, Python 3.")
    names = [line.split()[0] for line in lines[1:]]
    assert names[:4] == ["jax", "jaxlib", "optax", "numpy"]
    assert names[-1] == "device" and len(names) == 7 + names.count("device")


@pytest.mark.slow
def test_the_module_helps():
    shown = report("--help")
    assert shown.startswith("usage: python -m radazo_jax") and "Versions" in shown
    assert "jaxlib" not in shown


def test_the_conda_recipe_is_that_of_the_project():
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".ci" / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    recipe = yaml.safe_load(text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    _, *needed = recipe["requirements"]["run"]
    expected = project["project"]["dependencies"]
    assert [name.replace(" ", "") for name in needed] == expected
    (built,) = (x.replace(" ", "") for x in recipe["requirements"]["host"][2:])
    assert [built] == project["build-system"]["requires"]
    assert recipe["context"]["version"] == zo.__version__
    assert recipe["about"]["summary"] == project["project"]["description"]


def checked(*command, **options):
    """Runs a command; skips the test without a package index."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    said = done.stdout + done.stderr
    if done.returncode and re.search("No matching distribution|ConnectionError", said):
        pytest.skip("there is no package index")
    assert done.returncode == 0, said
    return done.stdout


@pytest.mark.slow
def test_archives_install_in_an_empty_environment(tmp_path):
    build = (sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT))
    checked(*build)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    files = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".typed")
    }
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        described = file.read(metadata).decode()
    assert names == files
    # Language models and research are projects of their own.
    extras = re.findall(r"^Provides-Extra: (.+)$", described, re.MULTILINE)
    others = {"benchmarks", "board", "campaigns", "gym", "llm", "workers"}
    assert "dask" in extras and not others & set(extras)
    with tarfile.open(source) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    assert files | {"pyproject.toml", "README.md", "LICENSE"} <= names
    # What tests and builds leave is not tracked, and not packed.
    left = ("__pycache__", ".venv", "examples/out", "site/")
    assert not [name for name in names if any(part in name for part in left)]

    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    here = {"cwd": tmp_path, "env": env}
    checked(python, "-m", "pip", "install", "-q", str(wheel), **here)
    shown = checked(python, "-W", "error", "-m", "radazo_jax", **here)
    assert f"radazo_jax {zo.__version__}" in shown
    assert "matplotlib is not installed" in shown
    anew = ("--force-reinstall", "--no-deps", str(source))
    checked(python, "-m", "pip", "install", "-q", *anew, **here)
    where = "import radazo_jax; print(radazo_jax.__file__)"
    assert str(tmp_path) in checked(python, "-W", "error", "-c", where, **here)


def test_errors_name_docstrings_that_there_are():
    source = "".join(p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py"))
    names = set(re.findall(r"""checks\.refer_to\(["']([\w.]+)["']\)""", source))
    assert len(names) > 3
    for name in names:
        assert checks.refer_to(name) == f" See help(zo.{name})."
        assert getattr(zo, name).__doc__, name
