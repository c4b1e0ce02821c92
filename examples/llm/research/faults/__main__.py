"""Disturbs a run at each change of its files, and counts how the runs end.

    python -m research.faults --output research/records/faults_llm.json

With `--resume`, kills are added to the record, first at the kinds of changes that no
kill has hit yet.
"""

import argparse
import concurrent.futures
import itertools
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import click

from research import common
from research.faults import build

KINDS = {
    "kill": "killed at a change of a file",
    "moment": "killed at a random moment",
    "full": "disk full from a change of a file on",
}
NEED_SPACE = ("open", "write", "mkdir", "link")


def cases(changes, seconds, args, runs):
    """The faults of a run, each kind in turn: for each worker its part."""
    index, count = args.part
    rng = random.Random(args.seed)

    def killed(at):
        how = (runs.occurrence(changes, i) | {"mode": runs.KILL} for i in at)
        return [("kill", each) for each in how]

    if args.resume:
        never = [kind for kind in args.before["never_killed_at"] if kind in changes]
        others = [i for i in range(len(changes)) if changes[i] not in never]
        at = [changes.index(kind) for kind in never] + rng.sample(others, len(others))
        return killed(at[: args.kills])[index::count]
    kills = runs.chosen(changes, args.kills, rng)
    moments = [rng.uniform(0.3, 1.0) * seconds for _ in range(args.moments)]
    space = [at for at, change in enumerate(changes) if change.split()[0] in NEED_SPACE]
    full = runs.chosen([changes[at] for at in space], args.full, rng)
    lists = [
        killed(kills),
        [("moment", {"kill_after": after}) for after in moments],
        [("full", {"at": space[i], "mode": runs.FULL}) for i in full],
    ]
    found = [case for row in itertools.zip_longest(*lists) for case in row if case]
    return found[index::count]


def work(args):
    """The cases of one worker, each printed as a line of JSON."""
    from research.faults import runs

    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        ended = runs.forked(lambda: runs.prepare(folder / "model"), folder / "prepare")
        assert ended.code == 0, ended.said
        example = runs.example(folder)
        for _ in range(
            2
        ):  # The second compiles nothing: its time is the time of others.
            whole = runs.whole_run(example, folder / "whole")
        say({"changes": whole.changes})
        for kind, how in cases(whole.changes, whole.seconds, args, runs):
            if time.monotonic() > end:
                return
            row = runs.disturbed(example, folder / "run", folder / "whole", **how)
            if row["first"] == "killed" and "kind" in how:
                # Another thread may have begun a change since.
                row["point"] = how["kind"]
            say({"what": kind} | how | row)


def say(row):
    print(json.dumps(row), flush=True)


def gather(args):
    """All that the workers say, and a record of it after each line."""

    rows = {
        kind: {"example": "llm", "what": what, "tried": 0}
        | {"same_end": 0, "one_error": 0, "failed": 0, "points": 0}
        for kind, what in KINDS.items()
    }
    points, failures, changes = {kind: set() for kind in KINDS}, [], []
    before, never = args.before, None
    if args.resume:
        rows = dict(zip(KINDS, before["rows"], strict=True))
        failures, never = before["failures"], set(before["never_killed_at"])

    def take(line):
        row = json.loads(line)
        if "changes" in row:
            changes[:] = row["changes"]
            return
        kind = row["what"]
        failed = any(row[name].startswith("failed") for name in ("first", "then"))
        rows[kind]["tried"] += 1
        rows[kind]["failed" if failed else row["then"].replace(" ", "_")] += 1
        new = row["point"] not in points[kind]
        rows[kind]["points"] += new and (never is None or row["point"] in never)
        points[kind].add(row["point"])
        if failed:
            failures.append(row)
        print(row, flush=True)
        if args.output:
            left = sorted(({*changes} if never is None else never) - points["kill"])
            content = {"changes": len(changes), "kinds": len({*changes})}
            content |= {"never_killed_at": left, "failures": failures}
            content = common.record(rows.values()) | content
            content["seconds"] += before.get("seconds", 0)
            common.write(args.output, content)

    with tempfile.TemporaryDirectory() as folder:
        environment = build.environment(pathlib.Path(folder))
        command = [sys.executable, "-m", "research.faults", *sys.argv[1:], "--part"]
        workers = [
            subprocess.Popen(
                [*command, f"{i}/{args.processes}"],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(args.processes)
        ]
        with concurrent.futures.ThreadPoolExecutor(args.processes) as threads:
            for line in interleaved(workers, threads):
                take(line)
        assert all(worker.wait() == 0 for worker in workers)
    for row in rows.values():
        print(row)
    return bool(failures)


def interleaved(workers, threads):
    """The lines of all workers, as they come."""
    waiting = {threads.submit(w.stdout.readline): w for w in workers}
    while waiting:
        done, _ = concurrent.futures.wait(
            waiting, return_when=concurrent.futures.FIRST_COMPLETED
        )
        for future in done:
            worker = waiting.pop(future)
            if line := future.result():
                yield line
                waiting[threads.submit(worker.stdout.readline)] = worker


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=pathlib.Path), help="A JSON file.")
@click.option("--resume", is_flag=True, help="Take the rows of --output.")
@click.option("--kills", type=click.IntRange(1), default=150)
@click.option("--moments", type=click.IntRange(1), default=50)
@click.option("--full", type=click.IntRange(1), default=100)
@click.option("--minutes", type=float, default=1000.0)
@click.option("--processes", type=click.IntRange(1), default=1)
@click.option("--seed", default=0)
@click.option("--part", hidden=True)
def main(**options):
    args = argparse.Namespace(**options)
    args.before = json.loads(args.output.read_bytes()) if args.resume else {}
    if args.part is None:
        sys.exit(gather(args))
    args.part = tuple(map(int, args.part.split("/")))
    work(args)


if __name__ == "__main__":
    main()
