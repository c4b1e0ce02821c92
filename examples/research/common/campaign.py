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
from common.record import Row, collect

# The identity of rows, and a function that measures the rest of them.
Case = tuple[Row, Callable[[], Row | list[Row]]]


class Campaign(NamedTuple):
    """The cases that a command measures, and what it makes of them.

    Attributes:
      cases: Its cases, in their order.
      derived: Makes the record's rows from the rows measured so far.
      about: Other contents of the record.
      failed: Names what is wrong in the record's rows.
    """

    cases: Iterable[Case]
    derived: Callable[[list[Row]], list[Row]] = list
    about: Mapping[str, Any] = MappingProxyType({})
    failed: Callable[[list[Row]], list[str]] = lambda rows: []


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
            cases, derived, about, failed = made(**own)
            rows = collect(output, resume, cases, derived, **about)
            for _, table in itertools.groupby(filter(_is_short, rows), tuple):
                print(tabulate(table, headers="keys", floatfmt=".4g"), end="\n\n")
            if found := failed(rows):
                raise click.ClickException("\n\n".join(("Failed:", *found)))

        return options.command(doc)(options.output(options.resume(main)))

    return decorated


def _is_short(row: Row) -> bool:
    return not any(isinstance(value, list | dict) for value in row.values())
