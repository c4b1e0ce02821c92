"""A file of lines of JSON, which is written while a run goes and read by the next one.

Each line ends with a checksum of itself and of all lines before it, so that a line that
was changed, lost or moved is found. A last line without its end was being written when
the run was stopped: it is cut.

A checksum finds accidents, but not forgeries. So a line that no run could have written
is refused.
"""

import abc
import contextlib
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, ClassVar, Self

import jax
import numpy as np
import optax

from radazo_jax._src.base import checks

Path = str | os.PathLike[str]
Entries = dict[str, Any]  # Of a line of JSON.
Numbers = float | str | list[Any]

_LONGEST = 1 << 26  # Bytes of a line that are read.
_LOCKED = (1 << 31) - 2  # The byte that is locked on Windows, after all lines.
_PACKAGES = ("radazo_jax", "jax", "jaxlib", "optax")

# The errors of reading a line that is something else: nested too deep, say.
_OTHER = (ValueError, TypeError, LookupError, OverflowError, RecursionError)


class OtherKindError(ValueError):
    """The error of a file that another version, or another kind of run, wrote."""


class JsonLines(abc.ABC):
    """A file of lines, of which the first one describes the run.

    Attributes:
      path: The path of the file.
      line: The first line; `None` if there is none that is complete.
    """

    # How the first line may begin, the lines after it, and what one of them holds.
    begins: ClassVar[tuple[bytes, ...]]
    follows: ClassVar[bytes]
    unit: ClassVar[str]
    # The function whose documentation explains the file.
    door: ClassVar[str]

    def __init__(self, path: Path):
        """Reads nothing yet."""
        self.path = os.fspath(path)
        self.line: Entries | None = None
        self._size = self._checksum = 0  # Of all complete lines.
        self._file: Any = None

    @abc.abstractmethod
    def take_first(self, fields: Entries) -> Entries:
        """Returns the entries of the first line, checked.

        Raises:
          OtherKindError: If the file is of another kind.
        """

    @abc.abstractmethod
    def take(self, fields: Entries) -> None:
        """Takes the entries of the next line, which it checks."""

    @contextmanager
    def opened(self) -> Iterator[Self]:
        """Reads the file, which no other run can write until it is closed.

        Raises:
          ValueError: If another run writes it, or a line is not what was written.
        """
        is_new = not os.path.exists(self.path)
        with open(self.path, "ab", buffering=0) as self._file:
            if not (_locks(self._file) and _is_at(self.path, self._file)):
                raise ValueError(
                    f"journal {self.path} must be written by one run at a time; got a "
                    "file that another run writes. Wait for its end, or give another "
                    "path."
                )
            try:
                yield self.read()
            finally:
                if is_new and not self._size:  # A call that was refused leaves none.
                    with contextlib.suppress(OSError):
                        os.remove(self.path)

    def read(self) -> Self:
        """Reads the file.

        Raises:
          ValueError: If there is no file, or a line is not what was written.
        """
        try:
            file = open(self.path, "rb")  # noqa: SIM115  (It is closed below.)
        except FileNotFoundError:
            raise ValueError(
                f"journal must be a file with a run; got {self.path!r}."
            ) from None
        with file:
            lines = iter(lambda: file.readline(_LONGEST), b"")
            for number, text in enumerate(lines):
                begins = (text[: len(x)] == x[: len(text)] for x in self.begins)
                if number == 0 and not any(begins):
                    raise ValueError(
                        "journal must be a file that a run wrote, or a new one; got "
                        f"{self.path!r}, which begins with {text[:20]!r}. Give another "
                        "path." + checks.refer_to(self.door)
                    )
                if not text.endswith(b"\n"):
                    self._check_torn(number, text)
                    break
                self._read(number, text)
        return self

    def _read(self, number: int, text: bytes) -> None:
        """Reads a complete line."""
        body, _, end = text[:-1].rpartition(b',"crc":"')
        self._checksum = zlib.crc32(body, self._checksum)
        if end != b'%08x"}' % self._checksum:
            raise self._damaged(number, "its checksum is wrong")
        try:
            fields = json.loads(body + b"}")
            if self.line is None:
                self.line = self.take_first(fields)
            else:
                self.take(fields)
        except OtherKindError:
            raise
        except _OTHER as error:
            reason = f"it is not what a run writes ({error!r:.100})"
            raise self._damaged(number, reason) from None
        self._size += len(text)

    def _check_torn(self, number: int, text: bytes) -> None:
        """Warns of a line without its end if a run began to write it."""
        begins = (self.follows,) if number else self.begins
        # A loss of power may leave zeros, of a block that was not yet written.
        written = text.rstrip(b"\0")
        if len(text) == _LONGEST or not any(
            written.startswith(begin) or begin.startswith(written) for begin in begins
        ):
            raise self._damaged(number, "it is not what a run writes")
        checks.warn(
            f"journal {self.path}: its last line was not complete, and is cut. The "
            f"{self.unit} is evaluated again."
        )

    def _damaged(self, number: int, problem: str) -> ValueError:
        return ValueError(
            f"journal {self.path} is damaged in line {number + 1}: {problem}. Cut this "
            f"line and those after it to continue from the {self.unit} before."
            + checks.refer_to(self.door)
        )

    def begin(self, line: Entries) -> None:
        """Begins to write: cuts a line without its end, and writes a new run's line."""
        self._file.truncate(self._size)
        if self.line is None:
            self.line = line
            self._write(line)

    def _write(self, fields: Entries) -> None:
        """Writes a line, which is in the file at once."""
        body = json.dumps(fields, separators=(",", ":")).encode()[:-1]
        checksum = zlib.crc32(body, self._checksum)
        line = body + b',"crc":"%08x"}\n' % checksum
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError:
            self._file.truncate(self._size)
            raise
        self._checksum = checksum
        self._size += len(line)


def written_numbers(values: float | np.ndarray) -> Numbers:
    """Returns the shortest numbers that are read as values; texts if not finite."""
    if isinstance(values, np.ndarray) and values.ndim:
        return [written_numbers(x) for x in values]
    return float(str(values)) if np.isfinite(values) else str(values)


def read_numbers(values: Numbers) -> Numbers:
    """Returns the numbers, and lists of them, that `written_numbers` has written."""
    if isinstance(values, list):
        return [read_numbers(x) for x in values]
    return float(values)


def checked_key(data: Sequence[int]) -> list[int]:
    """Returns the words of a key, as a first line has them, checked."""
    first, second = data
    if not all(type(x) is int and 0 <= x < 1 << 32 for x in (first, second)):
        raise ValueError(f"its key is {data!r}")
    return [first, second]


def about() -> Entries:
    """Returns the versions and the device, which a first line notes."""
    device = jax.devices()[0]
    return {
        "versions": {name: _version(name) for name in _PACKAGES},
        "device": f"{device.platform} {device.device_kind}",
    }


def texts(tree: optax.Params) -> dict[str, str]:
    """Returns arrays in short texts, by path: the number that all elements are, if any.

    Bounds are the same, however they were given.
    """

    def text(x: jax.typing.ArrayLike) -> str:
        x = np.asarray(x)
        if x.size and np.all(x == x.flat[0]):
            return str(x.flat[0])
        return f"{list(x.shape)} {zlib.crc32(x.tobytes()):08x}"

    return _by_paths(tree, text)


def shapes(params: optax.Params) -> dict[str, str]:
    """Returns the dtypes and shapes of a tree of arrays, by their paths."""
    return _by_paths(params, lambda x: f"{x.dtype}{list(x.shape)}")


def _by_paths(tree: optax.Params, text: Callable[[Any], str]) -> dict[str, str]:
    """Returns texts of the leaves of a tree, by their paths."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): text(x) for path, x in pairs}


def warn_of_another_function(
    path: Path | None, step: int, before: float, now: float
) -> None:
    """Warns of a point of a journal that has another value now."""
    checks.warn(
        f"journal {path} has the value {before:.9g} at a point of step {step}, at "
        f"which fun now returns {now:.9g}. Unless fun is noisy, it is another "
        "function: the run continues with it from the values of the journal. To begin "
        "anew, give another path."
    )


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
    """Returns whether an open file is still at a path, and was not removed."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
