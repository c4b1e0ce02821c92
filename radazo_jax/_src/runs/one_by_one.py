"""Steps that are taken one by one, on values that a journal can keep."""

import abc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import optax

from radazo_jax._src import programs
from radazo_jax._src.estimators.gradients import values_at
from radazo_jax._src.runs import journal
from radazo_jax._src.runs.journal import Done, Teller
from radazo_jax._src.runs.learning_rate import LearningRate
from radazo_jax._src.runs.loop import Staged, Taken
from radazo_jax._src.runs.results import Best
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.steps import ask_tell, step, units
from radazo_jax._src.steps.history import History
from radazo_jax._src.steps.records import Path, Record
from radazo_jax._src.steps.stages import Stages
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


class OneByOne(Teller, Staged, abc.ABC):
    """`Steps` that are taken one by one: each is written before it is taken.

    Attributes:
      best: The best so far.
    """

    def __init__(self, stages: Stages, state: SolverState, budget: Budget):
        """Compiles nothing yet.

        Args:
          stages: The stages of the run, with traced functions.
          state: The state before the first step.
          budget: The budgets, which have started.
        """
        super().__init__(stages, state)
        self._budget = budget
        self._done: list[Done] = []
        # A step of the journal, one of its points, and what is kept of it.
        self._again: tuple[Record, int, Any] | None = None
        self.best = Best(None)

    def begin(self, state: SolverState) -> SolverState:
        """See `Steps`."""
        following = super().begin(state)
        if following is not state:
            self._budget.size = step.num_points(self.stages.run, following)
        return following

    @abc.abstractmethod
    def _values(self, state: SolverState) -> Found | None:
        """The values of a step; `None` if it was interrupted."""

    @abc.abstractmethod
    def _before_each(self, records: Sequence[Record]) -> Callable[[SolverState], None]:
        """A function to call before each of the steps that a journal holds."""

    @abc.abstractmethod
    def _see(self, done: Done) -> tuple[float, dict[str, str]]:
        """The value that a step is compared by, and figures of the step."""

    def _value_again(self, state: SolverState, path: Path, found: Any) -> Any:
        """The value now at a point of the journal, `None` if it was interrupted.

        Args:
          state: The state after the journal.
          path: The journal.
          found: The value now, which was kept when the step of the point was taken.
        """
        del state, path
        return found

    @contextmanager
    def resumed(
        self,
        path: Path | None,
        fun: Any,
        state: SolverState,
        rate: LearningRate | None = None,
    ) -> Iterator[SolverState]:
        """Takes the steps that a journal holds, and writes further steps to it.

        Args:
          path: The journal, if there is one.
          fun: The function, as the caller gave it.
          state: The state before the first step.
          rate: The learning rate that was found before it.

        Yields:
          The state after the steps.
        """
        given = path, fun, state, self._budget
        with journal.resumed(*given, self, self._before_each, rate) as (
            state,
            self._done,
            self._write,
        ):
            self._total = ask_tell.checksum_of(state.params)
            for done in self._done:
                self._count(done)
            yield state

    def warn_of_another_function(self, state: SolverState, path: Path) -> None:
        """Warns if a point of the journal has another value now.

        Args:
          state: The state after the journal.
          path: The journal.

        Raises:
          RunError: If the point could not be evaluated.
        """
        if self._again is None:
            return
        record, point, found = self._again
        value = self._value_again(state, path, found)
        if value is not None:
            journal.warn_of_another_value(path, record, point, value)

    @property
    def last_failure(self) -> str:
        """The last failure so far, or an empty string."""
        failures = [text for done in self._done for text in done.record.failures]
        return failures[-1] if failures else ""

    def take(self, state: SolverState) -> Taken | None:
        """See `Steps`."""
        number, start = int(state.step), time.perf_counter()
        try:
            found = self._values(state)
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
        state, numbers, self._total = self.tell(state, found.values)
        done = Done.of(record, self.names, np.asarray(numbers))
        self._done.append(done)
        figures = self._count(done)
        rows = {name: np.array([x]) for name, x in done.numbers.items()}
        last = texts[-1] if texts else ""
        given = found.values, found.points, figures, last, len(texts)
        return Taken(state, rows, *given)

    def _count(self, done: Done) -> dict[str, str]:
        value, figures = self._see(done)
        self._budget.saw(value, len(done.record.values))
        return figures

    def history(self) -> History:
        """See `Steps`."""
        return History.of([done.numbers for done in self._done])

    def params(self, state: SolverState, stopped: str) -> optax.Params:
        """See `Steps`."""
        del stopped
        return self.stages.last_params(state)

    def outside(self, state: SolverState) -> SolverState:
        """See `Steps`."""
        return state


class TracedSteps(OneByOne):
    """Steps of a function that JAX traces.

    The program that takes a step is the one that `replay` runs.
    """

    def __init__(
        self,
        stages: Stages,
        state: SolverState,
        budget: Budget,
        interrupted: Callable[[], bool],
    ):
        """Compiles nothing yet.

        Args:
          stages: The stages of the run, with traced functions.
          state: The state before the first step.
          budget: The budgets, which have started.
          interrupted: Asked before each step whether to stop.
        """
        super().__init__(stages, state, budget)
        self._interrupted = interrupted
        self._evaluations = 0

    def _begin(self, state: SolverState) -> None:
        super()._begin(state)
        self._evaluate = programs.of(_values_at, self.stages.run, state)

    def _values(self, state: SolverState) -> Found | None:
        if self._interrupted():
            return None
        found = np.asarray(self._evaluate(state))
        failed = found[~np.isfinite(found)]
        return Found(found, [f"returned {value}" for value in failed])

    def _before_each(self, records: Sequence[Record]) -> Callable[[SolverState], None]:
        chosen = journal.to_evaluate_again(records)

        def before(state: SolverState) -> None:
            if chosen is not None and int(state.step) == chosen[0].step:
                record, i = chosen
                self._again = record, i, np.asarray(self._evaluate(state))[i]

        return before

    def _see(self, done: Done) -> tuple[float, dict[str, str]]:
        value = done.numbers["value"]
        if np.isfinite(value) and value < self.best.value:
            self.best = Best(None, float(value), self._evaluations)
        self._evaluations += len(done.record.values)
        return value, {"loss": f"{value:.6g}"}


def _values_at(run: Run, state: SolverState) -> Any:
    """The values at the points of a step, [n]."""
    loss = step.loss_at(run, state)
    points, _ = step.points_at(run, state, loss)
    placed = units.around(run.units, state.params, points)
    values, _ = values_at(run.evaluator, loss, state.params, placed)
    return points.join(values)
