"""Runs whose function JAX does not see."""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
import optax

from radazo_jax._src import checks, trees
from radazo_jax._src.base import GradientEstimator
from radazo_jax._src.evaluators.external import Calls, External, Outcome
from radazo_jax._src.runs import ask_tell, loop, states, step
from radazo_jax._src.runs import journal as journals
from radazo_jax._src.runs.box import BoundsLike, as_bounds
from radazo_jax._src.runs.defaults import method
from radazo_jax._src.runs.history import History, losses
from radazo_jax._src.runs.journal import Done
from radazo_jax._src.runs.loop import Values, interruptible, progress_bar
from radazo_jax._src.runs.records import Path, Record, of_points
from radazo_jax._src.runs.results import Best, BlackBoxResult
from radazo_jax._src.runs.states import (
    Policy,
    Run,
    RunError,
    SolverState,
    failure_counts,
    resumed,
)
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.search import revert


def minimize_black_box(
    fun: Callable[[optax.Params], Any],
    params: optax.Params,
    optimizer: optax.GradientTransformation | None = None,
    estimator: GradientEstimator | None = None,
    num_steps: int | None = None,
    key: jax.typing.ArrayLike = 0,
    *,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    patience: int | None = None,
    workers: int | None = None,
    executor: Any = None,
    batched: bool = False,
    timeout: float | None = None,
    retries: int = 0,
    bounds: BoundsLike | None = None,
    on_failure: str = "drop",
    max_consecutive_failures: int = 10,
    journal: Path | None = None,
    state: SolverState | None = None,
    progress: bool = True,
    callback: Callable[[SolverState, np.ndarray], Any] | None = None,
) -> BlackBoxResult:
    """Minimizes any Python function from its values alone.

    Args:
      fun: `fun(params)` gets a tree of NumPy arrays and returns a number, or a pair of
        a number and anything else. An array of one element is a number. Each call gets
        a copy of the point, so `fun` may write to it. A point that a step has twice is
        evaluated once. An estimator such as `evolution_strategy` also takes several
        numbers for a point, such as one for each prompt: an array of shape [G].
      params: The starting point, a tree of floating-point arrays. NumPy's float64 is
        kept, also if JAX has 64 bits disabled, and Python's floats are float64. `fun`
        and `callback` are called under the caller's setting.
      optimizer: As in `minimize`; it gets no `value_fn`. Calls with the same
        `optimizer` and `estimator` objects compile once.
      estimator: As in `minimize`; it chooses the points.
      num_steps: The number of steps in this call; with a journal, of the whole run. By
        default 1000, also with a `target`, which may never be reached; with another
        budget, at most 2³¹ − 2 for the whole run.
      key: The key of the whole run; it is consumed. It takes the steps of `minimize`.
      max_evaluations: The most evaluations in this call; with a journal, in the whole
        run. The run ends before the step that could exceed it. Counted are the points,
        as in `num_evaluations`; a retry is not counted, and neither is a point that
        was not evaluated.
      max_seconds: The most seconds from the start of this call. The run ends after the
        first step that ends later. Not for runs of several processes.
      target: A finite number. The run ends after the first step after which
        `best.value` is not above it, in the dtype of the values at the points.
      patience: The run ends after so many steps in a row that do not lower
        `best.value`, in this call; with a journal, in the whole run.
      workers: Number of processes that evaluate the points of a step, as in `external`;
        needs the package `loky`. `None` evaluates them in turn, unless an executor is
        given. If the value at θ reverts the latest step, as one of `bfgs` may, the
        other points of the step are then not evaluated; the steps are the same.
      executor: A `concurrent.futures.Executor` on which the points of a step are
        evaluated, or a function without arguments that makes one, which is called
        again if workers died or hang.
      batched: Whether `fun` takes all n points of a step at once, a tree of arrays
        with an additional first axis, and returns n values, or a pair of these and n
        other objects; n is the same in all steps.
      timeout: Seconds; needs workers or an executor. If no point ends for this long,
        those that run have failed, and the workers are replaced, unless the executor
        is the caller's.
      retries: Number of further evaluations of a point that failed.
      bounds: As in `ask_tell`.
      on_failure: The treatment of a point at which `fun` raises, or returns anything
        but a finite number. "drop": its direction is left out of the estimate, and a
        step without any is skipped: neither parameters nor optimizer state move. If θ
        has failed, the mean of the other values replaces its value. "raise": the run
        ends.
      max_consecutive_failures: The number of steps skipped in a row that ends the run.
      journal: The path of a file to which the values of each step are added. The same
        call resumes the run from the end of the file; `replay` rebuilds it. One of its
        points is then evaluated again, and another value is a warning. At most
        `num_steps` and `max_evaluations` are read; the other budgets end the run
        at the end of the file, at the earliest.
      state: A state to continue from. Its parameters and key replace `params` and
        `key`; it must have the dtypes of `params`.
      progress: Whether to show progress, as in `minimize`.
      callback: `callback(state, values)`, called after every step with the values at
        its points, [n]. A true return value, or StopIteration, ends the run. The state
        is a copy, in NumPy arrays.

    Returns:
      The result. Ctrl-C ends the run before the step that is being evaluated; the
      result then holds the earlier steps. A second Ctrl-C raises `KeyboardInterrupt`.

    Raises:
      TypeError, ValueError: If an argument is not valid, `fun` cannot be
        evaluated on the executor, the journal is of another run, or it is damaged.
      RunError: If `max_consecutive_failures` steps in a row were skipped, or all steps
        of the run, or a point failed and `on_failure` is "raise", or a step could not
        be evaluated or written. `error.result` is the result so far.

    Examples:
      >>> import numpy as np
      >>> import radazo_jax as zo
      >>> def fun(x):
      ...     return float(np.sum(np.abs(x - 1.0)))
      >>> result = zo.minimize_black_box(
      ...     fun,
      ...     np.zeros(4, np.float32),
      ...     zo.radazo(3e-2),
      ...     zo.central_difference(),
      ...     100,
      ...     key=0,
      ...     progress=False,
      ... )
      >>> result.values.shape, bool(result.best.value < 0.3)
      ((100,), True)
    """
    return run_outside(
        *(fun, params, optimizer, estimator, key),
        External(workers, executor, batched, timeout, retries),
        Budget(num_steps, max_evaluations, max_seconds, target, patience),
        Policy.of(on_failure, max_consecutive_failures),
        bounds=bounds,
        journal=journal,
        state=state,
        progress=progress,
        callback=callback,
    )


def run_outside(
    fun: Callable[[optax.Params], Any],
    params: optax.Params,
    optimizer: optax.GradientTransformation | None,
    estimator: GradientEstimator | None,
    key: jax.typing.ArrayLike,
    evaluator: External,
    budget: Budget,
    policy: Policy,
    *,
    bounds: BoundsLike | None,
    journal: Path | None,
    state: SolverState | None,
    progress: bool,
    callback: Callable[[SolverState, np.ndarray], Any] | None,
) -> BlackBoxResult:
    """Takes steps whose points an external evaluator evaluates.

    Args:
      fun: The function, as all arguments of these names in `minimize_black_box`.
      params: The starting point.
      optimizer: The optimizer.
      estimator: The estimator.
      key: The key.
      evaluator: The evaluator.
      budget: The budgets, which begin to be counted.
      policy: The rule by which failures end the run.
      bounds: The bounds.
      journal: The path of the journal.
      state: The state to continue from.
      progress: Whether to show progress.
      callback: Called after each step.
    """
    if not callable(fun):
        raise TypeError(f"fun must be a function of params; got {fun!r}.")
    params = trees.with_float64(params)
    if state is not None:
        _check_state(state, params, journal)
    initial = params if state is None else state.params
    optimizer, estimator = method(optimizer, estimator, initial, minibatches=False)
    run = Run(None, None, optimizer, estimator, bounds=as_bounds(bounds))
    # Functions of the caller run under the caller's setting.
    of_caller = functools.partial(jax.enable_x64, trees.has_x64())
    with ExitStack() as stack:
        stack.enter_context(trees.precision_of(initial))
        if state is None:
            state = step.start(run, params, key)
        states.check_known(state)
        # Steps work in place on their state, so the caller keeps a copy of the first.
        state = resumed(jax.tree.map(jax.numpy.copy, state))
        calls = evaluator.open(
            fun,
            vector_valued=step.abstract_points(run, state).vector_valued,
            context=of_caller,
            interrupted=stack.enter_context(interruptible()),
        )
        steps = _Steps(run, state, evaluator, stack.enter_context(calls), budget)
        resuming = journals.resumed(
            *(journal, fun, state, estimator, steps.tell, budget), steps.rebuild
        )
        state, done, write = stack.enter_context(resuming)
        steps.resume(done)
        bar = progress_bar(progress, len(done), budget.total)
        report = stack.enter_context(bar)

        def after(state: SolverState, done: Done) -> bool:
            figures = steps.count(done)
            report(1, figures | failure_counts(state))
            if callback is None:
                return False
            seen = trees.as_numpy(state)
            with of_caller():
                return loop.ends(callback, seen, done.record.values)

        return steps.run(state, policy, journal, write, after)


def _check_state(
    state: SolverState, params: optax.Params, journal: Path | None
) -> None:
    """Raises if a run cannot continue from a state in the place of its parameters."""
    checks.check_not_deleted("state", state)
    if journal is not None:
        raise ValueError(
            "state must be None with a journal, which says where to continue; got a "
            "state. Give one of them."
        )
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=False)
    for p, q in pairs:
        if hasattr(p, "dtype") and p.dtype != q.dtype:
            raise ValueError(
                f"state must have the dtypes of params, {p.dtype}; got {q.dtype}. "
                "Begin another run from state.params in the dtype that you need."
            )


class _Steps:
    """The steps of a run whose points a Python function evaluates."""

    def __init__(
        self,
        run: Run,
        state: SolverState,
        evaluator: External,
        calls: Calls,
        budget: Budget,
    ):
        self._evaluator, self._calls = evaluator, calls
        arrays, static = trees.partition(run)
        self._ask = functools.partial(
            ask_tell.candidates_of, arrays=arrays, static=static
        )
        self.tell = ask_tell.teller(state, arrays, static)
        # A batch stays as large: `fun` may be compiled for it.
        limit = revert.limit(state.optimizer_state)
        self._varies = not evaluator.batched and limit is not None
        dtype = trees.widest(state.params)
        budget.start(run, state, dtype, self._varies)
        self._budget = budget
        self._seen = _Seen(state, self._ask)
        self._done: list[Done] = []
        # A step of the journal, and its point to evaluate again, with its candidates.
        self._again: tuple[Record, int, optax.Params] | None = None
        # Asked for as soon as a step is told, so that they are computed meanwhile.
        self._following: Any = None

    def rebuild(self, records: Sequence[Record]) -> Callable[[SolverState], None]:
        """Returns a function to call before each step that a journal holds."""
        seen, chosen = self._seen.rebuild(records), journals.to_evaluate_again(records)

        def before(state: SolverState) -> None:
            seen(state)
            if chosen is not None and int(state.step) == records[chosen[0]].step:
                candidates = ask_tell.as_numpy(self._ask(state))
                self._again = records[chosen[0]], chosen[1], candidates

        return before

    def _warn_of_another_function(
        self, state: SolverState, path: Path, stacklevel: int
    ) -> None:
        """Evaluates a point of the journal again, and warns if its value is another."""
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
            journals.warn_of_another_value(
                path, record, self._again[1], value, stacklevel + 1
            )

    def resume(self, done: list[Done]) -> None:
        """Counts the steps that a journal held."""
        for one in done:
            self.count(one)

    def count(self, done: Done) -> dict[str, str]:
        """Counts a step; returns figures of it."""
        self._done.append(done)
        record = done.record
        self._budget.saw(record.lowest, len(record.values))
        rate = len(record.values) / max(record.seconds, 1e-9)
        return {"best": f"{self._seen.best.value:.6g}", "evaluations/s": f"{rate:.3g}"}

    def run(
        self,
        state: SolverState,
        policy: Policy,
        journal: Path | None,
        write: Callable[[Record], None],
        after: Callable[[SolverState, Done], bool],
    ) -> BlackBoxResult:
        """Takes the steps that follow, after one of those in the journal is checked."""
        self._following = self._ask(state)
        last = loop.last_failure(self._done)
        try:
            if journal is not None:
                self._warn_of_another_function(state, journal, stacklevel=4)
            state, stopped = loop.run(
                *(state, self._evaluate, self._tell_and_ask, self._budget, policy),
                write=write,
                after=after,
                last=last,
                stacklevel=4,
            )
        except RunError as error:
            error.result = self._result(error.state, "failure")
            error.state = error.result.state
            raise
        return self._result(state, stopped)

    def _tell_and_ask(
        self, state: SolverState, values: jax.typing.ArrayLike
    ) -> tuple[SolverState, jax.Array, jax.Array]:
        state, numbers, total = self.tell(state, values)
        self._following = self._ask(state)
        return state, numbers, total

    def _evaluate(self, state: SolverState) -> Values | None:
        candidates = ask_tell.as_numpy(self._following)
        outcome = self._outcome(state, candidates)
        if outcome is None:
            return None
        self._seen.evaluated(candidates, outcome)
        failures = [outcome.failures[i] for i in sorted(outcome.failures)]
        values = ask_tell.as_values(outcome.values, state.params)
        beyond = outcome.values[np.isinf(values) & np.isfinite(outcome.values)]
        failures += [f"returned {v}, beyond {values.dtype}" for v in beyond]
        return Values(values, failures)

    def _outcome(self, state: SolverState, candidates: optax.Params) -> Outcome | None:
        """The outcome at the points of a step, or at the first one if it is enough."""
        if not self._varies:
            return self._calls.evaluate(candidates)
        moved = slice(ask_tell.num_moved(candidates))
        candidates = jax.tree.map(lambda x: x[moved], candidates)
        if not self._evaluator.in_turn:
            return self._calls.evaluate(candidates)
        first = self._calls.evaluate(jax.tree.map(lambda x: x[:1], candidates))
        if first is None or not ask_tell.needs_all(state, first.values[0]):
            return first
        return self._calls.evaluate(candidates, known=first)

    def _result(self, state: SolverState, stopped: str) -> BlackBoxResult:
        state = trees.as_numpy(state)
        history = History.of([done.numbers for done in self._done])
        return BlackBoxResult(
            state.params,
            losses(history),
            self._seen.best,
            self._seen.count,
            state,
            history,
            stopped,
        )


class _Seen:
    """The best of the points so far, and their number."""

    def __init__(self, state: SolverState, ask: Callable[[SolverState], Any]):
        self.best = Best(ask_tell.as_numpy(state.params), np.inf, -1, None)
        self.count = 0
        self._ask = ask

    def evaluated(self, candidates: optax.Params, outcome: Outcome) -> None:
        """Looks at the points of a step."""
        before = self.count
        self.count += len(outcome.values)
        values = of_points(outcome.values)
        values = np.where(np.isfinite(values), values, np.inf)
        i = int(np.argmin(values))
        if values[i] < self.best.value:
            point = jax.tree.map(lambda x: x[i].copy(), candidates)
            info = outcome.infos[i]
            self.best = Best(point, float(values[i]), before + i, info)

    def rebuild(self, records: Sequence[Record]) -> Callable[[SolverState], None]:
        """Finds the best in a journal: its point is asked for at its step."""
        best = records[int(np.argmin([r.lowest for r in records]))].step

        def before(state: SolverState) -> None:
            record = records[int(state.step) - records[0].step]
            if record.step == best:
                infos = [None] * len(record.values)
                outcome = Outcome(record.values.astype(np.float64), infos, {})
                self.evaluated(ask_tell.as_numpy(self._ask(state)), outcome)
            else:
                self.count += len(record.values)

        return before
