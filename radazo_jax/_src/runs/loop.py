"""The loop of every run: budgets, failures, progress and the callback."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from radazo_jax._src import checks
from radazo_jax._src.runs.learning_rate import LearningRate
from radazo_jax._src.runs.results import Best, Report, Result
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.steps.history import History, losses
from radazo_jax._src.steps.stages import Stage, Stages
from radazo_jax._src.steps.states import Policy, RunError, SolverState, failure_counts

# So many equal steps at the start of a run are warned about.
_STILL = 10


class Taken(NamedTuple):
    """Steps that were taken.

    Attributes:
      state: The state after them.
      numbers: The numbers of the steps by name, [steps] each, as a `History` has them.
      values: The values that a callback gets.
      points: The points that a callback gets, or `None`.
      figures: Texts for the progress bar, by name.
      failure: A text about the last point that failed, or an empty string.
      num_failed: The number of points at which a Python function failed.
    """

    state: SolverState
    numbers: Mapping[str, np.ndarray]
    values: np.ndarray
    points: Any
    figures: Mapping[str, str]
    failure: str = ""
    num_failed: int = 0


class Steps(Protocol):
    """Takes the steps of a run, and keeps their records."""

    @property
    def methods(self) -> tuple[Stage, ...]:
        """The stages so far."""
        ...

    @property
    def best(self) -> Best:
        """The best so far."""
        ...

    def ended(self, state: SolverState) -> str:
        """The reason for which the run ends by itself, or an empty string."""
        ...

    def begin(self, state: SolverState) -> SolverState:
        """The state in which the next step begins, maybe of another stage."""
        ...

    def take(self, state: SolverState) -> Taken | None:
        """Takes the next steps, one or a chunk; `None` if it was interrupted."""
        ...

    def history(self) -> History:
        """The records of all steps so far."""
        ...

    def params(self, state: SolverState, stopped: str) -> Any:
        """The parameters of the result."""
        ...

    def outside(self, state: SolverState) -> SolverState:
        """A state as the caller gets it."""
        ...


class Staged:
    """The part of `Steps` that the stages of a run decide.

    Attributes:
      stages: The stages of the run.
    """

    stages: Stages

    @property
    def methods(self) -> tuple[Stage, ...]:
        """See `Steps`."""
        return tuple(self.stages.done)

    def ended(self, state: SolverState) -> str:
        """See `Steps`."""
        return self.stages.ended(state)


class Options(NamedTuple):
    """The choices of a caller about the loop of a run.

    Attributes:
      budget: The budgets, which `Steps.take` counts.
      policy: The rule by which failures end the run.
      callback: Gets a `Report` after each step or chunk; `None` for none.
      report: Shows figures of the latest steps.
      context: Makes the context in which the callback is called.
      rate: The learning rate that was found before the first step.
    """

    budget: Budget
    policy: Policy
    callback: Callable[[Report], object] | None
    report: Callable[[Mapping[str, str]], None]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    rate: LearningRate | None = None


def run(
    steps: Steps,
    state: SolverState,
    options: Options,
    last: str = "",
) -> Result:
    """Takes steps until a budget, a failure, a callback or Ctrl-C ends the run.

    Args:
      steps: Takes the steps.
      state: The state before the first step.
      options: The choices of the caller.
      last: The last failure so far.

    Raises:
      RunError: If too many evaluations failed. It has the result so far.
    """
    with failing_with_result(steps, options.rate):
        state, stopped = _take_all(steps, state, options, last)
        params = steps.params(state, stopped)
    return _result(steps, params, steps.outside(state), stopped, options.rate)


@contextmanager
def failing_with_result(
    steps: Steps, rate: LearningRate | None = None
) -> Iterator[None]:
    """Gives a `RunError` the result so far."""
    try:
        yield
    except RunError as error:
        error.state = steps.outside(error.state)
        error.result = _result(steps, error.state.params, error.state, "failure", rate)
        raise


def _take_all(
    steps: Steps, state: SolverState, options: Options, last: str
) -> tuple[SolverState, str]:
    """The state after the last step, and the reason for which the run ended."""
    budget, policy = options.budget, options.policy
    limits, failed, begun = policy.limits(state), 0, budget.evaluations
    standstill = _Standstill(state)
    while not (stopped := budget.reason() or steps.ended(state)):
        # A stage may need more evaluations than are left.
        state = steps.begin(state)
        if stopped := budget.reason():
            break
        taken = steps.take(state)
        if taken is None:
            stopped = "interrupted"
            break
        state, last = taken.state, taken.failure or last
        failed += taken.num_failed
        counts = failure_counts(state)
        options.report({**taken.figures, **counts})
        policy.check(state, limits, last)
        standstill.see(taken.numbers)
        if _ends(steps, taken, options):
            stopped = budget.reason() or "callback"
            break
    policy.check_used(state, budget.steps, last)
    count = budget.evaluations - begun
    if 2 * failed > count:
        checks.warn(
            f"fun failed at {failed} of {count} points, which were left out. The last "
            f"failure: {last.rstrip('.')}. If fun fails in a region, give bounds "
            "without it."
        )
    return state, stopped


class _Standstill:
    """Warns once if all values of the first steps of a run are equal.

    Equal values give no direction and no step size, so that the run stays at its start.
    A function that has changed before may be at its minimum: a run that continues is
    not looked at.
    """

    def __init__(self, state: SolverState):
        """Begins to look at a run, in the state before its first step."""
        self._values: list[float] | None = None if int(state.step) else []

    def see(self, numbers: Mapping[str, np.ndarray]) -> None:
        """Looks at the numbers of steps, as a `History` has them.

        Runs of workers do not know slopes when they see the values.
        """
        if self._values is None:
            return
        few = slice(_STILL - len(self._values))
        value, std, points = (
            numbers[name][few] for name in ("value", "value_std", "evaluations")
        )
        slope = numbers.get("slope", np.zeros_like(value))[few]
        # The mean of n equal values may differ from them by n roundings.
        rounding = points * np.finfo(np.float32).eps * np.abs(value)
        equal = bool(np.all((std <= rounding) & (slope == 0)))
        self._values += value.tolist()
        first = self._values[0]
        if not equal or np.any(value != first):
            self._values = None
        elif len(self._values) >= _STILL:
            self._values = None
            checks.warn(
                f"fun returned {first:.6g} at all points of the first {_STILL} steps, "
                "as a constant does. If fun is made of steps, name an estimator whose "
                "smoothing is about as wide as a step, such as "
                "central_difference(smoothing=0.2), and an optimizer such as "
                "radazo(1e-2). help(zo.diagnose) says how to measure fun."
            )


def _ends(steps: Steps, taken: Taken, options: Options) -> bool:
    """Whether the callback ends the run, by a true value or by StopIteration."""
    if options.callback is None:
        return False
    state = steps.outside(taken.state)
    number = int(state.step)
    told = Report(number, taken.values, taken.points, steps.best, state)
    with options.context():
        try:
            return bool(options.callback(told))
        except StopIteration:
            return True


def _result(
    steps: Steps,
    params: Any,
    state: SolverState,
    stopped: str,
    rate: LearningRate | None,
) -> Result:
    history = steps.history()
    count = int(np.sum(history.evaluations))
    if rate is not None:
        count += rate.num_evaluations
    values = losses(history)
    given = params, steps.best, values, count, state, history, stopped
    return Result(*given, stages=steps.methods, learning_rate=rate)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Makes the first Ctrl-C a flag to read, if signals can be handled."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []
    previous = signal.getsignal(signal.SIGINT)

    def handle(signum: int, frame: Any) -> None:
        del frame
        if received:
            raise KeyboardInterrupt
        received.append(signum)

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def progress_bar(
    progress: bool, budget: Budget
) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Yields `report(figures)`, which shows what the budget has counted so far."""
    if not progress:
        yield lambda figures: None
        return
    unit, begun, total = budget.shown()
    try:
        from tqdm.auto import tqdm
    except ImportError:

        def line(figures: Mapping[str, str]) -> None:
            _, done, _ = budget.shown()
            listed = ", ".join(f"{name} {text}" for name, text in figures.items())
            of_total = "" if total is None else f"/{total}"
            print(f"{unit} {done}{of_total}: {listed}", file=sys.stderr)

        yield line
        return
    with tqdm(initial=begun, total=total, unit=unit) as bar:
        compiled = bar.disable  # A disabled bar has no clock.

        def show(figures: Mapping[str, str]) -> None:
            nonlocal compiled
            _, done, _ = budget.shown()
            bar.set_postfix(figures, refresh=False)
            if compiled:
                bar.update(done - bar.n)
                return
            # The first steps include compilation, so the bar estimates from the next.
            compiled, start = True, bar.start_t
            bar.n = bar.initial = bar.last_print_n = done
            bar.unpause()
            bar.start_t = start
            bar.refresh()

        try:
            yield show
        finally:
            bar.initial = begun  # The last line has the rate of the whole run.
