"""Runs the fuzzer of programs, and writes down what it met.

    python -m campaigns.fuzz --programs 100000 --output records/trust/fuzz.json

The record is written after each chunk of programs, and ``--resume`` continues after the
last. ``--seed 12`` alone checks the program of that seed; a failing program is printed
as a test, as short as it can be made. The exit status is 1 if any failed.
"""

import os
import sys

# Programs are compiled to be run once; before JAX is imported.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)

from common import cli, record

from . import chunks
from .report import rows


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    cli.add_record(parser, resume=True)
    args = parser.parse_args()
    total, seconds, versions = chunks.empty(), 0, {}
    if args.resume and args.output.exists():
        before = record.read(args.output)
        total, seconds = before["total"], before["seconds"]
        versions = before["versions"]
    first, last = args.seed + total["programs"], args.seed + args.programs
    for report in chunks.run(range(first, last), args.processes):
        for failed in report["failures"]:
            print(failed, "\n", flush=True)
        total = chunks.merged(total, report)
        print(f"{total['programs']} programs", file=sys.stderr, flush=True)
        if args.output is not None:
            content = record.record(rows(total)) | {"total": total}
            content["seconds"] += seconds
            content["versions"] = versions | content["versions"]
            record.write(args.output, content)
    sys.exit(bool(total["failures"]))


if __name__ == "__main__":
    main()
