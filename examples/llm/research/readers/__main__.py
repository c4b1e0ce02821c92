"""Reads many files that were changed at random.

python -m research.readers --files 100000 --output research/records/readers.json
"""

import concurrent.futures
import math
import multiprocessing
import pathlib
import sys

import click

from research import common
from research.readers import fuzz
from research.readers.targets import TARGETS

OUTCOMES = ("same", "another", "refused", "failed")
PART = 1000  # Files that a process reads at a time.


@click.command(help=__doc__)
@common.output
@click.option("--files", type=common.POSITIVE, default=1000)
@click.option("--processes", type=common.POSITIVE, default=1)
@click.option(
    "--keep", type=click.Path(path_type=pathlib.Path), help="Folder for what failed."
)
@click.option("--only", type=click.Choice([*TARGETS]), multiple=True, default=TARGETS)
def main(output, files, processes, keep, only):
    jobs = []
    for name in only:
        number = math.ceil(files * TARGETS[name].share / 100)
        for seed, start in enumerate(range(0, number, PART)):
            jobs.append((name, min(PART, number - start), seed, keep))
    rows = {
        name: {"file": name, "tried": 0} | dict.fromkeys(OUTCOMES, 0) for name in only
    }
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context) as executor:
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
    if output:
        total = {"file": "all", "peak_mib": max(r["peak_mib"] for r in rows.values())}
        total["slowest_s"] = max(r["slowest_s"] for r in rows.values())
        for name in ("tried", *OUTCOMES):
            total[name] = sum(row[name] for row in rows.values())
        common.write(output, common.record([*rows.values(), total]))
    sys.exit(any(row["failed"] for row in rows.values()))


if __name__ == "__main__":
    main()
