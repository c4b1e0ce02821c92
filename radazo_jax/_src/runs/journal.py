"""The values of an optimizer's steps in a file, from which the run can be rebuilt.

A line of JSON for the run, then one for each step. The function of a run is not part of
it: a run that died of a bug continues once the bug is fixed.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from radazo_jax._src.base import programs, shown, trees
from radazo_jax._src.measure.learning_rate import LearningRate
from radazo_jax._src.runs import lines
from radazo_jax._src.runs.lines import Entries, OtherKindError, Path
from radazo_jax._src.steps import box, step
from radazo_jax._src.steps.states import Run, SolverState

# The version of what lines mean. Files of another one are refused.
FORMAT = 5

# The begin of a table of evaluations, the other kind of file.
TABLE = b'{"table":'


class Record(NamedTuple):
    """The values of a step, and what is known of their evaluation.

    Attributes:
      step: The number of the step.
      values: The values at the points, [n], or [n, G] if the function returns several;
        non-finite if an evaluation failed. The first one alone, if the other points
        were not evaluated.
      params: The checksum of the parameters before the step; 0 if it is not known.
      seconds: Duration of the evaluations.
      failures: Texts about evaluations that failed.
    """

    step: int
    values: np.ndarray
    params: int
    seconds: float
    failures: tuple[str, ...] = ()

    @property
    def lowest(self) -> float:
        """The lowest finite value of a point, infinite if there is none."""
        return lowest(of_points(self.values))[1]


def of_points(values: np.ndarray) -> np.ndarray:
    """Returns a value for each point, [n]: the mean if the function returns several."""
    with np.errstate(all="ignore"):  # The mean of infinities of both signs is NaN.
        return values if values.ndim == 1 else values.mean(1, dtype=values.dtype)


def lowest(values: np.ndarray) -> tuple[int, float]:
    """Returns the place of the lowest finite value, and the value: infinite if none is.

    Args:
      values: The values, [n], with n of at least 1.
    """
    finite = np.where(np.isfinite(values), values, np.inf)
    i = int(np.argmin(finite))
    return i, finite[i]


class Journal(lines.JsonLines):
    """A file of the values of an optimizer's steps.

    Attributes:
      records: The steps, complete and in order.
    """

    begins = (b'{"format":', b'{"fun":', TABLE)
    follows = b'{"step":'
    unit = "step"
    door = "train"

    def __init__(self, path: Path):
        super().__init__(path)
        self.records: list[Record] = []

    def take_first(self, fields: Entries) -> Entries:
        expected, found = f"the format {FORMAT}", fields.get("format")
        of_points = found == FORMAT and fields["points"] is not None
        if not of_points:
            got = f"{found!r}, of another version of radazo_jax"
            if found == FORMAT or "table" in fields:
                expected, got = "the steps of an optimizer", "the run of a method"
            raise OtherKindError(
                f"journal {self.path} must have {expected}; got {got}. Give another "
                "path, or continue with the function that wrote it."
            )
        if fields["dtype"] not in ("float32", "float64"):
            raise ValueError(f"its dtype is {fields['dtype']!r}")
        return fields | {
            "key": lines.checked_key(fields["key"]),
            "params": fields["params"],
        }

    def take(self, fields: Entries) -> None:
        assert self.line is not None
        values = np.array(lines.read_numbers(fields["values"]), self.line["dtype"])
        params, failures = int(fields["params"], 16), fields.get("failures", ())
        given = {
            "values": values,
            "params": params,
            "failures": tuple(map(str, failures)),
        }
        record = Record(**fields | given)
        if values.ndim not in (1, 2) or not values.size:
            raise ValueError(f"its values have the shape {values.shape}")
        if len(values) != self.line["points"]:
            raise ValueError(
                f"it has {len(values)} values, and not {self.line['points']}"
            )
        if type(record.step) is not int or record.step != len(self.records):
            raise ValueError(f"it is of step {record.step!r}")
        self.records.append(record)

    def begin(self, line: Entries) -> None:
        """Begins to write: cuts a line without its end, and writes a new run's line.

        Raises:
          ValueError: If the journal belongs to another run.
        """
        self.check_same_run(line)
        super().begin(line)

    def check_same_run(self, line: Entries) -> None:
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
            "values": lines.written_numbers(record.values),
            "params": f"{record.params:08x}",
            "seconds": float(f"{record.seconds:.3g}"),
        }
        if not record.failures:
            del fields["failures"]
        self._write(fields)


def line_of_run(
    state: SolverState, run: Run, rate: LearningRate | None = None
) -> Entries:
    """Returns the first line of the journal of an optimizer, which identifies its run.

    Args:
      state: The state before the first step.
      run: The run.
      rate: The learning rate that was found before the first step.
    """
    points = programs.of(step.points_without_loss, run.estimator, state)(state)
    params, bounds = state.params, run.bounds
    with trees.precision_of(params):
        start = f"{int(trees.checksum_of(params)):08x}"
        given = None if bounds is None else box.as_trees(bounds, params)
    return {
        "format": FORMAT,
        "key": np.asarray(jax.random.key_data(state.key)).tolist(),
        "params": lines.shapes(params),
        "start": start,
        "bounds": lines.texts(given),
        **lines.about(),
        "estimator": shown.part(run.estimator),
        "scales": np.asarray(points.scales[0]).tolist(),
        "points": points.num_points,
        "learning_rate": None if rate is None else rate._asdict(),
        "dtype": str(trees.widest(params)),
    }


def to_evaluate_again(found: Sequence[Record]) -> tuple[int, int] | None:
    """Returns the last step with a finite value, and the first point that has one."""
    for i, record in reversed(list(enumerate(found))):
        finite = np.isfinite(of_points(record.values))
        if finite.any():
            return i, int(np.argmax(finite))
    return None


def warn_of_another_value(
    path: Path, record: Record, point: int, value: np.ndarray
) -> None:
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
    lines.warn_of_another_function(os.fspath(path), record.step, old, new)
