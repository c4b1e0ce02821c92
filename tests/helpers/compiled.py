"""Bytes that a compiled program sends between devices."""

import math
import re

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
