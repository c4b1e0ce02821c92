"""Follows the home page from an empty directory, and says how long it takes.

python .ci/newcomer.py          # prints seconds, as JSON
"""

import json
import os
import pathlib
import re
import subprocess
import tempfile
import textwrap
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main() -> None:
    """Runs the page's commands on its code, in a clone of the repository."""
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    # The first tab; its code is indented.
    code = re.search(r"^    ```python\n(.*?)^    ```$", page, re.MULTILINE | re.DOTALL)
    commands += ".venv/bin/python first.py\n"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as folder:
        clone = ["git", "clone", "-q", "--no-local", str(ROOT), "radazo_jax"]
        subprocess.run(clone, cwd=folder, check=True)
        checkout = pathlib.Path(folder, "radazo_jax")
        text = textwrap.dedent(code[1])
        (checkout / "first.py").write_text(text, encoding="utf-8")
        seconds, processor = {}, {}
        for command in commands.splitlines():
            start, used = time.perf_counter(), _processor_seconds()
            subprocess.run(command, shell=True, cwd=checkout, env=env, check=True)
            seconds[command] = round(time.perf_counter() - start, 1)
            processor[command] = round(_processor_seconds() - used, 1)
    record = {"seconds": seconds, "processor_seconds": processor}
    totals = {name: round(sum(found.values()), 1) for name, found in record.items()}
    print(json.dumps(record | {"all": totals}, indent=1))


def _processor_seconds() -> float:
    """What the commands so far have taken of all cores."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    main()
