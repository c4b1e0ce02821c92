"""Files that are almost what a reader expects."""

import pickle
import random
import re
from collections.abc import Callable

DEPTH = 10**5
NUMBERS = [
    *(b"0", b"-1", b"1e400", b"NaN", b"-Infinity", b"true", b"null", b'""', b"[]"),
    *(b"%d" % n for n in (2**31, 2**32, 2**63, 2**64, 10**18)),
    b"9" * 5000,
]


class Planted:
    """If a pickle of it is ever read, the reading process ends."""

    def __reduce__(self):
        return exit, ("a pickle was read",)


PICKLE = pickle.dumps(Planted())


def flipped(content: bytearray, rng: random.Random) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def overwritten(content: bytearray, rng: random.Random) -> None:
    content[rng.randrange(len(content))] = rng.choice([0, 10, 34, 44, 91, 123, 255])


def cut(content: bytearray, rng: random.Random) -> None:
    del content[rng.randrange(len(content)) :]


def removed(content: bytearray, rng: random.Random) -> None:
    start, end = _slice(content, rng)
    del content[start:end]


def repeated(content: bytearray, rng: random.Random) -> None:
    start, end = _slice(content, rng)
    content[end:end] = content[start:end] * rng.choice([1, 1, 2, 1000])


def moved(content: bytearray, rng: random.Random) -> None:
    start, end = _slice(content, rng)
    part = content[start:end]
    del content[start:end]
    to = rng.randrange(len(content) + 1)
    content[to:to] = part


def inserted(content: bytearray, rng: random.Random) -> None:
    place = rng.randrange(len(content) + 1)
    content[place:place] = rng.randbytes(rng.choice([1, 4, 100]))


def renumbered(content: bytearray, rng: random.Random) -> None:
    found = list(re.finditer(rb"-?\d+(\.\d+)?", content[: 1 << 16]))
    if found:
        start, end = rng.choice(found).span()
        content[start:end] = rng.choice(NUMBERS)


def header(content: bytearray, rng: random.Random) -> None:
    """The first eight bytes: of safetensors, the length of the header."""
    content[:8] = rng.choice([0, 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")


def nested(content: bytearray, rng: random.Random) -> None:
    begin, end = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    deep = begin * DEPTH + b"0" + end * DEPTH
    place = content.find(b":", rng.randrange(len(content))) + 1
    content[place:place] = deep + b"," if rng.random() < 0.5 else deep
    if place == 0 and rng.random() < 0.5:
        content[:] = deep


def long(content: bytearray, rng: random.Random) -> None:
    place = rng.randrange(len(content) + 1)
    content[place:place] = rng.choice([b"a", b"\0", b"9", b" ", b"\n"]) * 10**6


def pickled(content: bytearray, rng: random.Random) -> None:
    if rng.random() < 0.5:
        content[:] = PICKLE
    else:
        place = rng.randrange(len(content) + 1)
        content[place:place] = PICKLE


_LIGHT: list[Callable[[bytearray, random.Random], None]] = [
    *(flipped, overwritten, cut, removed, repeated, moved, inserted, renumbered),
    header,
]
_HEAVY: list[Callable[[bytearray, random.Random], None]] = [nested, long, pickled]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Changed in one to three ways; one in fifty has a large one among them."""
    result = bytearray(content)
    for change in rng.choices(_LIGHT, k=rng.choice([1, 1, 2, 3])):
        if result:
            change(result, rng)
    if rng.random() < 0.02 and result:
        rng.choice(_HEAVY)(result, rng)
    return bytes(result)


def _slice(content: bytearray, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(content))
    return start, min(len(content), start + rng.choice([1, 2, 8, 64, 1024]))
