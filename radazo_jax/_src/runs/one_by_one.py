"""Steps that are taken one by one, on values that a journal can keep."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from radazo_jax._src import program
from radazo_jax._src.estimators.gradients import values_at
from radazo_jax._src.runs import journal
from radazo_jax._src.runs.journal import Done
from radazo_jax._src.runs.loop import Taken
from radazo_jax._src.runs.results import Best
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.steps import ask_tell, history, step
from radazo_jax._src.steps.history import History
from radazo_jax._src.steps.records import Path, Record
from radazo_jax._src.steps.states import Run, RunError, SolverState


class Found(NamedTuple):
    """The values at the points of a step.

    Attributes:
      values: The values, [n], of the dtype in which they are used.
      failures: Texts about the points that failed.
      points: The points, a tree of NumPy arrays, [n, …]; `None` if they stay on the
        device.
    """

    values: np.ndarray
    failures: Sequence[str]
    points: Any = None


class Source(Protocol):
    """Gives the values of a run's steps, and takes the steps.

    Attributes:
      best: The best so far.
    """

    best: Best

    def values(self, state: SolverState) -> Found | None:
        """The values of a step; `None` if it was interrupted."""
        ...

    def tell(self, state: SolverState, values: Any) -> tuple[SolverState, Any, Any]:
        """Takes a step in place; returns the state, its numbers, and its checksum."""
        ...

    def before_each(self, records: Sequence[Record]) -> Callable[[SolverState], None]:
        """A function to call before each of the steps that a journal holds."""
        ...

    def saw(self, done: Done) -> tuple[float, dict[str, str]]:
        """The value that a step is compared by, and figures of the step."""
        ...

    def params(self, state: SolverState) -> Any:
        """The parameters of the result."""
        ...

    def outside(self, state: SolverState) -> SolverState:
        """A state as the caller gets it."""
        ...


class OneByOne:
    """`Steps` that are taken one by one: each is written before it is taken."""

    def __init__(
        self,
        source: Source,
        state: SolverState,
        budget: Budget,
        done: list[Done],
        write: Callable[[Record], None],
    ):
        """Counts the steps that a journal held.

        Args:
          source: The source of the values.
          state: The state after the steps done.
          budget: The budgets, which have started.
          done: The steps of the journal.
          write: Gets the record of each further step.
        """
        self._source, self._budget = source, budget
        self._done, self._write = done, write
        self._names = history.names(state)
        self._total = ask_tell.checksum_of(state.params)
        for one in done:
            self._count(one)

    @property
    def best(self) -> Best:
        """See `Steps`."""
        return self._source.best

    @property
    def last_failure(self) -> str:
        """The last failure so far, or an empty string."""
        failures = [text for done in self._done for text in done.record.failures]
        return failures[-1] if failures else ""

    def take(self, state: SolverState) -> Taken | None:
        """See `Steps`."""
        number, start = int(state.step), time.perf_counter()
        try:
            found = self._source.values(state)
            if found is None:
                return None
            seconds, texts = time.perf_counter() - start, tuple(found.failures)
            record = Record(number, found.values, int(self._total), seconds, texts)
            self._write(record)
        except (RuntimeError, OSError) as error:
            raise RunError(
                f"step {number} could not be taken: {error} The error's state is the "
                "run up to this step.",
                state,
            ) from error
        state, numbers, self._total = self._source.tell(state, found.values)
        done = Done.of(record, self._names, np.asarray(numbers))
        self._done.append(done)
        figures = self._count(done)
        rows = {name: np.array([x]) for name, x in done.numbers.items()}
        last = texts[-1] if texts else ""
        return Taken(state, rows, found.values, found.points, figures, last)

    def _count(self, done: Done) -> dict[str, str]:
        value, figures = self._source.saw(done)
        self._budget.saw(value, len(done.record.values))
        return figures

    def history(self) -> History:
        """See `Steps`."""
        return History.of([done.numbers for done in self._done])

    def params(self, state: SolverState, stopped: str) -> Any:
        """See `Steps`."""
        del stopped
        return self._source.params(state)

    def outside(self, state: SolverState) -> SolverState:
        """See `Steps`."""
        return self._source.outside(state)


class TracedValues:
    """`Source` of a function that JAX traces.

    The program that takes a step is the one that `replay` runs.
    """

    def __init__(
        self,
        run: Run,
        state: SolverState,
        path: Path,
        interrupted: Callable[[], bool],
    ):
        """Compiles nothing yet.

        Args:
          run: The run, with traced functions.
          state: The state before the first step.
          path: The journal.
          interrupted: Asked before each step whether to stop.
        """
        self._run, self._path, self._interrupted = run, path, interrupted
        self._values = program.of(_values, run, state)
        self.tell = ask_tell.teller(run, state)
        self.best = Best(None)
        self._evaluations = 0

    def values(self, state: SolverState) -> Found | None:
        """See `Source`."""
        if self._interrupted():
            return None
        found = np.asarray(self._values(state))
        failed = found[~np.isfinite(found)]
        return Found(found, [f"returned {value}" for value in failed])

    def before_each(self, records: Sequence[Record]) -> Callable[[SolverState], None]:
        """See `Source`; evaluates a point of the journal again."""
        chosen = journal.to_evaluate_again(records)

        def before(state: SolverState) -> None:
            if chosen is None or int(state.step) != records[chosen[0]].step:
                return
            record, i = records[chosen[0]], chosen[1]
            again = np.asarray(self._values(state))[i]
            journal.warn_of_another_value(self._path, record, i, again, stacklevel=9)

        return before

    def saw(self, done: Done) -> tuple[float, dict[str, str]]:
        """See `Source`."""
        value = done.numbers["value"]
        if np.isfinite(value) and value < self.best.value:
            self.best = Best(None, float(value), self._evaluations)
        self._evaluations += len(done.record.values)
        return value, {"loss": f"{value:.6g}"}

    def params(self, state: SolverState) -> Any:
        """See `Source`."""
        return step.last_params(self._run, state)

    def outside(self, state: SolverState) -> SolverState:
        """See `Source`."""
        return state


def _values(run: Run, state: SolverState) -> Any:
    """The values at the points of a step, [n]."""
    loss = step.loss_at(run, state)
    points, _ = step.points_at(run, state, loss)
    values, _ = values_at(run.evaluator, loss, state.params, points)
    return points.join(values)
