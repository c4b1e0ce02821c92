"""The recipe for conda-forge: built, installed and tested by rattler-build.

Nothing comes from conda-forge. A channel on disk has this machine's Python, and the
packages that the recipe names as they are installed here, so that the recipe is tried
as it stands.
"""

import importlib.metadata
import pathlib
import platform
import sys

import pytest
from packaging.requirements import Requirement

import radazo_jax as zo

rattler_build = pytest.importorskip("rattler_build")

ROOT = pathlib.Path(__file__).parents[2]
SHORT = "{}.{}".format(*sys.version_info)
PLATFORM = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}.get(platform.machine())
# Of Python's own library, what neither installs nor runs anything.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}

pytestmark = pytest.mark.slow


def python_files():
    """Maps places in an environment to the files of this machine's Python."""
    base = pathlib.Path(sys.base_prefix)
    names = f"bin/python{SHORT}", "bin/python"
    found = dict.fromkeys(names, base / "bin" / f"python{SHORT}")
    for path in (base / "lib").glob("libpython*.so.*"):
        found[f"lib/{path.name}"] = path
    library = base / "lib" / f"python{SHORT}"
    for path in library.rglob("*"):
        if path.is_file() and not LEFT_OUT & set(path.parts[len(library.parts) :]):
            found[path.relative_to(base).as_posix()] = path
    return found


def distributions(*names):
    """These packages and what they need, as installed here, with the names of that."""
    found, left = {}, list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in found:
            continue
        own = importlib.metadata.distribution(name)
        needed = [Requirement(text) for text in own.requires or ()]
        needed = [r.name for r in needed if not r.marker or r.marker.evaluate()]
        found[name] = own, needed
        left += needed
    return found


def write_channel(channel):
    def assemble(name, version, subdir, files, **options):
        rattler_build.assemble_package(
            name,
            version,
            subdir,
            "0",
            channel / subdir,
            files=[rattler_build.FileEntry.from_paths(a, b) for b, a in files.items()],
            compression_level=1,
            detect_prefix=False,
            **options,
        )

    assemble("python", platform.python_version(), PLATFORM, python_files())
    packages = distributions("pip", "hatchling", "jax", "optax")
    for name, (own, needed) in packages.items():
        files = {f"site-packages/{f}": own.locate_file(f) for f in own.files}
        files = {b: a for b, a in files.items() if ".." not in b and a.is_file()}
        depends = ["python", *(need.lower().replace("_", "-") for need in needed)]
        options = {"noarch": "python", "depends": depends}
        assemble(name, own.version, "noarch", files, **options)


@pytest.mark.skipif(PLATFORM is None or sys.platform != "linux", reason="needs Linux")
def test_the_recipe_builds_and_passes_its_own_tests(tmp_path, monkeypatch):
    # Other builds must not use this Python instead of a real channel's.
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    write_channel(tmp_path)
    path = ROOT / ".ci" / "conda" / "recipe.yaml"
    recipe = rattler_build.Stage0Recipe.from_file(path)
    variants = rattler_build.VariantConfig({"python_min": [SHORT]})
    (variant,) = recipe.render(variants)
    channels = [tmp_path.as_uri()]
    built = variant.run_build(output_dir=tmp_path, channels=channels)
    (package,) = map(rattler_build.Package.from_file, built.packages)
    assert (package.name, str(package.version)) == ("radazo_jax", zo.__version__)
    imports, self_test = package.run_tests(channel=channels)
    for found in (imports, self_test):
        assert found.success, "\n".join(found.output)
    assert "all tests passed" in "\n".join(self_test.output)
