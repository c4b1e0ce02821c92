"""Command lines that say in one line what is wrong."""

import argparse
import math
import pathlib
import re
from collections.abc import Callable
from typing import NoReturn


class UserError(ValueError):
    """An error that the user can fix; the message is one line."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def parser(doc: str) -> Parser:
    """A parser that is described by the first line of a script."""
    return Parser(
        description=doc.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def add_record(parser: Parser, *, resume: bool = False, plot: bool = False) -> None:
    """Adds the options of a script that writes a record, and resumes or draws it."""
    parser.add_argument("--output", type=pathlib.Path, help="a JSON file")
    if resume:
        parser.add_argument(
            "--resume", action="store_true", help="take the rows that --output has"
        )
    if plot:
        parser.add_argument("--plot", type=pathlib.Path, help="where to put a figure")


def integer(least: int, most: float = math.inf) -> Callable[[str], int]:
    """The type of an argument in a range."""
    expected = f"an integer of at least {least}"
    if most < math.inf:
        expected = f"an integer from {least} to {most}"

    def convert(text: str) -> int:
        value = int(text) if re.fullmatch("-?[0-9]+", text) else None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {expected}; got {text}")
        return value

    return convert


def positive(text: str) -> float:
    """The type of an argument that is a number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text}")
    return value


at_least_one = integer(1)
