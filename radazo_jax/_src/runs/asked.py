"""Steps of a method on the host, whose points are evaluated by any evaluator."""

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src import checks, programs, xla
from radazo_jax._src.contracts import Evaluator
from radazo_jax._src.evaluators.external import Outcome
from radazo_jax._src.evaluators.sharded import Sharded
from radazo_jax._src.runs.asker import Asker, Candidate, Stage
from radazo_jax._src.runs.journal import Journal, Record
from radazo_jax._src.runs.one_by_one import OneByOne
from radazo_jax._src.runs.processes import from_first
from radazo_jax._src.runs.results import Best, Report
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.runs.told import Told
from radazo_jax._src.steps.states import Failures

# Rows of the one program that evaluates points, whatever their number.
_ROWS = 64

# Points that an accelerator evaluates together by default.
_TOGETHER = 16

# The number of points that were evaluated in advance whose values are kept.
_AHEAD = 256

# Seconds of evaluations after which a part of a step is told.
_LONG = 1.0

# The share of the evaluations of a noisy run that compares its best points, the least
# number of them, and the number of evaluations by which a target is met.
_SHARE, _FEWEST, _TARGET = 0.1, 10, 4


# The value at a point, the other result of the function, and a text if it failed.
_Row = tuple[float, Any, str]


class Evaluate(Protocol):
    """Evaluates the points of a method, as `Calls` does."""

    @property
    def room(self) -> int | None: ...

    @property
    def workers(self) -> int: ...

    def repeat(self, points: Any, /) -> Outcome | None: ...


class ByProgram:
    """Evaluates points of a function that JAX traces, in one program.

    The program has a fixed number of rows, so that a value does not depend on the
    number of points that a step has.
    """

    room: int | None = None
    workers = 1

    def __init__(
        self,
        fun: Callable[[optax.Params], Any],
        params: optax.Params,
        evaluator: Evaluator,
        interrupted: Callable[[], bool],
    ):
        """Compiles nothing yet.

        Args:
          fun: The function, traced.
          params: The parameters.
          evaluator: `vectorized(...)` or `sharded(...)`.
          interrupted: Asked before each part of the points whether to stop.
        """
        names = None
        if isinstance(evaluator, Sharded):
            names = evaluator.axis_name
        together = getattr(evaluator, "batch_size", None)
        if together is None:
            on_cpu = jax.default_backend() == "cpu"
            together = 1 if on_cpu and names is None else _TOGETHER
        rows = -(-_ROWS // together) * together
        self._rows, self._interrupted = rows, interrupted
        like = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct((rows, *p.shape), p.dtype), params
        )
        run = fun, together, names
        self._program = programs.of(_values_of, run, like, np.int32(0))

    def repeat(self, points: Any) -> Outcome | None:
        n, found = len(jax.tree.leaves(points)[0]), []
        for first in range(0, n, self._rows):
            if self._interrupted():
                return None
            count = min(self._rows, n - first)
            # Copies of the last point fill the rows.
            which = np.minimum(np.arange(first, first + self._rows), n - 1)
            padded = jax.tree.map(operator.itemgetter(which), points)
            values = np.asarray(self._program(padded, np.int32(count)))[:count]
            found.append(values.astype(np.float64))
        values = np.concatenate(found)
        failed = np.flatnonzero(~np.isfinite(values)).tolist()
        return Outcome(values, [None] * n, {i: f"returned {values[i]}" for i in failed})


class Shared:
    """Evaluates points in each process, and takes the values of process 0."""

    workers = 1

    def __init__(self, evaluate: Evaluate):
        """Begins to share.

        Args:
          evaluate: Evaluates points in this process.
        """
        self._evaluate, self.room = evaluate, evaluate.room

    def repeat(self, points: Any) -> Outcome | None:
        mine = self._evaluate.repeat(points) or Outcome(np.zeros(0), [], {})
        values = from_first({"values": mine.values})["values"]
        if not len(values):
            return None  # Process 0 was interrupted.
        failed = np.flatnonzero(~np.isfinite(values)).tolist()
        texts = {i: mine.failures.get(i, "failed in process 0") for i in failed}
        return Outcome(values, mine.infos or [None] * len(values), texts)


def _values_of(run: Any, points: Any, count: jax.Array) -> jax.Array:
    """The values at the first of some points, [rows]."""
    fun, together, names = run
    checked = checks.checked_loss(fun, False)

    def loss(params: optax.Params) -> jax.Array:
        return checked(params)[0]

    if names is not None:

        def on_all(points: Any) -> jax.Array:
            points = lax.with_sharding_constraint(points, jax.P(names))
            values = jax.vmap(loss, spmd_axis_name=names)(points)
            return lax.with_sharding_constraint(values, jax.P())

        return xla.on_any_mesh(on_all, jax.P())(points)
    rows = len(jax.tree.leaves(points)[0])
    if together == 1:
        row = jax.tree.map(lambda x: x[0], points)
        dtype = jax.eval_shape(loss, row).dtype

        def one(i: jax.Array, values: jax.Array) -> jax.Array:
            point = jax.tree.map(lambda x: x[i], points)
            return values.at[i].set(loss(point))

        # The other rows are not read; NaN would stop a run under `jax_debug_nans`.
        return lax.fori_loop(0, count, one, jnp.zeros(rows, dtype))
    parts = jax.tree.map(lambda x: x.reshape(-1, together, *x.shape[1:]), points)
    return lax.map(jax.vmap(loss), parts).reshape(rows)


class MethodSteps(OneByOne):
    """Steps of a method.

    Values are told in parts if a budget or a target ends the run within a step, or if
    they take long, so that they are in the journal. The result does not depend on it.
    If the function is noisy, the best points are evaluated again at the end.
    """

    def __init__(
        self, told: Told, budget: Budget, file: Journal | None, evaluate: Evaluate
    ):
        """Takes no step yet.

        Args:
          told: A run with an `Asker`.
          budget: The budgets, which have started.
          file: The journal, open and begun; `None` without one.
          evaluate: Evaluates points.
        """
        super().__init__(told, budget, file)
        self._evaluate, self.best = evaluate, told.best
        self._again: dict[int, list[float]] = {}  # Further values of candidates.
        self._ahead: dict[bytes, _Row] = {}
        self._values_of_step = np.zeros(0)

    @property
    def _asker(self) -> Asker:
        assert isinstance(self._told.maker, Asker)
        return self._told.maker

    @property
    def dtype(self) -> Any:
        return self._asker.dtype

    @property
    def failures(self) -> Failures:
        return self._asker.failures

    def has_used(self, count: int) -> bool:
        del count
        return bool(np.isfinite(self._asker.best[1]))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(self._asker.stages)

    @property
    def reason(self) -> str:
        """The reason for which the method has ended, or an empty string."""
        return self._told.ended

    # Evaluation.

    def _values(self) -> tuple[np.ndarray, Sequence[str]] | None:
        self._told.ask()
        asker, target = self._asker, self.budget.progress.target
        points = asker.points[: self.budget.evaluations_left()]
        rows: list[_Row] = []
        begun, count = time.perf_counter(), len(points)
        while len(rows) < count:
            room = self._evaluate.room or count
            found = self._rows_at(points[len(rows) : len(rows) + room])
            if found is None:
                break
            met = [i for i, row in enumerate(found) if row[0] <= target]
            late = self.budget.seconds_left() <= 0
            if met or late or time.perf_counter() - begun > _LONG:
                # A run ends at its target, whatever was evaluated together.
                count = len(rows) + (met[0] + 1 if met else len(found))
            rows += found
        if not rows:
            return None
        self._keep(points[count:], rows[count:])
        values, infos, texts = zip(*rows[:count], strict=True)
        self._outcome = Outcome(np.array(values), list(infos), {})
        self._values_of_step = np.concatenate([asker.told, values])
        of_step = asker.asked.points[: len(self._values_of_step)]
        self._points = asker.vectors.trees(of_step)
        return self._outcome.values, [text for text in texts if text]

    def report(self) -> Report:
        return super().report()._replace(values=self._values_of_step)

    def _rows_at(self, points: np.ndarray) -> list[_Row] | None:
        """The rows at points. What is known already is not evaluated again."""
        rows = [self._ahead.pop(point.tobytes(), None) for point in points]
        missing = [i for i, row in enumerate(rows) if row is None]
        if missing:
            outcome = self._evaluate.repeat(self._asker.vectors.trees(points[missing]))
            if outcome is None:
                return None
            values, infos, failures = outcome
            texts = [failures.get(i, "") for i in range(len(missing))]
            found = list(zip(values.tolist(), infos, texts, strict=True))
            for i, row in zip(missing, found, strict=True):
                rows[i] = row
        return [row for row in rows if row is not None]

    def _keep(self, points: np.ndarray, rows: list[_Row]) -> None:
        """Keeps what was evaluated in advance, as much of it as is allowed."""
        for point, row in zip(points, rows, strict=False):
            self._ahead[point.tobytes()] = row
        for old in list(self._ahead)[:-_AHEAD]:
            del self._ahead[old]

    # What a step is.

    def _value_of(self, record: Record, row: dict[str, Any], whole: bool) -> float:
        del row
        point, value, number = self._asker.best
        if number != self.best.number:
            told = self._told.best
            info = told.info if told.number == number else None
            self.best = Best(self._asker.vectors.one(point), value, number, info)
        lowest: float = record.lowest
        if self._asker.noisy:
            if whole:
                self.budget.reserve(_SHARE, _FEWEST)
            if lowest <= self.budget.progress.target:
                mean, count = self._mean_of(self._asker.lowest[0], _TARGET)
                return mean if count == _TARGET else np.nan
        return lowest

    def _mean_of(self, candidate: Candidate, count: int) -> tuple[float, int]:
        """The mean of further values at a point, and their number, at most so many.

        There are fewer if the budget does not allow them, or a call was interrupted.
        """
        known = self._again.setdefault(candidate.number, [])
        missing = min(count - len(known), self.budget.again_left())
        if missing > 0:
            begun = time.perf_counter()
            points = candidate.point[None].repeat(missing, 0)
            outcome = self._evaluate.repeat(self._asker.vectors.trees(points))
            if outcome is not None:
                given = outcome.values, 0, time.perf_counter() - begun
                record = Record(self._asker.step, *given, again=candidate.number)
                if self._file is not None:
                    self._file.append(record)
                self._know(record)
        finite = [value for value in known[:count] if np.isfinite(value)]
        return float(np.mean(finite)) if finite else np.inf, len(finite)

    def _know(self, record: Record) -> None:
        """Keeps further values of a candidate."""
        assert record.again is not None
        self._again.setdefault(record.again, []).extend(record.values.tolist())
        self.budget.again += len(record.values)

    def confirm(self, stopped: str) -> None:
        """Evaluates the best points of a noisy run again, and keeps the best mean.

        After each round, half of the points are evaluated about twice as often.

        Args:
          stopped: The reason for which the run has ended.
        """
        asker = self._asker
        if not asker.noisy or stopped in ("interrupted", "callback", "failure"):
            return
        candidates, center = list(asker.lowest), asker.asked.center
        known = {candidate.point.tobytes() for candidate in candidates}
        if center is not None and center.tobytes() not in known:
            candidates.append(Candidate(-1 - asker.step, center, np.nan))
        total = self.budget.reserved
        total = total or max(_FEWEST, int(_SHARE * self.budget.evaluations))
        rounds, count = max(1, (len(candidates) - 1).bit_length()), 0
        for _ in range(rounds):
            count += max(1, total // rounds // len(candidates))
            means = [self._mean_of(candidate, count) for candidate in candidates]
            order = sorted(range(len(means)), key=lambda i: means[i])
            candidates = [candidates[i] for i in order[: -(-len(order) // 2)]]
        (best, *_), (mean, count) = candidates, min(means)
        if count:
            point = asker.vectors.one(best.point)
            self.best = Best(point, mean, max(best.number, -1), num_values=count)

    def resume(self) -> None:
        for record in [] if self._file is None else self._file.records:
            if record.again is not None:
                self._know(record)
        super().resume()

    def _allowed(self, found: list[Record]) -> list[Record]:
        left, allowed = self.budget.evaluations_left(), []
        for record in found:
            if not left or record.step >= self.budget.num_steps:
                break
            # Perhaps a part of its values.
            allowed.append(record._replace(values=record.values[:left]))
            left -= len(allowed[-1].values)
        return allowed

    def _later_value(self, point: int) -> Callable[[], Any]:
        candidates = jax.tree.map(lambda x: x[point][None], self._told.ask())

        def value() -> Any:
            outcome = self._evaluate.repeat(candidates)
            return None if outcome is None else outcome.values[0]

        return value

    def params(self, stopped: str) -> optax.Params:
        self.confirm(stopped)
        return self.best.params
