"""Damages every file of a checkpoint and of a journal, and reads what is left.

python -m research.readers.damage --output research/records/damage.json
"""

import collections
import pathlib
import re
import sys
import tempfile

import click

from research import common
from research.readers import fuzz
from research.readers.targets import TARGETS

OUTCOMES = ("same", "refused", "failed")


def damages(content, places):
    """Damaged contents of a file: a bit flipped, cut off, empty; None if it is gone."""
    step = max(1, len(content) // places)
    for place in range(0, len(content), step):
        changed = bytearray(content)
        changed[place] ^= 1 << (place // step % 8)
        yield "flipped", bytes(changed)
    for size in range(0, len(content), step):
        yield "cut", content[:size]
    yield "removed", None


def damaged(name, places):
    """A row for each file of a target and each kind of damage."""
    counts = collections.Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        TARGETS[name].make(folder)
        right = TARGETS[name].read(folder)
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        for path in paths:
            content = path.read_bytes()
            file = re.sub("[0-9a-f]{32}", "…", str(path.relative_to(folder)))
            for kind, changed in damages(content, places):
                if changed is None:
                    path.unlink()
                else:
                    path.write_bytes(changed)
                found = fuzz.outcome(name, folder, right).split()[0].strip(":")
                counts[file, kind, found] += 1
                path.write_bytes(content)
    for file, kind in sorted({key[:2] for key in counts}):
        row = {outcome: counts[file, kind, outcome] for outcome in OUTCOMES}
        tried = {"tried": sum(row.values())}
        yield {"of": name, "file": file, "damage": kind} | tried | row


@click.command(help=__doc__)
@common.output
@click.option("--places", type=common.POSITIVE, default=16)
def main(output, places):
    rows = [*damaged("journal", 10**6), *damaged("checkpoint", places)]
    rows += [
        {"of": of, "file": "all", "damage": kind}
        | {
            name: sum(r[name] for r in rows if (r["of"], r["damage"]) == (of, kind))
            for name in ("tried", *OUTCOMES)
        }
        for of in ("journal", "checkpoint")
        for kind in ("flipped", "cut", "removed")
    ]
    for row in rows:
        print(row)
    if output:
        common.write(output, common.record(rows))
    sys.exit(any(row["failed"] for row in rows))


if __name__ == "__main__":
    main()
