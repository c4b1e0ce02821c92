"""Steps of a Python function, which is called at their points."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from radazo_jax._src import programs, trees
from radazo_jax._src.evaluators.external import Calls, External, Outcome
from radazo_jax._src.runs import journal
from radazo_jax._src.runs.journal import Done
from radazo_jax._src.runs.one_by_one import Found, OneByOne
from radazo_jax._src.runs.results import Best
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.steps import ask_tell, step
from radazo_jax._src.steps.records import Path, Record, lowest, of_points
from radazo_jax._src.steps.stages import Stages
from radazo_jax._src.steps.states import RunError, SolverState


class CalledSteps(OneByOne):
    """Steps of a function that an `External` evaluator calls."""

    def __init__(
        self,
        stages: Stages,
        state: SolverState,
        budget: Budget,
        evaluator: External,
        calls: Calls,
    ):
        """Compiles nothing yet.

        Args:
          stages: The stages of the run.
          state: The state before the first step.
          budget: The budgets, which have started.
          evaluator: The evaluator.
          calls: Its calls of the function.
        """
        super().__init__(stages, state, budget)
        self._evaluator, self._calls = evaluator, calls
        self._evaluations = 0
        self.best = Best(trees.as_numpy(state.params))

    def _begin(self, state: SolverState) -> None:
        super()._begin(state)
        self._ask = programs.of(ask_tell.candidates_of, self.stages.run, state)
        # The candidates of the next step, which the device computes meanwhile.
        self._following: Any = None

    def tell(self, state: SolverState, values: Any) -> tuple[SolverState, Any, Any]:
        taken = super().tell(state, values)
        self._following = self._ask(taken[0])
        return taken

    def _values(self, state: SolverState) -> Found | None:
        asked = self._ask(state) if self._following is None else self._following
        candidates = trees.as_numpy(asked)
        outcome = self._outcome(state, candidates)
        if outcome is None:
            return None
        n = len(outcome.values)
        points = jax.tree.map(lambda x: x[:n], candidates)
        self._find_best(points, outcome)
        failures = [outcome.failures[i] for i in sorted(outcome.failures)]
        values = ask_tell.as_values(outcome.values, state.params)
        beyond = outcome.values[np.isinf(values) & np.isfinite(outcome.values)]
        failures += [f"returned {v}, beyond {values.dtype}" for v in beyond]
        return Found(values, failures, points)

    def _outcome(self, state: SolverState, candidates: optax.Params) -> Outcome | None:
        """The outcome at the points of a step, or at the first one if it is enough."""
        # A batch stays as large: `fun` may be compiled for it.
        if self._evaluator.batched or not self.stages.run.search.stops_early:
            return self._calls.evaluate(candidates)
        moved = slice(ask_tell.num_moved(candidates))
        candidates = jax.tree.map(lambda x: x[moved], candidates)
        if not self._evaluator.in_turn:
            return self._calls.evaluate(candidates)
        first = self._calls.evaluate(jax.tree.map(lambda x: x[:1], candidates))
        if first is None:
            return None
        value = ask_tell.as_values(first.values, state.params)[0]
        if step.is_rejected(self.stages.run, state, value):
            return first
        return self._calls.evaluate(candidates, known=first)

    def _find_best(self, points: optax.Params, outcome: Outcome) -> None:
        """Looks for the best of the points of a step."""
        before = self._evaluations
        self._evaluations += len(outcome.values)
        i, value = lowest(of_points(outcome.values))
        if value < self.best.value:
            point = jax.tree.map(lambda x: x[i].copy(), points)
            self.best = Best(point, float(value), before + i, outcome.infos[i])

    def _before_each(self, records: Sequence[Record]) -> Callable[[SolverState], None]:
        best = min(records, key=lambda record: record.lowest, default=None)
        chosen = journal.to_evaluate_again(records)
        again = None if chosen is None else chosen[0]

        def before(state: SolverState) -> None:
            record = records[int(state.step) - records[0].step]
            if record is not best and record is not again:
                self._evaluations += len(record.values)
                return
            candidates = trees.as_numpy(self._ask(state))
            if chosen is not None and record is again:
                self._again = *chosen, (chosen[1], candidates)
            infos = [None] * len(record.values)
            values = record.values.astype(np.float64)
            self._find_best(candidates, Outcome(values, infos, {}))

        return before

    def _value_again(self, state: SolverState, path: Path, found: Any) -> Any:
        point, candidates = found
        if not self._evaluator.batched:
            candidates, point = jax.tree.map(lambda x: x[point][None], candidates), 0
        try:
            outcome = self._calls.evaluate(candidates)
        except (RuntimeError, OSError) as error:
            raise RunError(
                f"journal {path} has a point that could not be evaluated again: "
                f"{error} The error's result is the run in the journal.",
                state,
            ) from error
        if outcome is None:
            return None
        return ask_tell.as_values(outcome.values, state.params)[point]

    def _see(self, done: Done) -> tuple[float, dict[str, str]]:
        record = done.record
        rate = len(record.values) / max(record.seconds, 1e-9)
        figures = {"best": f"{self.best.value:.6g}", "evaluations/s": f"{rate:.3g}"}
        return record.lowest, figures

    def params(self, state: SolverState, stopped: str) -> optax.Params:
        """See `Steps`."""
        ended = stopped == "converged"
        params = self.stages.stands_at(state) if ended else state.params
        return trees.as_numpy(params)

    def outside(self, state: SolverState) -> SolverState:
        """See `Steps`; in NumPy arrays, which keep their dtypes without 64 bits."""
        found: SolverState = trees.as_numpy(state)
        return found
