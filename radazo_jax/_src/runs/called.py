"""Values of a run's steps by calls of a Python function."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from radazo_jax._src import program, trees
from radazo_jax._src.evaluators.external import Calls, External, Outcome
from radazo_jax._src.runs import journal
from radazo_jax._src.runs.journal import Done
from radazo_jax._src.runs.one_by_one import Found
from radazo_jax._src.runs.results import Best
from radazo_jax._src.steps import ask_tell, step
from radazo_jax._src.steps.records import Path, Record, lowest, of_points
from radazo_jax._src.steps.states import Run, RunError, SolverState


class CalledValues:
    """`Source` of a function that an `External` evaluator calls."""

    def __init__(self, run: Run, state: SolverState, evaluator: External, calls: Calls):
        """Compiles nothing yet.

        Args:
          run: The run.
          state: The state before the first step.
          evaluator: The evaluator.
          calls: Its calls of the function.
        """
        self._run, self._evaluator, self._calls = run, evaluator, calls
        self._ask = program.of(ask_tell.candidates_of, run, state)
        self._tell = ask_tell.teller(run, state)
        # A step of the journal, and its point to evaluate again, with its candidates.
        self._again: tuple[Record, int, optax.Params] | None = None
        # The candidates of the next step, which the device computes meanwhile.
        self._following: Any = None
        self._count = 0
        self.best = Best(trees.as_numpy(state.params))

    def tell(self, state: SolverState, values: Any) -> tuple[SolverState, Any, Any]:
        """See `Source`."""
        taken = self._tell(state, values)
        self._following = self._ask(taken[0])
        return taken

    def values(self, state: SolverState) -> Found | None:
        """See `Source`."""
        asked = self._ask(state) if self._following is None else self._following
        candidates = trees.as_numpy(asked)
        outcome = self._outcome(state, candidates)
        if outcome is None:
            return None
        n = len(outcome.values)
        points = jax.tree.map(lambda x: x[:n], candidates)
        self._see(points, outcome)
        failures = [outcome.failures[i] for i in sorted(outcome.failures)]
        values = ask_tell.as_values(outcome.values, state.params)
        beyond = outcome.values[np.isinf(values) & np.isfinite(outcome.values)]
        failures += [f"returned {v}, beyond {values.dtype}" for v in beyond]
        return Found(values, failures, points)

    def _outcome(self, state: SolverState, candidates: optax.Params) -> Outcome | None:
        """The outcome at the points of a step, or at the first one if it is enough."""
        # A batch stays as large: `fun` may be compiled for it.
        if self._evaluator.batched or not self._run.search.stops_early:
            return self._calls.evaluate(candidates)
        moved = slice(ask_tell.num_moved(candidates))
        candidates = jax.tree.map(lambda x: x[moved], candidates)
        if not self._evaluator.in_turn:
            return self._calls.evaluate(candidates)
        first = self._calls.evaluate(jax.tree.map(lambda x: x[:1], candidates))
        if first is None:
            return None
        value = ask_tell.as_values(first.values, state.params)[0]
        if step.is_rejected(self._run, state, value):
            return first
        return self._calls.evaluate(candidates, known=first)

    def _see(self, points: optax.Params, outcome: Outcome) -> None:
        """Looks for the best of the points of a step."""
        before, self._count = self._count, self._count + len(outcome.values)
        i, value = lowest(of_points(outcome.values))
        if value < self.best.value:
            point = jax.tree.map(lambda x: x[i].copy(), points)
            self.best = Best(point, float(value), before + i, outcome.infos[i])

    def before_each(self, records: Sequence[Record]) -> Callable[[SolverState], None]:
        """See `Source`; asks for the best point of the journal at its step."""
        best = records[int(np.argmin([r.lowest for r in records]))].step
        chosen = journal.to_evaluate_again(records)
        again = None if chosen is None else records[chosen[0]].step

        def before(state: SolverState) -> None:
            record = records[int(state.step) - records[0].step]
            if record.step not in (best, again):
                self._count += len(record.values)
                return
            candidates = trees.as_numpy(self._ask(state))
            if chosen is not None and record.step == again:
                self._again = record, chosen[1], candidates
            infos = [None] * len(record.values)
            values = record.values.astype(np.float64)
            self._see(candidates, Outcome(values, infos, {}))

        return before

    def warn_of_another_function(
        self, state: SolverState, path: Path, stacklevel: int
    ) -> None:
        """Evaluates a point of the journal again, and warns if its value is another.

        Args:
          state: The state after the journal.
          path: The journal.
          stacklevel: The user's frame, counted from the caller.

        Raises:
          RunError: If the point could not be evaluated.
        """
        if self._again is None:
            return
        record, i, candidates = self._again
        if not self._evaluator.batched:
            candidates, i = jax.tree.map(lambda x: x[i : i + 1], candidates), 0
        try:
            outcome = self._calls.evaluate(candidates)
        except (RuntimeError, OSError) as error:
            raise RunError(
                f"journal {path} has a point that could not be evaluated again: "
                f"{error} The error's result is the run in the journal.",
                state,
            ) from error
        if outcome is not None:
            value = ask_tell.as_values(outcome.values, state.params)[i]
            journal.warn_of_another_value(
                path, record, self._again[1], value, stacklevel + 1
            )

    def saw(self, done: Done) -> tuple[float, dict[str, str]]:
        """See `Source`."""
        record = done.record
        rate = len(record.values) / max(record.seconds, 1e-9)
        figures = {"best": f"{self.best.value:.6g}", "evaluations/s": f"{rate:.3g}"}
        return record.lowest, figures

    def params(self, state: SolverState) -> Any:
        """See `Source`."""
        return trees.as_numpy(state.params)

    def outside(self, state: SolverState) -> SolverState:
        """See `Source`; in NumPy arrays, which keep their dtypes without 64 bits."""
        found: SolverState = trees.as_numpy(state)
        return found
