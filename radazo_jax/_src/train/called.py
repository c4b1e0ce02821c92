"""Steps that are taken one by one, on values that a journal can keep."""

import abc
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from radazo_jax._src.base import checks, programs
from radazo_jax._src.estimates.external import Calls, External, Mistake, Outcome
from radazo_jax._src.estimates.gradients import values_at
from radazo_jax._src.runs import journal
from radazo_jax._src.runs.budget import Budget
from radazo_jax._src.runs.journal import Journal, Record
from radazo_jax._src.runs.loop import Steps
from radazo_jax._src.runs.results import Best, Report
from radazo_jax._src.steps import step
from radazo_jax._src.steps.states import Run, RunError, SolverState
from radazo_jax._src.train.replay import Told


class OneByOne(Steps, abc.ABC):
    """Steps that are taken one by one: each is written before it is taken."""

    def __init__(self, told: Told, budget: Budget, file: Journal | None):
        """Takes no step yet.

        Args:
          told: Is told the values.
          budget: The budgets, which have started.
          file: The journal, open and begun; `None` without one.
        """
        super().__init__(budget)
        self._told, self._file = told, file
        self._record: Record | None = None  # The latest one.
        self._points: Any = None
        self._outcome: Outcome | None = None

    @property
    def state(self) -> Any:
        return self._told.maker.state

    @property
    def number(self) -> int:
        return self._told.maker.step

    def resume(self) -> None:
        """Takes the steps of the journal, as far as the budgets allow.

        Warns if one of its points has another value now.

        Raises:
          RunError: If the point could not be evaluated.
        """
        if self._file is None:
            return
        found = self._file.records
        found = found[: self.budget.allowed([len(record.values) for record in found])]
        again = journal.to_evaluate_again(found)
        asks = self._stops(found)
        stops = {len(found), *asks, *([] if again is None else again[:1])}
        first, value = 0, lambda: None
        for stop in sorted(stops):
            part = found[first:stop]
            rows = self._told.rebuild(part)
            for record, row in zip(part, rows, strict=True):
                self._count(record, row)
            first = stop
            if stop < len(found):
                if again is not None and stop == again[0]:
                    value = self._later_value(again[1])
                if stop in asks:
                    self._told.ask()
        if again is None:
            return
        try:
            now = value()
        except Mistake as mistake:
            raise RunError(str(mistake), self.state) from mistake.__cause__
        except (RuntimeError, OSError) as error:
            raise RunError(
                "journal has a point that could not be evaluated again: "
                f"{error} The error's result is the run in the journal.",
                self.state,
            ) from error
        if now is not None:
            i, point = again
            journal.warn_of_another_value(self._file.path, found[i], point, now)

    def _stops(self, found: Sequence[Record]) -> Sequence[int]:
        """The numbers of the steps of a journal whose points are needed."""
        del found
        return ()

    @abc.abstractmethod
    def _later_value(self, point: int) -> Callable[[], Any]:
        """A function that returns the value at a point of the step.

        It is called later, once all steps of the journal were taken. It returns `None`
        if it was interrupted.
        """

    @abc.abstractmethod
    def _values(self) -> tuple[np.ndarray, Sequence[str]] | None:
        """The values of a step and failures; `None` if it was interrupted."""

    @abc.abstractmethod
    def _value_of(self, record: Record, row: dict[str, Any]) -> float:
        """The value that a step is compared by."""

    def take(self) -> bool:
        number, start = self.number, time.perf_counter()
        try:
            found = self._values()
            if found is None:
                return False
            values, texts = found
            seconds, total = time.perf_counter() - start, self._told.maker.checksum
            record = Record(number, values, int(total), seconds, tuple(texts))
            if self._file is not None:
                self._file.append(record)
        except Mistake as mistake:
            raise RunError(str(mistake), self.state) from mistake.__cause__
        except (RuntimeError, OSError) as error:
            raise RunError(
                f"step {number} could not be taken: {error} The error's state is the "
                "run up to this step.",
                self.state,
            ) from error
        self.num_failed += len(texts)
        known = (None, None) if self._outcome is None else self._outcome[:2]
        row = self._told.take(record, *known)
        self._count(record, row)
        return True

    def _count(self, record: Record, row: dict[str, Any]) -> None:
        """Counts a step."""
        self.rows.append(row)
        self._record = record
        self.last_failure = (self.last_failure, *record.failures)[-1]
        self.budget.count_step(self._value_of(record, row), len(record.values))

    def report(self) -> Report:
        assert self._record is not None
        given = self._record.values, self._points, self.best, self.outside()
        return Report(self.number, *given)

    def figures(self) -> dict[str, str]:
        assert self._record is not None
        rate = len(self._record.values) / max(self._record.seconds, 1e-9)
        return {"best": f"{self.best.value:.6g}", "evaluations/s": f"{rate:.3g}"}

    def params(self, stopped: str) -> Any:
        del stopped
        return self._told.maker.state.params


class Traced(OneByOne):
    """Steps of a function that JAX traces.

    The program that takes a step is the one that `replay` runs.
    """

    def __init__(
        self, told: Told, budget: Budget, file: Journal, interrupted: Callable[[], bool]
    ):
        """Takes no step yet.

        Args:
          told: Is told the values.
          budget: The budgets, which have started.
          file: The journal, open and begun.
          interrupted: Asked before each step whether to stop.
        """
        super().__init__(told, budget, file)
        self._interrupted = interrupted
        self._program: Callable[[SolverState], Any] | None = None

    def _evaluated(self) -> np.ndarray:
        maker: Any = self._told.maker
        if self._program is None:
            self._program = programs.of(_values_at, maker.run, maker.state)
        return np.asarray(self._program(maker.state))

    def _values(self) -> tuple[np.ndarray, Sequence[str]] | None:
        if self._interrupted():
            return None
        found = self._evaluated()
        failed = found[~np.isfinite(found)]
        return found, [f"returned {value}" for value in failed]

    def _later_value(self, point: int) -> Callable[[], Any]:
        value = self._evaluated()[point]
        return lambda: value

    def _value_of(self, record: Record, row: dict[str, Any]) -> float:
        value: float = row["value"]
        if np.isfinite(value) and value < self.best.value:
            self.best = Best(None, float(value), self.budget.evaluations)
        return value

    def figures(self) -> dict[str, str]:
        return {"loss": f"{self.rows[-1]['value']:.6g}"}


class Called(OneByOne):
    """Steps of a Python function, which an `External` evaluator calls."""

    def __init__(
        self,
        told: Told,
        budget: Budget,
        file: Journal | None,
        evaluator: External,
        calls: Calls,
    ):
        """Takes no step yet.

        Args:
          told: Is told the values.
          budget: The budgets, which have started.
          file: The journal, open and begun; `None` without one.
          evaluator: The evaluator.
          calls: Its calls of the function.
        """
        super().__init__(told, budget, file)
        self._evaluator, self._calls, self.best = evaluator, calls, told.best

    def _values(self) -> tuple[np.ndarray, Sequence[str]] | None:
        candidates = self._told.ask()
        outcome = self._calls.evaluate(candidates)
        if outcome is None:
            return None
        self._outcome, n = outcome, len(outcome.values)
        self._points = jax.tree.map(lambda x: x[:n], candidates)
        failures = [outcome.failures[i] for i in sorted(outcome.failures)]
        values = checks.as_values(outcome.values, self._told.maker.dtype)
        beyond = outcome.values[np.isinf(values) & np.isfinite(outcome.values)]
        failures += [f"returned {v}, beyond {values.dtype}" for v in beyond]
        return values, failures

    def _value_of(self, record: Record, row: dict[str, Any]) -> float:
        del row
        self.best = self._told.best
        value: float = record.lowest
        return value

    def _stops(self, found: Sequence[Record]) -> Sequence[int]:
        # The best of its points is one of the result.
        values = [record.lowest for record in found]
        return [int(np.argmin(values))] if values else ()

    def _later_value(self, point: int) -> Callable[[], Any]:
        candidates = self._told.ask()
        if not self._evaluator.batched:
            candidates, point = jax.tree.map(lambda x: x[point][None], candidates), 0

        def value() -> Any:
            outcome = self._calls.evaluate(candidates)
            if outcome is None:
                return None
            return checks.as_values(outcome.values, self._told.maker.dtype)[point]

        return value

    def params(self, stopped: str) -> optax.Params:
        del stopped
        return self._told.params

    def outside(self) -> Any:
        return self._told.state


def _values_at(run: Run, state: SolverState) -> Any:
    """The values at the points of a step, [n]."""
    loss = step.loss_at(run, state)
    points, _ = step.points_at(run, state, loss)
    values, _ = values_at(run.evaluator, loss, state.params, points)
    return points.join(values)
