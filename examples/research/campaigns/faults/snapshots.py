"""Reads a folder of checkpoints as it was at each change of a file in it.

python -m campaigns.faults.snapshots --output records/trust/snapshots.json

What a process leaves that is killed is what it has written until then. So one run is
enough for a kill at each change: the shim copies the folder, and what is restored from
each copy is compared with the state of a run that ended at that step.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from campaigns.faults import build
from common import cli

COPY = 3
WRITES = [2, 4, 6]  # The steps with a checkpoint.


def references(folder, run):
    """Step -> leaves and notes of a run that ended there."""
    import jax

    from common import checkpoint

    found = {}
    for step in WRITES:
        run(folder / str(step), step)
        root = str(folder / str(step) / run.checkpoints)
        latest, leaves = checkpoint._latest(root)
        assert latest == step
        leaves = jax.device_put(leaves, jax.devices()[0])
        with checkpoint.manager(root, create=False) as source:
            found[step] = leaves, checkpoint.notes(source)
    return found


def read(folder, expected):
    """The outcome of a run that resumes in a folder."""
    import jax

    from common import checkpoint

    with checkpoint.manager(str(folder)) as source:
        if (step := source.latest_step()) is None:
            return "starts_again"
        leaves, notes = expected[step]
        try:
            found = checkpoint.restore(source, leaves, {})
            beside = checkpoint.notes(source)
        except checkpoint.UserError as error:
            return "one_error" if "\n" not in str(error) else "failed"
    same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), found, leaves)
    # The last measures of a shorter run are made at its end.
    losses = [row for row in beside or [] if "loss" in row]
    right = [row for row in notes or [] if "loss" in row]
    return "goes_on" if all(same.values()) and losses == right else "failed"


class Run:
    """Runs an example in a process of its own up to a step."""

    def __init__(self, example, folder):
        self.example, self.folder = example, folder
        self.checkpoints = {"tpu": "", "llm": "checkpoints"}[example]

    def __call__(self, output, step, copy=False):
        environment = build.environment(self.folder)
        code = (
            "import ctypes, pathlib, sys\n"
            "from campaigns.faults import runs\n"
            "folder, output = map(pathlib.Path, sys.argv[1:3])\n"
            "if not (folder / 'model').exists():\n"
            "    runs.prepare(folder / 'model')\n"
            "if sys.argv[4] == 'True':\n"
            "    log = str(output) + '.log'\n"
            "    names = str(output).encode(), log.encode()\n"
            "    shim = ctypes.CDLL(None)\n"
            f"    shim.fault_arm(*names, ctypes.c_long(-1), {COPY}, None)\n"
            f"example = runs.examples(folder, int(sys.argv[3]))[{self.example!r}]\n"
            "example.run(str(output))"
        )
        command = [sys.executable, "-c", code, self.folder, output, step, copy]
        subprocess.run(
            list(map(str, command)),
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )


def count(example):
    """Returns a row: the outcomes of the copies of a run."""
    from campaigns.faults import runs

    row = {"example": example, "tried": 0, "kinds": 0}
    row |= dict.fromkeys(("goes_on", "starts_again", "one_error", "failed"), 0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        run = Run(example, folder)
        expected = references(folder, run)
        output = folder / "copied"
        run(output, WRITES[-1], copy=True)
        log = (folder / "copied.log").read_text(encoding="utf-8").splitlines()
        changes = [runs.normal(line, output) for line in log]
        seen = set()
        for at, change in enumerate(changes):
            copied = folder / "copied.log.d" / str(at) / run.checkpoints
            if copied.is_dir():
                row["tried"] += 1
                ended = read(copied, expected)
                row[ended] += 1
                seen.add(change)
                if ended == "failed":
                    print(example, at, change, file=sys.stderr)
                shutil.rmtree(copied)
        row["kinds"] = len(seen)
    print(row, flush=True)
    return row


def main():
    parser = cli.parser(__doc__)
    cli.add_record(parser)
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from common import record

    rows = [count(example) for example in ("tpu", "llm")]
    if args.output:
        record.write(args.output, record.record(rows))
    sys.exit(any(row["failed"] for row in rows))


if __name__ == "__main__":
    main()
