"""The program without what it needs, in one line; and its help, at once."""

import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

from radazo_llm.command import TASKS, radazo_llm
from radazo_llm.tune import data

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def distribution(folder, name, version, required=()):
    """Writes what an installer leaves of a package."""
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in required]
    (about / "METADATA").write_text("\n".join(lines) + "\n", "utf-8")


def started(*flags, path=(), arguments=("--help",)):
    paths = [*map(str, path), str(ROOT), *os.environ.get("PYTHONPATH", "").split(":")]
    return subprocess.run(
        [sys.executable, *flags, "-m", "radazo_llm", *arguments],
        env=os.environ | {"PYTHONPATH": ":".join(filter(None, paths))},
        capture_output=True,
        text=True,
    )


def one_line(done):
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("radazo-llm: error: ")
    assert line.endswith("Run, in a clone of radazo_jax: pip install . ./examples/llm")
    return line


def test_without_any_package(tmp_path):
    """-S leaves out all that is installed."""
    distribution(tmp_path, "radazo_llm", "0.1.0", PROJECT["dependencies"])
    assert "packaging must be installed; it is not." in one_line(started("-S"))


def test_without_one_package(tmp_path):
    required = [*PROJECT["dependencies"], "no-such-package>=1.0"]
    distribution(tmp_path, "radazo_llm", "0.1.0", required)
    line = one_line(started(path=[tmp_path], arguments=("tune", "--help")))
    assert "no-such-package must be installed; it is not." in line


@pytest.mark.parametrize("version", ["0.0.1", "0.1.0.dev3"])
def test_beside_a_library_that_is_too_old(version, tmp_path):
    distribution(tmp_path, "radazo_llm", "0.1.0", PROJECT["dependencies"])
    distribution(tmp_path, "radazo_jax", version)
    line = one_line(started(path=[tmp_path]))
    assert f"radazo_jax must be >=0.1.0; got {version}." in line


def test_with_all_it_needs(tmp_path):
    distribution(tmp_path, "radazo_llm", "0.1.0", PROJECT["dependencies"])
    done = started(path=[tmp_path])
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("tune", "reward", "chat", "plan"):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("command", ["tune", "reward", "chat", "plan"])
def test_help_imports_no_large_library(command):
    """JAX alone takes a second to import."""
    program = (
        "import sys\n"
        "from radazo_llm.command import radazo_llm\n"
        "try:\n"
        f"    radazo_llm(['{command}', '--help'])\n"
        "except SystemExit as end:\n"
        "    large = {'jax', 'numpy', 'flax', 'optax', 'tokenizers', 'radazo_jax'}\n"
        "    print(end.code, large & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.endswith("0 set()\n"), done.stdout + done.stderr


def test_the_command_line_knows_the_tasks():
    assert set(TASKS) == set(data.TASKS)


def test_every_option_of_the_guides_is_known():
    """The commands that the guides and the README print."""
    pages = [ROOT / "README.md"]
    guides = ROOT.parents[1] / "docs" / "guides"
    pages += [guides / f"{name}.md" for name in ("language_models", "rewards")]
    found = 0
    for page in pages:
        text = page.read_text("utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            words = line.strip().split()
            if words[:1] != ["radazo-llm"] or len(words) < 3:
                continue
            options = {p for c in radazo_llm.commands[words[1]].params for p in c.opts}
            used = {word for word in words if word.startswith("--")}
            assert used <= options, (page, used - options)
            found += 1
    assert found >= 5
