"""The values of a run in a file, from which the run can be rebuilt.

A line of JSON for the run, then one for each step. Each ends with a checksum of itself
and of all lines before it, so that a line that was changed, lost or moved is found. A
last line without its end was being written when the run was stopped: it is cut.

A checksum finds accidents, but not forgeries. So a line that no run could have written
is refused.
"""

import contextlib
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from radazo_jax._src import checks

Path = str | os.PathLike[str]

# The version of what lines mean. Files of another one are refused.
FORMAT = 3

_LONGEST = 1 << 26  # Bytes of a line that are read.
_LOCKED = (1 << 31) - 2  # The byte that is locked on Windows, after all lines.
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
        return lowest(of_points(self.values))[1]


def of_points(values: np.ndarray) -> np.ndarray:
    """A value for each point, [n]: the mean if the function returns several."""
    with np.errstate(all="ignore"):  # The mean of infinities of both signs is NaN.
        return values if values.ndim == 1 else values.mean(1, dtype=values.dtype)


def lowest(values: np.ndarray) -> tuple[int, Any]:
    """The place of the lowest finite value, and the value; infinite if there is none.

    Args:
      values: The values, [n], with n of at least 1.
    """
    finite = np.where(np.isfinite(values), values, np.inf)
    i = int(np.argmin(finite))
    return i, finite[i]


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


def read(path: Path) -> Journal | None:
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
                    run = _run(path, fields)
                else:
                    records.append(_record(fields, number - 1, run))
            except _OtherFormat:
                raise
            except _OTHER as error:
                reason = f"it is not what a run writes ({error!r:.100})"
                raise _damaged(path, number, reason) from None
            size += len(line)
    return None if run is None else Journal(run, records, size, checksum)


def run_of(path: Path) -> dict[str, Any] | None:
    """The line of the run in a journal; `None` if there is none that is complete."""
    try:
        with open(path, "rb") as file:
            line = file.readline(_LONGEST)
    except OSError:
        return None
    body, _, end = line.rpartition(b',"crc":"')
    if end != b'%08x"}\n' % zlib.crc32(body):
        return None
    run: dict[str, Any] = json.loads(body + b"}")
    return run


# The errors of reading a line that is something else: nested too deep, say.
_OTHER = (ValueError, TypeError, LookupError, OverflowError, RecursionError)


class _OtherFormat(ValueError):
    """The error of a journal that another version wrote."""


def _run(path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """The line of a run, of which the entries are as replaying needs them."""
    if fields.get("format") != FORMAT:
        raise _OtherFormat(
            f"journal {os.fspath(path)} must have the format {FORMAT}; got "
            f"{fields.get('format')!r}, of another version of radazo_jax. Give another "
            "path, or continue with the version that wrote it."
        )
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
    # Stages of the default method have numbers of points of their own.
    if len(values) not in (1, run["points"]) and not run.get("staged"):
        raise ValueError(f"it has {len(values)} values, and not {run['points']}")
    return record


def _check_torn(path: Path, number: int, line: bytes) -> None:
    """Warns of a line without its end if a run began to write it."""
    begin = b'{"step":%d,' % (number - 1) if number else _BEGIN
    # A loss of power may leave zeros, of a block that was not yet written.
    written = line.rstrip(b"\0")
    if len(line) == _LONGEST or not (
        written.startswith(begin) or begin.startswith(written)
    ):
        raise _damaged(path, number, "it is not what a run writes")
    checks.warn(
        f"journal {os.fspath(path)}: its last line was not complete, and is cut. The "
        "step is evaluated again."
    )


class File:
    """A journal that is open for writing.

    Attributes:
      found: The contents of the file, if it exists.
      size: The bytes of all complete lines.
    """

    def __init__(self, file: io.RawIOBase, found: Journal | None):
        self.found = found
        self._file = file
        self._checksum = found.checksum if found else 0
        self.size = found.size if found else 0

    def begin(self, run: dict[str, Any]) -> None:
        """Cuts a line without its end; writes the line of the run in a new file."""
        self._file.truncate(self.size)
        if self.found is None:
            self._write(run)

    def append(self, record: Record) -> None:
        """Appends a record, which is in the file at once."""
        fields = record._asdict() | {
            "values": _written_numbers(record.values),
            "params": f"{record.params:08x}",
            "seconds": float(f"{record.seconds:.3g}"),
        }
        for name in ("failures", "mean"):
            if fields[name] in (None, ()):
                del fields[name]
        self._write(fields)

    def _write(self, fields: dict[str, Any]) -> None:
        body = json.dumps(fields, separators=(",", ":")).encode()[:-1]
        self._checksum = zlib.crc32(body, self._checksum)
        line = body + b',"crc":"%08x"}\n' % self._checksum
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError:
            self._file.truncate(self.size)
            raise
        self.size += len(line)


@contextmanager
def opened(path: Path) -> Iterator[File]:
    """Opens a journal, which no other run can write until it is closed.

    Raises:
      ValueError: If another run writes it, or a line is not what was written.
    """
    is_new = not os.path.exists(path)
    with open(path, "ab", buffering=0) as file:
        if not (_locks(file) and _is_at(path, file)):
            raise ValueError(
                f"journal {os.fspath(path)} must be written by one run at a time; got "
                "a file that another run writes. Wait for its end, or give another "
                "path."
            )
        journal = File(file, read(path))
        try:
            yield journal
        finally:
            if is_new and not journal.size:  # A call that was refused leaves no file.
                with contextlib.suppress(OSError):
                    os.remove(path)


def _locks(file: io.RawIOBase) -> bool:
    """Locks a file until it is closed; returns whether no other process holds it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(_LOCKED)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass  # Some file systems in a network have no locks.
    return True


def _is_at(path: Path, file: io.RawIOBase) -> bool:
    """Whether a file is still at a path, and was not removed before it was locked."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _written_numbers(values: np.ndarray) -> list[Any]:
    """The shortest numbers that are read as the values."""
    if values.ndim > 1:
        return [_written_numbers(row) for row in values]
    return [float(str(x)) if np.isfinite(x) else str(x) for x in values]


def _read_numbers(values: Any) -> Any:
    """Numbers, and lists of them."""
    return [_read_numbers(x) if isinstance(x, list) else float(x) for x in values]


def _damaged(path: Path, number: int, problem: str) -> ValueError:
    return ValueError(
        f"journal {os.fspath(path)} is damaged in line {number + 1}: {problem}. Cut "
        "this line and those after it to continue from the step before."
        + checks.refer_to("minimize_black_box")
    )
