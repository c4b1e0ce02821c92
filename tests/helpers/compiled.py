"""Counts of compilations, and of the bytes that a program sends between devices."""

import contextlib
import logging
import math
import re

import jax

_SENT = re.compile(
    r"= (.*?) (?:all-reduce|all-gather|all-to-all|collective-\w+|reduce-scatter)"
    r"(?:-start)?\("
)
_ARRAY = re.compile(r"[a-z]+(\d+)[a-z\d]*\[([\d,]*)\]")


def sent(compiled):
    """The bytes that each collective of a program makes, the largest last.

    A collective in a loop is listed once.
    """
    found = []
    for result in _SENT.findall(compiled.as_text()):
        found.append(
            sum(
                int(bits) // 8 * math.prod(map(int, filter(None, shape.split(","))))
                for bits, shape in _ARRAY.findall(result)
            )
        )
    return sorted(found)


@contextlib.contextmanager
def compilations(caplog):
    """Collects what is compiled inside."""
    found = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        yield found
        texts = [record.getMessage() for record in caplog.records]
    found += [text for text in texts if text.startswith("Finished XLA compilation")]
