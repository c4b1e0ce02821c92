"""The values of a run in a file, from which the run can be rebuilt.

A line of JSON for the run, then one for each step. Each ends with a checksum of itself
and of all lines before it, so that a line that was changed, lost or moved is found. A
last line without its end was being written when the run was stopped: it is cut.

A checksum finds accidents, but not forgeries. So a line that no run could have written
is refused.
"""

import hashlib
import json
import os
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from radazo_jax._src import checks

_LONGEST = 1 << 26  # Bytes of a line that are read.
_BEGIN = b'{"fun":'  # Of the line of a run.


class Record(NamedTuple):
    """A step of a journal.

    Attributes:
      step: The number of the step.
      values: The values at the points, [n], or [n, G] if the function returns several;
        non-finite if an evaluation failed. The first one alone, if the other points
        were not evaluated.
      params: The checksum of the parameters before the step; 0 if it is not known.
      seconds: Duration of the evaluations.
      failures: Texts about evaluations that failed.
      mean: The mean of the values at the points, if `values` are their signs.
    """

    step: int
    values: np.ndarray
    params: int
    seconds: float
    failures: tuple[str, ...] = ()
    mean: float | None = None

    @property
    def lowest(self) -> Any:
        """The lowest finite value of a point, infinite if there is none."""
        values = of_points(self.values)
        return np.min(values, initial=np.inf, where=np.isfinite(values))


def of_points(values: np.ndarray) -> np.ndarray:
    """A value for each point, [n]: the mean if the function returns several."""
    with np.errstate(all="ignore"):  # The mean of infinities of both signs is NaN.
        return values if values.ndim == 1 else values.mean(1, dtype=values.dtype)


class Journal(NamedTuple):
    """The contents of a file.

    Attributes:
      run: The line of the run.
      records: The steps, complete and in order.
      size: The bytes of all complete lines.
      checksum: The checksum of the last line.
    """

    run: dict[str, Any]
    records: list[Record]
    size: int
    checksum: int


def read(path: str | os.PathLike[str]) -> Journal | None:
    """Reads a journal; `None` if there is none yet.

    Raises:
      ValueError: If a line is not what was written.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115  (It is closed below.)
    except FileNotFoundError:
        return None
    run: dict[str, Any] | None = None
    records: list[Record] = []
    size = checksum = 0
    with file:
        lines = iter(lambda: file.readline(_LONGEST), b"")
        for number, line in enumerate(lines):
            if number == 0 and line[: len(_BEGIN)] != _BEGIN[: len(line)]:
                raise ValueError(
                    "journal must be a file that a run wrote, or a new one; got "
                    f"{os.fspath(path)!r}, which begins with {line[:20]!r}. Give "
                    "another path." + checks.refer_to("minimize_black_box")
                )
            if not line.endswith(b"\n"):
                _check_torn(path, number, line)
                break
            body, _, end = line[:-1].rpartition(b',"crc":"')
            checksum = zlib.crc32(body, checksum)
            if end != b'%08x"}' % checksum:
                raise _damaged(path, number, "its checksum is wrong")
            try:
                fields = json.loads(body + b"}")
                if run is None:
                    run = _run(fields)
                else:
                    records.append(_record(fields, number - 1, run))
            except _OTHER as error:
                reason = f"it is not what a run writes ({error!r:.100})"
                raise _damaged(path, number, reason) from None
            size += len(line)
    return None if run is None else Journal(run, records, size, checksum)


# The errors of reading a line that is something else: nested too deep, say.
_OTHER = (ValueError, TypeError, LookupError, OverflowError, RecursionError)


def _run(fields: dict[str, Any]) -> dict[str, Any]:
    """The line of a run, of which the entries are as replaying needs them."""
    first, second = fields["key"]
    if not all(type(x) is int and 0 <= x < 1 << 32 for x in (first, second)):
        raise ValueError(f"its key is {fields['key']!r}")
    if fields["dtype"] not in ("float32", "float64"):
        raise ValueError(f"its dtype is {fields['dtype']!r}")
    return fields | {name: fields[name] for name in ("fun", "params", "points")}


def _record(fields: dict[str, Any], step: int, run: dict[str, Any]) -> Record:
    """The line of a step."""
    values = np.array(_read_numbers(fields["values"]), run["dtype"])
    record = Record(
        **fields
        | {
            "values": values,
            "params": int(fields["params"], 16),
            "failures": tuple(map(str, fields.get("failures", ()))),
        }
    )
    if not isinstance(record.mean, float | None):
        raise ValueError(f"its mean is {record.mean!r}")
    if type(record.step) is not int or record.step != step:
        raise ValueError(f"it is of step {record.step!r}")
    if values.ndim not in (1, 2) or not values.size:
        raise ValueError(f"its values have the shape {values.shape}")
    if len(values) not in (1, run["points"]):
        raise ValueError(f"it has {len(values)} values, and not {run['points']}")
    return record


def _check_torn(path: str | os.PathLike[str], number: int, line: bytes) -> None:
    """Warns of a line without its end if a run began to write it."""
    begin = b'{"step":%d,' % (number - 1) if number else _BEGIN
    if len(line) == _LONGEST or not (line.startswith(begin) or begin.startswith(line)):
        raise _damaged(path, number, "it is not what a run writes")
    warnings.warn(
        f"journal {os.fspath(path)}: its last line was not complete, and is cut. The "
        "step is evaluated again.",
        stacklevel=3,
    )


@contextmanager
def appending(
    path: str | os.PathLike[str], run: dict[str, Any], found: Journal | None
) -> Iterator[Callable[[Record], None]]:
    """Opens a journal to append records, each of which is on disk at once.

    Args:
      path: The file.
      run: The line of the run, for a new file.
      found: The contents of the file, if it exists.
    """
    checksum, size = (found.checksum, found.size) if found else (0, 0)
    with open(path, "ab", buffering=0) as file:

        def write(fields: dict[str, Any]) -> None:
            nonlocal checksum, size
            body = json.dumps(fields, separators=(",", ":")).encode()[:-1]
            checksum = zlib.crc32(body, checksum)
            line = body + b',"crc":"%08x"}\n' % checksum
            written = 0
            try:
                while written < len(line):
                    written += file.write(line[written:]) or 0
            except OSError:
                file.truncate(size)
                raise
            size += len(line)

        file.truncate(size)
        if found is None:
            write(run)

        def append(record: Record) -> None:
            values = _written_numbers(record.values)
            fields = record._asdict() | {
                "values": values,
                "params": f"{record.params:08x}",
                "seconds": float(f"{record.seconds:.3g}"),
            }
            for name in ("failures", "mean"):
                if fields[name] in (None, ()):
                    del fields[name]
            write(fields)

        yield append


def check_same_run(
    path: str | os.PathLike[str], found: dict[str, Any], run: dict[str, Any]
) -> None:
    """Raises if a journal belongs to another run."""
    for name, value in run.items():
        # Devices may differ: the checksums of the parameters compare what they compute.
        if name != "device" and found.get(name) != value:
            raise ValueError(
                f"journal {os.fspath(path)} must be of this run; its {name} is "
                f"{found.get(name)!r}, that of the call is {value!r}. Give another "
                "path, or the arguments that it was written with."
            )


def identity(fun: Any) -> str:
    """A name for a function that changes when its code does."""
    while hasattr(fun, "__wrapped__"):
        fun = fun.__wrapped__
    owner = fun if hasattr(fun, "__qualname__") else type(fun)
    name = f"{owner.__module__}.{owner.__qualname__}"
    code = getattr(fun, "__code__", None)
    if code is None:
        code = getattr(fun.__call__, "__code__", None)
    if code is None:
        return name
    digest = hashlib.sha256()
    for part in _parts(code):
        digest.update(repr(part).encode())
    return f"{name} {digest.hexdigest()[:8]}"


def _parts(code: types.CodeType) -> Iterator[Any]:
    """The parts of a function: its instructions, names and constants."""
    yield from (code.co_code, code.co_names, code.co_varnames)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)
        elif isinstance(constant, frozenset):
            yield sorted(map(repr, constant))
        else:
            yield constant


def _written_numbers(values: np.ndarray) -> list[Any]:
    """The shortest numbers that are read as the values."""
    if values.ndim > 1:
        return [_written_numbers(row) for row in values]
    return [float(str(x)) if np.isfinite(x) else str(x) for x in values]


def _read_numbers(values: Any) -> Any:
    """Numbers, and lists of them."""
    return [_read_numbers(x) if isinstance(x, list) else float(x) for x in values]


def _damaged(path: str | os.PathLike[str], number: int, problem: str) -> ValueError:
    return ValueError(
        f"journal {os.fspath(path)} is damaged in line {number + 1}: {problem}. Cut "
        "this line and those after it to continue from the step before."
        + checks.refer_to("minimize_black_box")
    )
