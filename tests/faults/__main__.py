"""Disturbs an example at each change of its files, and counts how the runs end.

python -m tests.faults --example llm --output docs/trust/faults_llm.json
"""

import itertools
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

from examples.common import cli
from tests.faults import build

KINDS = {
    "kill": "killed at a change of a file",
    "moment": "killed at a random moment",
    "full": "disk full from a change of a file on",
}


def cases(changes, rng, runs, numbers):
    """What is done to a run, of each kind in turn."""
    lists = {
        "kill": [
            {"at": at, "mode": runs.KILL}
            for at in runs.chosen(changes, numbers["kill"], rng)
        ],
        "moment": [
            {"kill_after": rng.uniform(*numbers["seconds"])}
            for _ in range(numbers["moment"])
        ],
        "full": [
            {"at": at, "mode": runs.FULL}
            for at in runs.chosen(changes, numbers["full"], rng)
            if changes[at].split()[0] in ("open", "write", "mkdir", "link")
        ],
    }
    for row in itertools.zip_longest(*lists.values()):
        for kind, how in zip(lists, row, strict=True):
            if how is not None:
                yield kind, how


def main():
    parser = cli.parser(__doc__)
    cli.add_record(parser)
    parser.add_argument("--example", choices=["llm", "tpu"], default="llm")
    parser.add_argument("--kills", type=cli.at_least_one, default=150)
    parser.add_argument("--moments", type=cli.at_least_one, default=50)
    parser.add_argument("--full", type=cli.at_least_one, default=100)
    parser.add_argument("--minutes", type=cli.positive, default=1000.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "fault_arm" not in os.environ.get("RADAZO_FAULTS", ""):
        with tempfile.TemporaryDirectory() as folder:
            environment = build.environment(pathlib.Path(folder))
            command = [sys.executable, "-m", "tests.faults", *sys.argv[1:]]
            sys.exit(subprocess.run(command, env=environment).returncode)
    from examples.common import record
    from tests.faults import runs

    start, rng = time.monotonic(), random.Random(args.seed)
    rows = {
        kind: {"example": args.example, "what": what, "tried": 0}
        | {"same_end": 0, "one_error": 0, "failed": 0, "points": 0}
        for kind, what in KINDS.items()
    }
    points, failures = {kind: set() for kind in KINDS}, []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        ended = runs.forked(lambda: runs.prepare(folder / "model"), folder / "prepare")
        assert ended.code == 0, ended.said
        begin = time.monotonic()
        with runs.whole_run(args.example, folder) as (example, whole, changes):
            seconds = time.monotonic() - begin
            numbers = {"kill": args.kills, "moment": args.moments, "full": args.full}
            numbers["seconds"] = (0.2 * seconds, 0.9 * seconds)
            for kind, how in cases(changes, rng, runs, numbers):
                if time.monotonic() - start > 60 * args.minutes:
                    break
                row = runs.disturbed(example, folder / "run", whole, **how)
                ends = (row["first"], row["then"])
                failed = any(end.startswith("failed") for end in ends)
                rows[kind]["tried"] += 1
                rows[kind]["failed" if failed else row["then"].replace(" ", "_")] += 1
                points[kind].add(row["point"])
                rows[kind]["points"] = len(points[kind])
                if failed:
                    failures.append(row | how)
                print(kind, row, flush=True)
                if args.output:
                    never = sorted({*changes} - points["kill"])
                    content = {"changes": len(changes), "kinds": len({*changes})}
                    content |= {"never_hit": never, "failures": failures}
                    content["seconds"] = round(time.monotonic() - start)
                    runs.apart(
                        lambda content=content: record.write(
                            args.output, record.record(rows.values()) | content
                        )
                    )
    for row in rows.values():
        print(row)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
