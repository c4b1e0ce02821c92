"""A run on the host as a table of evaluations, in memory and in a file.

A row is an evaluation: the point, its value, how it failed, its seconds. A row is
written when its value arrives. Nothing else is remembered: a run that continues begins
its method anew, with the same start and key, and answers it from the table.

A point that is evaluated several times has a row for each time. A failure may have been
an outage, or a mistake that was corrected since. So failures after the last finite
value are evaluated again when a run continues, once, and the new row replaces the
failure for ever after. Failures that this call does not reach stay open for the next.
"""

import base64
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from radazo_jax._src.base import shown
from radazo_jax._src.host.problem import Problem
from radazo_jax._src.runs import lines
from radazo_jax._src.runs.lines import Entries, JsonLines, Numbers, OtherKindError, Path

# The version of what lines mean. Files of another one are refused.
FORMAT = 1

# A point is a list of numbers up to so many parameters, and their bytes up to so many;
# beyond, a checksum, from which the point cannot be read.
_LISTED, _STORED = 100, 1000

# The names of the entries of a first line in words. Other entries are notes.
_COMPARED = {
    "params": "params",
    "start": "the start",
    "key": "the key",
    "step": "the step",
    "lower": "the lower bound",
    "upper": "the upper bound",
    "residuals": "whether fun returns residuals",
}


@dataclasses.dataclass(slots=True)
class Row:
    """An evaluation.

    Attributes:
      point: The bytes of the point, float64 [d], or their checksum if d is large.
      value: The value or the residuals, NaN if it failed.
      failure: A text if it failed, else an empty string.
      seconds: Duration.
      repeat: The number of times that the point was evaluated before.
      dtype: The dtype of the value if it is narrower than float64.
      is_mistake: Whether it failed by a mistake in the function.
      info: The other result of the function, which is not in the file.
      tries: The number of times that it failed.
      is_open: Whether it failed, and is evaluated again if it is asked for.
      is_used: Whether the present run has used it.
    """

    point: bytes
    value: Any
    failure: str = ""
    seconds: float = 0.0
    repeat: int = 0
    dtype: str = ""
    is_mistake: bool = False
    info: Any = None
    tries: int = 0
    is_open: bool = False
    is_used: bool = False


def name(point: np.ndarray) -> bytes:
    """Returns the name of a point, float64 [d], under which the table knows it."""
    data = point.tobytes()
    if len(point) <= _STORED:
        return data
    return hashlib.blake2b(data, digest_size=16).digest()


class Evaluations:
    """The table of a run's evaluations, in the order in which their values arrived.

    Pass it as `evaluations` to continue the run in another call. It can be pickled. It
    has all evaluations of the run and of those that it continued; `used` says which of
    them the run has used.

    Examples:
      >>> import numpy as np
      >>> import radazo_jax as zo
      >>> result = zo.minimize(
      ...     lambda x: np.sum((x - 1) ** 2), np.zeros(2), progress=False
      ... )
      >>> found = result.evaluations
      >>> found.points.shape[1], bool(found.values.min() == result.best.value)
      (2, True)
    """

    def __init__(self, line: Entries, rows: list[Row], count: int):
        """Shows the first rows of a table.

        Args:
          line: The entries that describe the run.
          rows: The rows of the table, which may grow.
          count: The number of them that are shown.
        """
        self.line, self._rows, self._count = line, rows, count

    def __reduce__(self) -> tuple[object, ...]:
        return Evaluations, (self.line, self.rows, self._count)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return shown.on_a_line(self, values=shown.series(self.values, "evaluations"))

    @classmethod
    def from_journal(cls, path: Path) -> "Evaluations":
        """Reads the journal of a run of `minimize`, also while it is running.

        Args:
          path: The file.

        Raises:
          ValueError: If there is no file, or it is damaged or of another kind.
        """
        return EvaluationTable(TableFile(path).read()).shown()

    @property
    def rows(self) -> list[Row]:
        """The rows."""
        return self._rows[: self._count]

    @property
    def points(self) -> np.ndarray | None:
        """The points, float64 [n, d]; `None` for more than 1,000 parameters."""
        d = self.line["dimension"]
        if d > _STORED:
            return None
        data = b"".join(row.point for row in self.rows)
        return np.frombuffer(data, np.float64).reshape(-1, d).copy()

    @property
    def values(self) -> np.ndarray:
        """The values, float64 [n], or the residuals, [n, m]; NaN if they failed."""
        return stacked([row.value for row in self.rows])

    @property
    def failures(self) -> np.ndarray:
        """Texts about the evaluations that failed, [n]; empty for the others."""
        return np.array([row.failure for row in self.rows], object)

    @property
    def seconds(self) -> np.ndarray:
        """Durations, float64 [n]."""
        return np.array([row.seconds for row in self.rows], np.float64)

    @property
    def used(self) -> np.ndarray:
        """Whether the run has used each of them: bool [n]."""
        return np.array([row.is_used for row in self.rows], bool)


def stacked(values: Sequence[float | np.ndarray]) -> np.ndarray:
    """Returns values as an array, [n], or [n, m]: NaN in each place if they failed."""
    shape = next((np.shape(x) for x in values if np.ndim(x)), ())
    if not shape:
        return np.array(values, np.float64)
    filled = [x if np.ndim(x) else np.full(shape, np.nan) for x in values]
    return np.array(filled, np.float64)


class TableFile(JsonLines):
    """The file of a table.

    Attributes:
      rows: The rows, complete and in order.
    """

    begins = (b'{"table":', b'{"format":', b'{"fun":')
    follows = b'{"number":'
    unit = "evaluation"
    door = "minimize"

    def __init__(self, path: Path):
        super().__init__(path)
        self.rows: list[Row] = []

    def take_first(self, fields: Entries) -> Entries:
        if fields.get("table") != FORMAT:
            got = f"a table of the format {fields.get('table')!r}"
            if "table" not in fields:
                of_method = fields.get("points") is None
                got = "the steps of an optimizer, which train writes"
                got = "a journal of an earlier version" if of_method else got
            raise OtherKindError(
                f"journal {self.path} must be a table of evaluations of the format "
                f"{FORMAT}; got {got}. Give another path."
            )
        if type(fields["dimension"]) is not int or fields["dimension"] < 1:
            raise ValueError(f"its dimension is {fields['dimension']!r}")
        known = {key: fields[key] for key in _COMPARED}
        return fields | known | {"key": lines.checked_key(fields["key"])}

    def take(self, fields: Entries) -> None:
        assert self.line is not None
        if fields["number"] != len(self.rows):
            raise ValueError(f"it has the number {fields['number']!r}")
        value = lines.read_numbers(fields["value"])
        row = Row(
            _read_point(fields["point"], self.line["dimension"]),
            np.array(value, np.float64) if isinstance(value, list) else value,
            str(fields.get("failure", "")),
            float(fields["seconds"]),
            int(fields.get("repeat", 0)),
            str(fields.get("dtype", "")),
            bool(fields.get("mistake", False)),
        )
        if np.ndim(row.value) > 1 or not np.size(row.value) or row.repeat < 0:
            raise ValueError(f"its value is {fields['value']!r:.40}")
        if bool(row.failure) == bool(np.all(np.isfinite(row.value))):
            raise ValueError(f"its failure is {row.failure!r:.40}")
        if row.dtype and not jnp.issubdtype(jnp.dtype(row.dtype), jnp.floating):
            raise ValueError(f"its dtype is {row.dtype!r:.40}")
        self.rows.append(row)

    def append(self, row: Row) -> None:
        """Appends a row, which is in the file at once."""
        assert self.line is not None
        fields = {
            "number": len(self.rows),
            "point": _written_point(row.point, self.line["dimension"]),
            "value": lines.written_numbers(row.value),
            "seconds": float(f"{row.seconds:.3g}"),
            "repeat": row.repeat,
            "dtype": row.dtype,
            "failure": row.failure,
            "mistake": row.is_mistake,
        }
        self._write({name: x for name, x in fields.items() if x or name in _ALWAYS})
        self.rows.append(row)


_ALWAYS = ("number", "point", "value", "seconds")


def _written_point(data: bytes, dimension: int) -> Numbers:
    """Returns a point as a line has it."""
    if dimension <= _LISTED:
        return np.frombuffer(data, np.float64).tolist()
    return base64.b64encode(data).decode()


def _read_point(written: Any, dimension: int) -> bytes:
    """Reads what `_written_point` has written."""
    if isinstance(written, list):
        data = np.array(written, np.float64).tobytes()
    else:
        data = base64.b64decode(written, validate=True)
    if len(data) != (8 * dimension if dimension <= _STORED else 16):
        raise ValueError(f"its point is {written!r:.40}")
    return data


class EvaluationTable:
    """The rows of a run.

    Attributes:
      line: The entries that describe the run.
      rows: The rows, in the order in which their values arrived; a failure that was
        replaced is not among them.
      num_read: The number of rows of earlier calls.
      path: The path of its file; `None` without one.
      name: Its name in messages.
    """

    def __init__(
        self,
        file: TableFile | None = None,
        evaluations: Evaluations | None = None,
        evaluates_again: bool = True,
    ):
        """Takes the rows of a file, or of an earlier call.

        Args:
          file: The file, which was read; `None` without one.
          evaluations: The evaluations of an earlier call; `None` without one.
          evaluates_again: Whether failures after the last finite value are evaluated
            again.
        """
        if not isinstance(evaluations, Evaluations | None):
            raise TypeError(
                "evaluations must be the evaluations of an earlier result; got "
                f"{shown.tree(evaluations)}. Pass result.evaluations."
            )
        if file is not None and evaluations is not None:
            raise ValueError(
                "evaluations must be None with a journal, from which the run "
                f"continues; got {len(evaluations)} evaluations."
            )
        self._file, self.path = file, None if file is None else file.path
        self.name = "evaluations" if file is None else f"journal {file.path}"
        known = evaluations if file is None else file
        self.line = (known and known.line) or {}
        self.rows: list[Row] = []
        self._places: dict[tuple[bytes, int], int] = {}
        last: list[Row] = []  # The failures since the latest finite value.
        for row in [] if known is None else list(known.rows):
            before = len(self.rows)
            taken = self._take(dataclasses.replace(row, is_used=False))
            if len(self.rows) == before:  # A call continued here: see below.
                _open(last)
            if not row.failure:
                last = []
            elif taken.tries == 1 or taken.is_mistake:
                last.append(taken)
        if evaluates_again:
            _open(last)
        self.num_read = len(self.rows)

    def begin(self, problem: Problem) -> None:
        """Begins to add rows.

        Args:
          problem: The problem.

        Raises:
          ValueError: If the table is of another start, key, dtype, box or grid.
        """
        line = _line_of(problem)
        for key, words in _COMPARED.items() if self.line else ():
            found, given = self.line[key], line[key]
            if found != given:
                raise ValueError(
                    f"{self.name} must be of a run with the same arguments; "
                    f"{_difference(words, found, given)}. Pass the arguments of the "
                    "first call, or begin another run."
                )
        if self._file is not None:
            self._file.begin(line)
        self.line = self.line or line

    def at(self, point: bytes, repeat: int) -> Row | None:
        """Returns the row of a point, `None` if it must be evaluated."""
        place = self._places.get((point, repeat))
        if place is None or self.rows[place].is_open:
            return None
        return self.rows[place]

    def is_evaluated_again(self, point: bytes, repeat: int) -> bool:
        """Returns whether a point is evaluated again because it has failed."""
        place = self._places.get((point, repeat))
        return place is not None and self.rows[place].is_open

    def add(self, row: Row) -> Row:
        """Adds a row, which is in the file at once."""
        row = self._take(row)
        if self._file is not None:
            self._file.append(row)
        return row

    def shown(self) -> Evaluations:
        """Returns the rows so far."""
        return Evaluations(self.line, self.rows, len(self.rows))

    def _take(self, row: Row) -> Row:
        """Takes a row, which replaces a failure of the same question."""
        key = row.point, row.repeat
        place = self._places.get(key)
        before = 0 if place is None else self.rows[place].tries
        row.tries = max(row.tries, before + bool(row.failure))
        if place is None:
            self._places[key] = len(self.rows)
            self.rows.append(row)
        else:
            self.rows[place] = row
        return row


def _open(rows: list[Row]) -> None:
    """Lets failures be evaluated again, in this call or in a later one."""
    for row in rows:
        row.is_open = True


def _line_of(problem: Problem) -> Entries:
    """Returns the first line of a table, which describes its run."""
    vectors = problem.vectors
    return {
        "table": FORMAT,
        "dimension": vectors.dimension,
        "params": lines.shapes(vectors.tree),
        "start": _entry(vectors.flat(vectors.tree)),
        "key": problem.seed,
        "lower": _entry(problem.box.lower),
        "upper": _entry(problem.box.upper),
        "step": _entry(vectors.step),
        "residuals": problem.residuals,
        **lines.about(),
    }


def _entry(vector: np.ndarray) -> Numbers:
    """Returns a vector as numbers, as the number that all are, or a checksum."""
    if vector.size and np.all(vector == vector[0]):
        return lines.written_numbers(vector[0])
    if len(vector) <= _STORED:
        return lines.written_numbers(vector)
    return lines.texts(vector)[""]


def _difference(words: str, found: Any, given: Any) -> str:
    """Describes the first difference of two entries of first lines."""
    if isinstance(found, dict):
        at = next(x for x in [*found, *given] if found.get(x) != given.get(x))
        words, found, given = f"params{at}", found.get(at), given.get(at)
    elif isinstance(found, list) or isinstance(given, list):
        count = len(found if isinstance(found, list) else given)
        pair = [x if isinstance(x, list) else [x] * count for x in (found, given)]
        i = next(i for i in range(count) if pair[0][i] != pair[1][i])
        words, found, given = f"element {i} of {words}", pair[0][i], pair[1][i]
    return f"{words} was {found} there, and is {given} now"
