"""Runs whose function JAX does not see."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from radazo_jax._src import checks, program, shown, trees
from radazo_jax._src.base import GradientEstimator
from radazo_jax._src.evaluators.external import Outcome, distinct, in_two_parts, outside
from radazo_jax._src.runs import ask_tell, loop, states, step
from radazo_jax._src.runs.box import BoundsLike, as_bounds
from radazo_jax._src.runs.defaults import method
from radazo_jax._src.runs.history import History, losses
from radazo_jax._src.runs.journal import Record, of_points
from radazo_jax._src.runs.loop import Done, Path, Values, interruptible, progress_bar
from radazo_jax._src.runs.states import (
    Policy,
    Run,
    SolverState,
    failure_counts,
    resumed,
)
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.search import revert


class Best(NamedTuple):
    """The best of all evaluated points.

    Attributes:
      params: The point, a tree of NumPy arrays; the start if none has a value.
      value: Its value.
      number: The number of its evaluation in the run, from 0; -1 if none has a value.
      info: The second result of the function; `None` if it was evaluated in a part of
        the run that was read from a journal.
    """

    params: optax.Params
    value: float
    number: int
    info: Any

    def __repr__(self) -> str:
        return shown.on_a_line(
            self,
            params=shown.tree(self.params),
            value=shown.number(self.value),
            number=str(self.number),
            info=shown.tree(self.info),
        )


class BlackBoxResult(NamedTuple):
    """The result of `minimize_black_box`.

    Attributes:
      params: The parameters after the last step, at which `fun` was not evaluated.
      values: The value of each step's estimate: float32, [steps].
      best: The best of all evaluated points.
      num_evaluations: Number of evaluated points, including failed ones.
      state: The state of the run, which counts what failed.
      history: The records of each step; `history.plot()` draws it.
      stopped: The reason for which the run ended, as in `MinimizeResult`.
    """

    params: optax.Params
    values: np.ndarray
    best: Best
    num_evaluations: int
    state: SolverState
    history: History
    stopped: str

    def __repr__(self) -> str:
        return shown.on_lines(
            self,
            params=shown.tree(self.params),
            values=shown.series(self.values),
            best=repr(self.best),
            num_evaluations=str(self.num_evaluations),
            state=repr(self.state),
            history=repr(self.history),
            stopped=self.stopped,
        )


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
    executor: Any = None,
    batched: bool = False,
    bounds: BoundsLike | None = None,
    timeout: float | None = None,
    on_failure: str = "drop",
    max_retries: int = 2,
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
        kept, also if JAX has 64 bits disabled: `fun` and `callback` are called under
        the caller's setting.
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
      executor: A `concurrent.futures.Executor` on which the points of a step are
        evaluated, or a function without arguments that makes one, which is called
        again if workers died. `None` evaluates them in turn. If the value at θ
        reverts the latest step, as one of `bfgs` may, the other points of the step are
        then not evaluated; the steps are the same.
      batched: Whether `fun` takes all n points of a step at once, a tree of arrays
        with an additional first axis, and returns n values, or a pair of these and n
        other objects; n is the same in all steps.
      bounds: As in `ask_tell`.
      timeout: Seconds; needs an executor. If no point ends for this long, those that
        are left have failed. A thread or process that hangs stays occupied.
      on_failure: The treatment of a point at which `fun` raises, or returns anything
        but a finite number. "drop": its direction is left out of the estimate, and a
        step without any is skipped: neither parameters nor optimizer state move. If θ
        has failed, the mean of the other values replaces its value. "retry": the point
        is evaluated again, up to `max_retries` times, then dropped. "raise": the run
        ends.
      max_retries: See `on_failure`.
      max_consecutive_failures: The number of steps skipped in a row that ends the run.
      journal: The path of a file to which the values of each step are added. The same
        call resumes the run from the end of the file; `replay` rebuilds it. At most
        `num_steps` and `max_evaluations` are read; the other budgets end the run
        at the end of the file, at the earliest.
      state: A state to continue from. Its parameters and key replace `params` and
        `key`.
      progress: Whether to show progress, as in `minimize`.
      callback: `callback(state, values)`, called after every step with the values at
        its points, [n]. A true return value ends the run. The next step reuses the
        arrays of `state`: copy what you keep.

    Returns:
      The result. Ctrl-C ends the run before the step that is being evaluated; the
      result then holds the earlier steps. A second Ctrl-C raises `KeyboardInterrupt`.

    Raises:
      TypeError, ValueError: If an argument is not valid, `fun` cannot be
        evaluated on the executor, the journal is of another run, or it is damaged.
      RunError: If `max_consecutive_failures` steps in a row were skipped, or all steps
        of the run, or a point failed and `on_failure` is "raise", or a step could not
        be evaluated or written. The error has the state so far.

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
    path = journal
    if not callable(fun):
        raise TypeError(f"fun must be a function of params; got {fun!r}.")
    if state is not None:
        checks.check_not_deleted("state", state)
    initial = params if state is None else state.params
    optimizer, estimator = method(optimizer, estimator, initial, minibatches=False)
    budget = Budget.of(num_steps, max_evaluations, max_seconds, target, patience)
    checks.check_int_at_least("max_retries", max_retries, 0)
    policy = Policy.of(on_failure, max_consecutive_failures)
    if timeout is not None:
        checks.check_positive("timeout", timeout)
        if executor is None:
            raise ValueError(
                f"timeout must be None where executor is; got {timeout!r}. A thread "
                "is enough: executor=ThreadPoolExecutor(1)."
            )
    if state is not None and path is not None:
        raise ValueError(
            "state must be None with a journal, which says where to go on; got a state."
        )
    with ExitStack() as stack:
        # Functions of the caller run under the caller's setting.
        of_caller = functools.partial(jax.enable_x64, trees.has_x64())
        stack.enter_context(trees.precision_of(initial))
        run = Run(None, None, optimizer, estimator, bounds=as_bounds(bounds))
        if state is None:
            state = step.start(run, params, key)
        states.check_known(state)
        in_turn = executor is None and not batched
        # A batch stays as large: `fun` may be compiled for it.
        varies = not batched and revert.limit(state.optimizer_state) is not None
        watch = budget.watch(run, state, trees.widest(state.params), varies)
        # Steps work in place on their state, so the caller keeps a copy of the first.
        state = resumed(jax.tree.map(jax.numpy.copy, state))
        ask = program.of(ask_tell.candidates_of, run, state)
        tell = ask_tell.teller(run, state)
        seen = _Seen(state, ask)

        interrupted = stack.enter_context(interruptible())
        evaluate_points = stack.enter_context(
            outside(
                _called_in(of_caller, fun) if in_turn else fun,
                executor,
                batched=batched,
                vector_valued=step.abstract_points(run, state).vector_valued,
                timeout=timeout,
                retries=max_retries if on_failure == "retry" else 0,
                interrupted=interrupted,
            )
        )
        if not batched:
            evaluate_points = distinct(evaluate_points)
        state, steps, write = stack.enter_context(
            loop.journaled(path, fun, state, estimator, tell, watch, seen.rebuild)
        )
        report = stack.enter_context(progress_bar(progress, len(steps), watch.total))
        for done in steps:
            watch.saw(done.record.lowest, len(done.record.values))

        # Asked for as soon as a step is told, so that they are computed meanwhile.
        following = [ask(state)]

        def tell_and_ask(
            state: SolverState, values: jax.typing.ArrayLike
        ) -> tuple[SolverState, jax.Array, jax.Array]:
            state, numbers, total = tell(state, values)
            following.append(ask(state))
            return state, numbers, total

        def evaluate(state: SolverState) -> Values | None:
            candidates = ask_tell.as_numpy(following.pop())
            n = len(jax.tree.leaves(candidates)[0])
            if varies:
                n = ask_tell.num_moved(candidates)
                candidates = jax.tree.map(lambda x: x[:n], candidates)
            if varies and in_turn:
                needs = functools.partial(ask_tell.needs_all, state)
                outcome = in_two_parts(evaluate_points, candidates, n, needs)
            else:
                outcome = evaluate_points(candidates, n)
            if outcome is None:
                return None
            seen.evaluated(candidates, outcome)
            failures = [outcome.failures[i] for i in sorted(outcome.failures)]
            values = ask_tell.as_values(outcome.values, state.params)
            beyond = outcome.values[np.isinf(values) & np.isfinite(outcome.values)]
            failures += [f"returned {v}, beyond {values.dtype}" for v in beyond]
            return Values(values, failures)

        def after(state: SolverState, done: Done) -> Any:
            steps.append(done)
            watch.saw(done.record.lowest, len(done.record.values))
            rate = len(done.record.values) / max(done.record.seconds, 1e-9)
            figures = {"best": f"{seen.best.value:.6g}", "evaluations/s": f"{rate:.3g}"}
            report(1, figures | failure_counts(state))
            if callback is None:
                return False
            with of_caller():
                return callback(state, done.record.values)

        state, stopped = loop.run(
            state,
            evaluate,
            tell_and_ask,
            watch,
            policy,
            write=write,
            after=after,
            last=loop.last_failure(steps),
        )
    history = History.of([done.numbers for done in steps])
    values = losses(history)
    return BlackBoxResult(
        state.params, values, seen.best, seen.count, state, history, stopped
    )


def _called_in(
    context: Callable[[], AbstractContextManager[Any]], fun: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """The function, called in a context."""

    def call(params: Any) -> Any:
        with context():
            return fun(params)

    return call


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
