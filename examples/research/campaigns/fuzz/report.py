"""The rows of a record: what was checked, of which primitives."""

import collections
from typing import Any

from .build import MAKERS
from .left_out import LEFT_OUT

OUTCOMES = ("same", "rounded", "unstable", "mismatch")


def derived(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chunks of programs, their totals, and what was found of each property."""
    tables: dict[str, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for chunk in chunks:
        for key, count in chunk["checks"].items():
            name, outcome = key.rsplit(": ", 1)
            if outcome in OUTCOMES:
                tables[name][outcome] += count
    met = {name for chunk in chunks for name in chunk["primitives"]}
    totals = {
        "table": "totals",
        "programs": sum(chunk["programs"] for chunk in chunks),
        "checks": sum(counts.total() for counts in tables.values()),
        "primitives": len(met & set(MAKERS)),
        "left_out": len(LEFT_OUT),
        "mismatches": len(failures(chunks)),
    }
    properties = [
        {"table": "properties", "property": name}
        | {outcome: counts[outcome] for outcome in OUTCOMES}
        for name, counts in tables.items()
    ]
    return [*chunks, totals, *properties]


def failures(rows: list[dict[str, Any]]) -> list[str]:
    return [text for row in rows for text in row.get("failures", [])]
