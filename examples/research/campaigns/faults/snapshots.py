"""Resumes from a folder of checkpoints as it was at each change of a file in it.

    python -m campaigns.faults.snapshots --output records/trust/snapshots.json

What a process leaves that is killed is what it has written until then. So one run is
enough for a kill at each change: the shim copies the folder, and from each copy a run
must end as an undisturbed one does. It needs a C compiler.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from campaigns.faults import build
from common import options

OUTCOMES = {"same end": "goes_on", "one error": "one_error"}


def counted(folder: Path, copies: int | None) -> dict[str, Any]:
    """A row: the outcomes of the copies of a run, or of some of them."""
    from campaigns.faults import runs

    row = {"example": "tpu", "tried": 0, "kinds": 0}
    row |= dict.fromkeys(("goes_on", "starts_again", "one_error", "failed"), 0)
    whole = folder / "whole"
    runs.whole_run(whole)
    changes = runs.whole_run(folder / "copied", runs.COPY).changes
    found = [folder / "copied.log.d" / str(at) for at in range(len(changes))]
    found = [copied for copied in found if copied.is_dir()]
    if copies is not None:
        found = found[:: max(1, len(found) // copies)][:copies]
    seen = set()
    for copied in found:
        has_checkpoint = runs.latest_step(copied) is not None
        verdict = runs.verdict(copied, whole)
        outcome = OUTCOMES.get(verdict, "failed")
        if outcome == "goes_on" and not has_checkpoint:
            outcome = "starts_again"
        if outcome == "failed":
            print(copied.name, verdict, file=sys.stderr)
        row["tried"] += 1
        row[outcome] += 1
        seen.add(changes[int(copied.name)])
        shutil.rmtree(copied)
    return row | {"kinds": len(seen)}


@options.command(__doc__)
@options.output
@click.option("--copies", type=options.COUNT, help="By default, all.")
@click.option("--inside", type=click.Path(path_type=Path), hidden=True)
def main(output: Path | None, copies: int | None, inside: Path | None) -> None:
    if inside is not None:  # With the shim.
        print(json.dumps(counted(inside, copies)))
        return
    command = [sys.executable, "-m", "campaigns.faults.snapshots", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--inside", folder],
            env=build.environment(Path(folder)),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    row = json.loads(done.stdout.splitlines()[-1])
    print(row)
    if output:
        from common import record

        record.write(output, record.record([row]))
    sys.exit(bool(row["failed"]))


if __name__ == "__main__":
    main()
