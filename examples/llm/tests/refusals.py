"""Readers refuse in one line, and in bounded memory."""

import tracemalloc

import pytest

DEPTH = 10**5
DEEP = b"[" * DEPTH + b"]" * DEPTH
DEEP_OBJECT = b'{"a":' * DEPTH + b"1" + b"}" * DEPTH


def refused(read, *arguments, match, kind=ValueError):
    with pytest.raises(kind, match=match) as error:
        read(*arguments)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 1000


def takes_no_memory(read, *arguments, match):
    tracemalloc.start()
    try:
        refused(read, *arguments, match=match)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()
