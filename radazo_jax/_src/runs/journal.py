"""The values of a run in a file, from which the run can be rebuilt.

A line of JSON for the run, then one for each step. Each ends with a checksum of itself
and of all lines before it, so that a line that was changed, lost or moved is found. A
last line without its end was being written when the run was stopped: it is cut.

A checksum finds accidents, but not forgeries. So a line that no run could have written
is refused. The function of a run is not part of it: a run that died of a bug continues
once the bug is fixed.
"""

import contextlib
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np

from radazo_jax._src import checks, programs, shown, trees
from radazo_jax._src.runs.asker import Asker
from radazo_jax._src.runs.learning_rate import LearningRate
from radazo_jax._src.steps import box, step
from radazo_jax._src.steps.box import Bounds
from radazo_jax._src.steps.states import Run, SolverState

Path = str | os.PathLike[str]

# The version of what lines mean. Files of another one are refused.
FORMAT = 5

_LONGEST = 1 << 26  # Bytes of a line that are read.
_LOCKED = (1 << 31) - 2  # The byte that is locked on Windows, after all lines.
_BEGIN = b'{"format":'  # Of the line of a run.
_OLDER = b'{"fun":'  # Of the line of a run, before format 4.
_PACKAGES = ("radazo_jax", "jax", "jaxlib", "optax")

# The errors of reading a line that is something else: nested too deep, say.
_OTHER = (ValueError, TypeError, LookupError, OverflowError, RecursionError)


class Record(NamedTuple):
    """The values of a step, and what is known of their evaluation.

    Attributes:
      step: The number of the step. Several records may have parts of a method's step.
      values: The values at the points, [n], or [n, G] if the function returns several;
        non-finite if an evaluation failed. The first one alone, if the other points
        were not evaluated.
      params: The checksum of the parameters before the step; 0 if it is not known.
      seconds: Duration of the evaluations.
      failures: Texts about evaluations that failed.
      again: The number of the evaluation whose point was evaluated again, [n] times, at
        the end of a noisy run; `None` for a step.
    """

    step: int
    values: np.ndarray
    params: int
    seconds: float
    failures: tuple[str, ...] = ()
    again: int | None = None

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


class Journal:
    """A file of a run's values.

    Attributes:
      path: The path of the file.
      line: The line of the run; `None` if there is none that is complete.
      records: The steps, complete and in order.
    """

    def __init__(self, path: Path):
        """A journal of which nothing is read yet."""
        self.path = os.fspath(path)
        self.line: dict[str, Any] | None = None
        self.records: list[Record] = []
        self._size = self._checksum = 0  # Of all complete lines.
        self._steps = 0
        self._file: Any = None

    @contextmanager
    def opened(self) -> Iterator["Journal"]:
        """Reads the journal, which no other run can write until it is closed.

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

    def read(self) -> "Journal":
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
                begins = (text[: len(x)] == x[: len(text)] for x in (_BEGIN, _OLDER))
                if number == 0 and not any(begins):
                    raise ValueError(
                        "journal must be a file that a run wrote, or a new one; got "
                        f"{self.path!r}, which begins with {text[:20]!r}. Give another "
                        "path." + checks.refer_to("train")
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
                self.line = _line(fields, self.path)
            else:
                record = _record(fields, self._steps, self.line)
                self._steps = max(self._steps, record.step + (record.again is None))
                self.records.append(record)
        except _OtherFormat:
            raise
        except _OTHER as error:
            reason = f"it is not what a run writes ({error!r:.100})"
            raise self._damaged(number, reason) from None
        self._size += len(text)

    def _check_torn(self, number: int, text: bytes) -> None:
        """Warns of a line without its end if a run began to write it."""
        begin = b'{"step":' if number else _BEGIN
        # A loss of power may leave zeros, of a block that was not yet written.
        written = text.rstrip(b"\0")
        if len(text) == _LONGEST or not (
            written.startswith(begin) or begin.startswith(written)
        ):
            raise self._damaged(number, "it is not what a run writes")
        checks.warn(
            f"journal {self.path}: its last line was not complete, and is cut. The "
            "step is evaluated again."
        )

    def _damaged(self, number: int, problem: str) -> ValueError:
        return ValueError(
            f"journal {self.path} is damaged in line {number + 1}: {problem}. Cut this "
            "line and those after it to continue from the step before."
            + checks.refer_to("train")
        )

    def begin(self, line: dict[str, Any]) -> None:
        """Begins to write: cuts a line without its end, and writes a new run's line.

        Raises:
          ValueError: If the journal belongs to another run.
        """
        self.check_same_run(line)
        self._file.truncate(self._size)
        if self.line is None:
            self.line = line
            self._write(line)

    def check_same_run(self, line: dict[str, Any]) -> None:
        """Raises if the journal belongs to another run, of which it names a part."""
        if self.line is None:
            return
        for name in {**line, **self.line}:
            found, given = self.line.get(name), line.get(name)
            # Devices may differ: checksums of the parameters tell what they compute.
            if name != "device" and found != given:
                raise ValueError(
                    f"journal {self.path} must be of this run; its {name} is "
                    f"{found!r}, that of the call is {given!r}. Give another path, or "
                    "the arguments that it was written with."
                )

    def append(self, record: Record) -> None:
        """Appends a record, which is in the file at once."""
        fields = record._asdict() | {
            "values": _written_numbers(record.values),
            "params": f"{record.params:08x}",
            "seconds": float(f"{record.seconds:.3g}"),
        }
        for name in ("failures", "again"):
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
            self._file.truncate(self._size)
            raise
        self._size += len(line)


class _OtherFormat(ValueError):
    """The error of a journal that another version wrote."""


def _line(fields: dict[str, Any], path: str) -> dict[str, Any]:
    """The line of a run, of which the entries are as rebuilding needs them."""
    if fields.get("format") != FORMAT:
        raise _OtherFormat(
            f"journal {path} must have the format {FORMAT}; got "
            f"{fields.get('format')!r}, of another version of radazo_jax. Give another "
            "path, or continue with the version that wrote it."
        )
    first, second = fields["key"]
    if not all(type(x) is int and 0 <= x < 1 << 32 for x in (first, second)):
        raise ValueError(f"its key is {fields['key']!r}")
    if fields["dtype"] not in ("float32", "float64"):
        raise ValueError(f"its dtype is {fields['dtype']!r}")
    return fields | {name: fields[name] for name in ("params", "points")}


def _record(fields: dict[str, Any], step: int, line: dict[str, Any]) -> Record:
    """The line of a step, or of a part of one, after so many steps."""
    values = np.array(_read_numbers(fields["values"]), line["dtype"])
    record = Record(
        **fields
        | {
            "values": values,
            "params": int(fields["params"], 16),
            "failures": tuple(map(str, fields.get("failures", ()))),
        }
    )
    if not isinstance(record.again, int | None):
        raise ValueError(f"its again is {record.again!r}")
    # A method's steps may have several lines.
    known = (step,) if line["points"] is not None else (step - 1, step)
    if type(record.step) is not int or record.step not in known or record.step < 0:
        raise ValueError(f"it is of step {record.step!r}")
    if values.ndim not in (1, 2) or not values.size:
        raise ValueError(f"its values have the shape {values.shape}")
    # The steps of a method have any numbers of points.
    if line["points"] is not None and len(values) != line["points"]:
        raise ValueError(f"it has {len(values)} values, and not {line['points']}")
    return record


def _written_numbers(values: np.ndarray) -> list[Any]:
    """The shortest numbers that are read as the values."""
    if values.ndim > 1:
        return [_written_numbers(row) for row in values]
    return [float(str(x)) if np.isfinite(x) else str(x) for x in values]


def _read_numbers(values: Any) -> Any:
    """Numbers, and lists of them."""
    return [_read_numbers(x) if isinstance(x, list) else float(x) for x in values]


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


def line_of_run(
    state: SolverState, run: Run, rate: LearningRate | None = None
) -> dict[str, Any]:
    """The first line of the journal of an optimizer, which identifies its run.

    Args:
      state: The state before the first step.
      run: The run.
      rate: The learning rate that was found before the first step.
    """
    points = programs.of(step.points_without_loss, run.estimator, state)(state)
    return _line_of(state.params, state.key, run.bounds) | {
        "estimator": shown.part(run.estimator),
        "scales": np.asarray(points.scales[0]).tolist(),
        "points": points.num_points,
        "learning_rate": None if rate is None else rate._asdict(),
        "dtype": str(trees.widest(state.params)),
    }


def line_of_method(asker: Asker, bounds: Bounds | None) -> dict[str, Any]:
    """The first line of the journal of a method, which identifies its run.

    Args:
      asker: Asks the method, before its first step.
      bounds: The bounds of the run.
    """
    step = asker.vectors.step
    return _line_of(asker.vectors.tree, asker.key, bounds) | {
        "step": _texts(asker.vectors.one(step)) if np.any(step) else None,
        "method": shown.part(asker.method),
        "points": None,
        "resolution": asker.resolution,
        "dtype": "float64",
    }


def _line_of(params: Any, key: jax.Array, bounds: Bounds | None) -> dict[str, Any]:
    """The part of the first line that all runs have."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shapes = {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }
    device = jax.devices()[0]
    with trees.precision_of(params):
        start = f"{int(trees.checksum_of(params)):08x}"
        given = None if bounds is None else box.as_trees(bounds, params)
    return {
        "format": FORMAT,
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "params": shapes,
        "start": start,
        "bounds": _texts(given),
        "versions": {name: _version(name) for name in _PACKAGES},
        "device": f"{device.platform} {device.device_kind}",
    }


def _texts(tree: Any) -> dict[str, str]:
    """Arrays in short texts, by their paths: the number that all elements are, if any.

    Bounds are the same, however they were given.
    """

    def text(x: Any) -> str:
        x = np.asarray(x)
        if x.size and np.all(x == x.flat[0]):
            return str(x.flat[0])
        return f"{list(x.shape)} {zlib.crc32(x.tobytes()):08x}"

    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): text(x) for path, x in pairs}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def to_evaluate_again(found: Sequence[Record]) -> tuple[int, int] | None:
    """The last step with a finite value, and the first point that has one."""
    for i, record in reversed(list(enumerate(found))):
        finite = np.isfinite(of_points(record.values))
        if finite.any():
            return i, int(np.argmax(finite))
    return None


def warn_of_another_value(path: Path, record: Record, point: int, value: Any) -> None:
    """Warns if a point of a journal has another value now than it had then."""
    before = record.values[point]
    finite = np.isfinite(record.values)
    with np.errstate(all="ignore"):
        scale = np.max(np.abs(record.values), initial=0, where=finite)
        rounding = trees.rounding(before) * scale
        same = np.shape(value) == np.shape(before)
        if same and np.all(np.abs(value - before) <= rounding):
            return
    old, new = (of_points(np.array([x]))[0] for x in (before, value))
    checks.warn(
        f"journal {os.fspath(path)} has the value {old:.9g} at a point of step "
        f"{record.step}, at which fun now returns {new:.9g}. Unless fun is noisy, it "
        "is another function: the run continues with it from the values of the "
        "journal. To begin anew, give another path."
    )
