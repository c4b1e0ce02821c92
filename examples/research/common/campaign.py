"""The frame of all that is measured case by case: a command, its record, its rows."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import click
from tabulate import tabulate

from common import options
from common.record import Row, read, record, write
from common.tables import Table

# The identity of rows, and a function that measures the rest of them.
Case = tuple[Row, Callable[[], Row | list[Row]]]


class Campaign(NamedTuple):
    """The cases that a command measures, and what it makes of them.

    Attributes:
      cases: Its cases, in their order.
      derived: Makes the record's rows from the rows measured so far.
      about: Other contents of the record.
      failed: Names what is wrong in the record's rows.
      tables: Makes the tables that are printed, of the record; without it, rows are.
      keeps: Whether a record that is resumed keeps rows of other cases.
    """

    cases: Iterable[Case]
    derived: Callable[[list[Row]], list[Row]] = list
    about: Mapping[str, Any] = MappingProxyType({})
    failed: Callable[[list[Row]], list[str]] = lambda rows: []
    tables: Callable[[dict[str, Any]], list[Table]] | None = None
    keeps: bool = False


def campaign(doc: str) -> Callable[[Callable[..., Campaign]], click.Command]:
    """A command whose record can be resumed, and whose status is 1 if a check failed.

    Args:
      doc: The docstring of the module.

    Returns:
      A decorator of a function from the command's own options to a `Campaign`.
    """

    def decorated(made: Callable[..., Campaign]) -> click.Command:
        @functools.wraps(made)
        def main(output: Path | None, resume: bool, **own: Any) -> None:
            measured = made(**own)
            rows = _collected(output, resume, measured)
            if measured.tables is None:
                for _, table in itertools.groupby(filter(_is_short, rows), tuple):
                    print(tabulate(table, headers="keys", floatfmt=".4g"), end="\n\n")
            else:
                for made_table in measured.tables({"rows": rows}):
                    made_table.show()
            if found := measured.failed(rows):
                raise click.ClickException("\n\n".join(("Failed:", *found)))

        return options.command(doc)(options.output(options.resume(main)))

    return decorated


def _is_short(row: Row) -> bool:
    return not any(isinstance(value, list | dict) for value in row.values())


def _collected(output: Path | None, resume: bool, of: Campaign) -> list[Row]:
    """Measures one case after another, and writes a record after each.

    Args:
      output: The file to write.
      resume: Whether to take the rows that are there.
      of: The campaign.

    Returns:
      The record's rows.
    """
    cases = list(of.cases)
    names = tuple(cases[0][0])
    rows: dict[tuple[Any, ...], list[Row]] = {}
    before, versions = 0, {}
    if resume and output is not None and output.exists():
        found = read(output)
        for row in found["rows"]:
            rows.setdefault(tuple(map(row.get, names)), []).append(row)
        before, versions = found.get("seconds", 0), found["versions"]
    keys = [tuple(case.values()) for case, _ in cases]
    # Derived rows have no identity.
    nothing = (None,) * len(names)
    others = [k for k in rows if k not in {nothing, *keys}] if of.keeps else []
    for key, (case, measure) in zip(keys, cases, strict=True):
        if new := key not in rows:
            measured = measure()
            several = measured if isinstance(measured, list) else [measured]
            rows[key] = [case | row for row in several]
        for row in rows[key]:
            print(*row.values(), flush=True)
        made = of.derived([row for k in [*others, *keys] for row in rows.get(k, [])])
        # Rows of the file are not written again one after another.
        if output is not None and (new or key == keys[-1]):
            content = record(made) | dict(of.about)
            # The time of all rows, with the rows of previous runs.
            content["seconds"] += before
            content["versions"] = versions | content["versions"]
            write(output, content)
    return made
