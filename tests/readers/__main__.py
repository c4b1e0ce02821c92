"""Reads many files that were changed at random.

python -m tests.readers --files 100000 --output docs/trust/readers.json
"""

import concurrent.futures
import math
import multiprocessing
import pathlib
import sys

from examples.common import cli, record
from tests.readers import fuzz
from tests.readers.targets import TARGETS

OUTCOMES = ("same", "another", "refused", "failed")
PART = 1000  # Files that a process reads at a time.


def main():
    parser = cli.parser(__doc__)
    cli.add_record(parser)
    parser.add_argument("--files", type=cli.at_least_one, default=1000)
    parser.add_argument("--processes", type=cli.at_least_one, default=1)
    parser.add_argument("--keep", type=pathlib.Path, help="folder for what failed")
    parser.add_argument("--only", choices=TARGETS, nargs="*", default=[*TARGETS])
    args = parser.parse_args()
    jobs = []
    for name in args.only:
        number = math.ceil(args.files * TARGETS[name].share / 100)
        for seed, start in enumerate(range(0, number, PART)):
            jobs.append((name, min(PART, number - start), seed, args.keep))
    rows = {
        name: {"file": name, "tried": 0} | dict.fromkeys(OUTCOMES, 0)
        for name in args.only
    }
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.processes, context) as executor:
        for name, counts, slowest, peak in executor.map(
            fuzz.part, *zip(*jobs, strict=True)
        ):
            row = rows[name]
            for found, count in counts.items():
                if found.startswith("failed"):
                    print(name, found, file=sys.stderr, flush=True)
                row["tried"] += count
                row[found.split()[0].strip(":")] += count
            row["slowest_s"] = max(row.get("slowest_s", 0.0), slowest)
            row["peak_mib"] = max(row.get("peak_mib", 0), round(peak))
    for row in rows.values():
        print(row)
    if args.output:
        total = {"file": "all", "peak_mib": max(r["peak_mib"] for r in rows.values())}
        total["slowest_s"] = max(r["slowest_s"] for r in rows.values())
        for name in ("tried", *OUTCOMES):
            total[name] = sum(row[name] for row in rows.values())
        record.write(args.output, record.record([*rows.values(), total]))
    sys.exit(any(row["failed"] for row in rows.values()))


if __name__ == "__main__":
    main()
