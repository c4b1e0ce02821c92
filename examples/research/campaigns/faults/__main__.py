"""Disturbs a training program at each change of its files, and counts how runs end.

    python -m campaigns.faults --output records/trust/faults_tpu.json

With `--resume`, kills are added to the record, first at the kinds of changes that no
kill has hit yet. It needs a C compiler.
"""

import concurrent.futures
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from campaigns.faults import build
from common import options

KINDS = {
    "kill": "killed at a change of a file",
    "moment": "killed at a random moment",
    "full": "disk full from a change of a file on",
}


def work(settings: dict[str, Any], never: list[str] | None) -> None:
    """The cases of one worker, each printed as a line of JSON."""
    from campaigns.faults import cases, runs

    index, count = map(int, settings["part"].split("/"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        runs.whole_run(folder / "whole")
        # The second compiles nothing: its time is the time of others.
        whole = runs.whole_run(folder / "whole")
        say({"changes": whole.changes})
        kills, seed = settings["kills"], settings["seed"]
        if never is None:
            numbers = kills, settings["moments"], settings["full"], seed
            found = cases.cases(*whole, *numbers)
        else:
            found = cases.more_kills(whole.changes, never, kills, seed)
        for kind, how in found[index::count]:
            row = runs.disturbed(folder / "run", folder / "whole", **how)
            if row["first"] == "killed" and "kind" in how:
                # Another thread may have begun a change since.
                row["point"] = how["kind"]
            say({"what": kind} | how | row)


def say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


class Record:
    """The record of a campaign, written after each run."""

    def __init__(self, output: Path | None, before: dict[str, Any] | None):
        self._output, self._before = output, before or {}
        empty = {"tried": 0, "same_end": 0, "one_error": 0, "failed": 0, "points": 0}
        self._rows: dict[str, dict[str, Any]] = {
            kind: {"example": "tpu", "what": what} | empty
            for kind, what in KINDS.items()
        }
        self.failures: list[Any] = []
        self._never: set[str] | None = None
        if before:
            self._rows = dict(zip(KINDS, before["rows"], strict=True))
            self.failures = before["failures"]
            self._never = set(before["never_killed_at"])
        self._points: dict[str, set[str]] = {kind: set() for kind in KINDS}
        self._changes: list[str] = []

    def take(self, row: dict[str, Any]) -> None:
        """Takes what a worker says: the changes of a run, or how one ended."""
        if "changes" in row:
            self._changes = row["changes"]
            return
        kind, counts = row["what"], self._rows[row["what"]]
        failed = any(row[name].startswith("failed") for name in ("first", "then"))
        counts["tried"] += 1
        counts["failed" if failed else row["then"].replace(" ", "_")] += 1
        new = row["point"] not in self._points[kind]
        counts["points"] += new and (self._never is None or row["point"] in self._never)
        self._points[kind].add(row["point"])
        if failed:
            self.failures.append(row)
        print(row, flush=True)
        if self._output:
            self._write(self._output)

    def _write(self, output: Path) -> None:
        from common import record

        possible = {*self._changes} if self._never is None else self._never
        content = record.record(self._rows.values()) | {
            "changes": len(self._changes),
            "kinds": len({*self._changes}),
            "never_killed_at": sorted(possible - self._points["kill"]),
            "failures": self.failures,
        }
        content["seconds"] += self._before.get("seconds", 0)
        record.write(output, content)

    def show(self) -> None:
        for row in self._rows.values():
            print(row)


def gather(processes: int, record: Record) -> None:
    """Starts the workers, and puts what they say into the record."""
    with tempfile.TemporaryDirectory() as folder:
        environment = build.environment(Path(folder))
        command = [sys.executable, "-m", "campaigns.faults", *sys.argv[1:], "--part"]
        workers = [
            subprocess.Popen(
                [*command, f"{i}/{processes}"],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(processes)
        ]
        for line in interleaved(workers):
            record.take(json.loads(line))
        if any(worker.wait() for worker in workers):
            raise click.ClickException("a worker failed; its error is above")


def interleaved(workers: list[subprocess.Popen[str]]) -> Iterator[str]:
    """The lines of all workers, as they come."""
    with concurrent.futures.ThreadPoolExecutor(len(workers)) as threads:
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


@options.command(__doc__)
@options.output
@options.resume
@click.option("--kills", type=options.COUNT, default=150)
@click.option("--moments", type=options.COUNT, default=50)
@click.option("--full", type=options.COUNT, default=100)
@click.option("--processes", type=options.COUNT, default=1)
@click.option("--seed", type=int, default=0)
@click.option("--part", hidden=True)
def main(output: Path | None, resume: bool, **settings: Any) -> None:
    before = json.loads(output.read_bytes()) if resume and output else None
    if settings["part"] is not None:
        work(settings, before and before["never_killed_at"])
        return
    record = Record(output, before)
    gather(settings["processes"], record)
    record.show()
    sys.exit(bool(record.failures))


if __name__ == "__main__":
    main()
