"""The rows of a record: what was checked, of which primitives."""

from collections import Counter, defaultdict
from typing import Any

from .build import MAKERS
from .left_out import LEFT_OUT

OUTCOMES = ("same", "rounded", "unstable", "mismatch")
WORDS = {
    "bits": "bit for bit the definition",
    "rounded": "the definition, to rounding",
    "compiled": "under `jit`",
    "batched": "under `vmap`",
    "differentiated": "under `grad`",
    "refused": "raises what `fun` raises",
}


def rows(total: dict[str, Any]) -> list[dict[str, Any]]:
    return [_totals(total), *_properties(total), *_distributions(total)]


def _split(total: dict[str, Any]) -> list[tuple[str, str, str, str, int]]:
    """Property, distribution, scale, outcome and count."""
    found = []
    for key, count in total["checks"].items():
        name, rest = key.split(" ", 1)
        distribution, scale, outcome = rest.rsplit(" ", 2)
        if outcome in OUTCOMES:
            found.append((name, distribution, scale, outcome, count))
    return found


def _totals(total: dict[str, Any]) -> dict[str, Any]:
    return {
        "table": "totals",
        "programs": total["programs"],
        "checks": sum(count for *_, count in _split(total)),
        "primitives": len(set(total["primitives"]) & set(MAKERS)),
        "left_out": len(LEFT_OUT),
        "mismatches": len(total["failures"]),
    }


def _counts(total: dict[str, Any], *which: int) -> dict[tuple[str, ...], Counter]:
    table: dict[tuple[str, ...], Counter] = defaultdict(Counter)
    for row in _split(total):
        table[tuple(row[i] for i in which)][row[3]] += row[4]
    return table


def _properties(total: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"table": "properties", "property": _words(name, scale)}
        | {outcome: counts[outcome] for outcome in OUTCOMES}
        for (name, scale), counts in _counts(total, 0, 2).items()
    ]


def _words(name: str, scale: str) -> str:
    return WORDS[name] + (", at scale 0" if scale == "0" else "")


def _distributions(total: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"table": "distributions", "distribution": distribution}
        | {o: counts[o] for o in OUTCOMES}
        for (distribution,), counts in sorted(_counts(total, 1).items())
    ]
