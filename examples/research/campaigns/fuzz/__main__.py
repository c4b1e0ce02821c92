"""Runs the fuzzer of programs, and writes down what it met.

    python -m campaigns.fuzz --programs 100000 --output records/trust/fuzz.json

The record is written after each chunk of programs, and ``--resume`` continues after the
last. ``--seed 12 --programs 1`` checks one program. A failing program is printed as a
test, as short as it can be made. The exit status is 1 if any failed.
"""

import os
import sys
from pathlib import Path

import click

# Programs are compiled to be run once; before JAX is imported.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)

from common import options, record

from . import chunks
from .report import rows


@options.command(__doc__)
@click.option("--programs", type=options.COUNT, default=100)
@click.option("--processes", type=options.COUNT, default=1)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, help="Of the first program."
)
@options.output
@options.resume
def main(
    programs: int, processes: int, seed: int, output: Path | None, resume: bool
) -> None:
    total, seconds, versions = chunks.empty(), 0, {}
    if resume and output and output.exists():
        before = record.read(output)
        total, seconds = before["total"], before["seconds"]
        versions = before["versions"]
    first, last = seed + total["programs"], seed + programs
    for report in chunks.run(range(first, last), processes):
        for failed in report["failures"]:
            print(failed, "\n", flush=True)
        total = chunks.merged(total, report)
        print(f"{total['programs']} programs", file=sys.stderr, flush=True)
        if output:
            content = record.record(rows(total)) | {"total": total}
            content["seconds"] += seconds
            content["versions"] = versions | content["versions"]
            record.write(output, content)
    sys.exit(bool(total["failures"]))


if __name__ == "__main__":
    main()
