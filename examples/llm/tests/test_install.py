"""The help of the program, at once, and the options that pages name."""

import pathlib
import subprocess
import sys

import pytest

from radazo_llm.command import radazo_llm

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("command", ["tune", "reward", "chat"])
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


def test_every_option_of_the_guides_is_known():
    """The commands that the guides and the README print."""
    pages = [ROOT / "README.md"]
    pages += (ROOT.parents[1] / "docs").rglob("*.md")
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
