"""Command lines that say in one line what is wrong."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn


class UserError(Exception):
    """What the user can mend; the message is one line."""


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


def positive(kind: type) -> Callable[[str], Any]:
    """The type of an argument greater than zero, an int or a float."""
    expected = "an integer of at least 1" if kind is int else "a number above 0"

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be {expected}; got {text}")
        return value

    return convert


at_least_one = positive(int)
