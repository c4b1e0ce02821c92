"""Runs step by step: the values of a step are written before it is taken."""

import abc
import functools
import time
from collections.abc import Callable, Sequence

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
from radazo_jax._src.train.stepper import AskTellOptimizer, Stepper


class Stepwise(Steps, abc.ABC):
    """Steps that are taken one at a time, each after its values are written."""

    def __init__(
        self,
        stepper: Stepper,
        budget: Budget,
        file: Journal | None,
        interrupted: Callable[[], bool],
    ):
        """Takes no step yet.

        Args:
          stepper: Takes the steps.
          budget: The budgets, which have started.
          file: The journal, open and begun; `None` without one.
          interrupted: Asked before each step whether to stop.
        """
        super().__init__(budget)
        self._stepper, self._file, self._interrupted = stepper, file, interrupted
        self._record: Record | None = None  # The latest one.
        self._points: optax.Params = None  # Of the latest step, if they are kept.

    @property
    def state(self) -> SolverState:
        return self._stepper.state

    @property
    def number(self) -> int:
        return self._stepper.step

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
        stops = {len(found), *self._stops(found), *([] if again is None else again[:1])}
        first = 0
        value: Callable[[], np.ndarray | None] | None = None
        for stop in sorted(stops):
            part, first = found[first:stop], stop
            for record, row in zip(part, self._stepper.rebuild(part), strict=True):
                self._count(record, row)
            if again is not None and stop == again[0]:
                value = self._later_value(again[1])
            if stop < len(found):
                self._note(found[stop])
        if again is None or value is None:
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
        """Returns the numbers of the steps of a journal whose points are needed."""
        del found
        return ()

    def _note(self, record: Record) -> None:
        """Notes the points of a step of a journal, before it is taken."""
        del record

    @abc.abstractmethod
    def _later_value(self, point: int) -> Callable[[], np.ndarray | None]:
        """Returns a function that returns the value at a point of the step.

        It is called later, once all steps of the journal were taken. It returns `None`
        if it was interrupted.
        """

    @abc.abstractmethod
    def _values(self) -> tuple[np.ndarray, Sequence[str]] | None:
        """Evaluates the points of a step.

        Returns:
          The values, and texts about failures; `None` if it was interrupted.
        """

    @abc.abstractmethod
    def _value_of(self, record: Record, row: dict[str, float]) -> float:
        """Returns the value that a step is compared by."""

    def _taken(self, record: Record) -> dict[str, float]:
        """Takes a step; returns its numbers for a `History`, by name."""
        return self._stepper.row(record, self._stepper.take(record.values))

    def take(self) -> bool:
        number, start = self.number, time.perf_counter()
        try:
            found = None if self._interrupted() else self._values()
            if found is None:
                return False
            values, texts = found
            seconds, total = time.perf_counter() - start, self._stepper.checksum
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
        self._count(record, self._taken(record))
        return True

    def _count(self, record: Record, row: dict[str, float]) -> None:
        """Counts a step."""
        self.rows.append(row)
        self._record = record
        self.last_failure = (self.last_failure, *record.failures)[-1]
        self.budget.count_step(self._value_of(record, row), len(record.values))

    def report(self) -> Report:
        assert self._record is not None
        values, points = self._record.values, self._points
        return Report(self.number, values, points, self.best, self.outside())

    def figures(self) -> dict[str, str]:
        assert self._record is not None
        rate = len(self._record.values) / max(self._record.seconds, 1e-9)
        return {"best": f"{self.best.value:.6g}", "evaluations/s": f"{rate:.3g}"}

    def params(self, stopped: str) -> optax.Params:
        del stopped
        return self._stepper.state.params


class StepwiseTraced(Stepwise):
    """Steps of a function that JAX traces.

    The program that takes a step is the one that `replay` runs.
    """

    @functools.cached_property
    def _program(self) -> Callable[[SolverState], jax.Array]:
        return programs.of(_values_of_step, self._stepper.run, self._stepper.state)

    def _evaluated(self) -> np.ndarray:
        return np.asarray(self._program(self._stepper.state))

    def _values(self) -> tuple[np.ndarray, Sequence[str]] | None:
        found = self._evaluated()
        failed = found[~np.isfinite(found)]
        return found, [f"returned {value}" for value in failed]

    def _later_value(self, point: int) -> Callable[[], np.ndarray | None]:
        value = self._evaluated()[point]
        return lambda: value

    def _value_of(self, record: Record, row: dict[str, float]) -> float:
        value: float = row["value"]
        if np.isfinite(value) and value < self.best.value:
            self.best = Best(None, float(value), self.budget.evaluations)
        return value

    def figures(self) -> dict[str, str]:
        return {"loss": f"{self.rows[-1]['value']:.6g}"}


class StepwiseCalled(Stepwise):
    """Steps of a Python function, which an `External` evaluator calls."""

    def __init__(
        self,
        stepper: Stepper,
        budget: Budget,
        file: Journal | None,
        interrupted: Callable[[], bool],
        evaluator: External,
        calls: Calls,
    ):
        """Takes no step yet.

        Args:
          stepper: Takes the steps.
          budget: The budgets, which have started.
          file: The journal, open and begun; `None` without one.
          interrupted: Asked before each step whether to stop.
          evaluator: The evaluator.
          calls: Its calls of the function.
        """
        super().__init__(stepper, budget, file, interrupted)
        self._evaluator, self._calls = evaluator, calls
        self._ask_tell = AskTellOptimizer(stepper)
        self.best = self._ask_tell.best
        self._outcome: Outcome | None = None

    def _values(self) -> tuple[np.ndarray, Sequence[str]] | None:
        candidates = self._ask_tell.ask()
        outcome = self._calls.evaluate(candidates)
        if outcome is None:
            return None
        self._outcome, n = outcome, len(outcome.values)
        self._points = jax.tree.map(lambda x: x[:n], candidates)
        failures = [outcome.failures[i] for i in sorted(outcome.failures)]
        values = checks.as_values(outcome.values, self._stepper.dtype)
        beyond = outcome.values[np.isinf(values) & np.isfinite(outcome.values)]
        failures += [f"returned {v}, beyond {values.dtype}" for v in beyond]
        return values, failures

    def _value_of(self, record: Record, row: dict[str, float]) -> float:
        del row
        self.best = self._ask_tell.best
        value: float = record.lowest
        return value

    def _taken(self, record: Record) -> dict[str, float]:
        assert self._outcome is not None
        values, infos, _ = self._outcome
        return self._ask_tell.take(record, values, infos)

    def _note(self, record: Record) -> None:
        self._ask_tell.ask()
        self._ask_tell.note(record.values)

    def _stops(self, found: Sequence[Record]) -> Sequence[int]:
        # The best of its points is one of the result.
        values = [record.lowest for record in found]
        return [int(np.argmin(values))] if values else ()

    def _later_value(self, point: int) -> Callable[[], np.ndarray | None]:
        candidates = self._ask_tell.ask()
        if not self._evaluator.batched:
            candidates, point = jax.tree.map(lambda x: x[point][None], candidates), 0

        def value() -> np.ndarray | None:
            outcome = self._calls.evaluate(candidates)
            if outcome is None:
                return None
            return checks.as_values(outcome.values, self._stepper.dtype)[point]

        return value

    def params(self, stopped: str) -> optax.Params:
        del stopped
        return self._ask_tell.params

    def outside(self) -> SolverState:
        return self._ask_tell.state


def _values_of_step(run: Run, state: SolverState) -> jax.Array:
    """Returns the values at the points of a step, [n]."""
    loss = step.loss_at(run, state)
    points, _ = step.points_at(run, state, loss)
    values, _ = values_at(run.evaluator, loss, state.params, points)
    return points.join(values)
