"""The loop of every run: budgets, failures, progress and the callback."""

import abc
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import numpy as np
import optax

from radazo_jax._src.base import checks, trees
from radazo_jax._src.measure.learning_rate import LearningRate
from radazo_jax._src.runs.budget import Budget
from radazo_jax._src.runs.history import History, StepNumbers
from radazo_jax._src.runs.results import Best, Report, Result
from radazo_jax._src.steps import states
from radazo_jax._src.steps.states import Failures, Policy, RunError

# A run is judged by the latest tenth of its steps, if these are so many.
_SHARE, _FEWEST = 10, 20
_PARTS = 4
_ERRORS = 4.0  # A rise of so many standard errors is none of noise.
_TIMES = 1.5  # A loss that stays above so many times the first one has risen.


class Rising:
    """A single warning if the loss of a run has risen for a tenth of its steps.

    The latest tenth is cut into four parts. The loss rises if the mean of each part is
    above the one before, the last mean is above the first by more than noise explains,
    and it is above the loss at the start of the run. A loss that has jumped at once,
    and stays far above the first one, has risen, too.
    """

    def __init__(self, num_steps: int | None, advice: Callable[[], str]):
        """Begins to look at a run.

        Args:
          num_steps: The number of its steps, if it is known.
          advice: Returns what to try, as the last sentences of the warning.
        """
        self._size = (num_steps or 0) // _SHARE // _PARTS
        self._advice = advice
        self._values = np.zeros(0)
        self._start = self._first = np.nan
        self._is_over = self._size * _PARTS < _FEWEST

    def see(self, values: np.ndarray) -> None:
        """Looks at the losses of further steps."""
        if self._is_over:
            return
        self._values = np.concatenate([self._values, np.asarray(values, np.float64)])
        if not np.isfinite(self._first):
            self._first = self._values[0]
        if not np.isfinite(self._start) and len(self._values) >= self._size:
            self._start = self._values[: self._size].mean()
        latest = self._values[-self._size * _PARTS :]
        self._values = latest
        if len(latest) < self._size * _PARTS or not np.isfinite(latest).all():
            return
        parts = latest.reshape(_PARTS, -1)
        means, error = parts.mean(1), np.sqrt(2 * parts.var(1, ddof=1).mean())
        rises = bool(np.all(np.diff(means) > 0)) and means[-1] > self._start
        rises &= means[-1] - means[0] > _ERRORS * error / np.sqrt(self._size)
        before, start = means[0], self._start
        if 0 < _TIMES * self._first < latest.min():
            rises, before, start = True, self._first, self._first
        if rises:
            self._is_over = True
            checks.warn(
                f"The loss has risen from {before:.3g} to {means[-1]:.3g} in the "
                f"latest {len(latest)} steps, above {start:.3g} at the start: "
                "steps are too long, or differences do not tell the slope. "
                + self._advice()
            )


# So many equal steps at the start of a run are warned about.
_STILL = 10


class Steps(abc.ABC):
    """The steps of a run, and what is known of them.

    Attributes:
      budget: The budgets, which count the steps.
      rows: The numbers of the steps by name, as a `History` has them; arrays of them if
        several steps are taken at once.
      best: The best so far.
      num_failed: The number of points at which a Python function failed in this call.
      last_failure: A text about the last point that failed, or an empty string.
      show: Shows the figures of the run, if there is a progress bar.
    """

    def __init__(self, budget: Budget):
        self.budget = budget
        self.rows: list[dict[str, Any]] = []
        self.best = Best(None)
        self.num_failed, self.last_failure = 0, ""
        self.show: Callable[[], None] = lambda: None

    # Advice if all values of the first steps are equal.
    still: ClassVar[str] = (
        "If fun is piecewise constant, name an estimator whose smoothing is about as "
        "wide as its pieces, such as central_difference(smoothing=0.2), and an "
        "optimizer such as radazo(1e-2). help(zo.diagnose) says how to measure fun."
    )

    @property
    @abc.abstractmethod
    def state(self) -> Any:
        """The state after the latest step."""

    @property
    def number(self) -> int:
        """The number of steps of the whole run."""
        return int(self.state.step)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of values."""
        return trees.widest(self.state.params)

    @property
    def failures(self) -> Failures:
        """Counts of failures in the whole run."""
        failures: Failures = self.state.failures
        return failures

    def has_used(self, count: int) -> bool:
        """Returns whether one of the latest `count` steps had a value to use."""
        return int(self.failures.in_a_row) < count

    def completed(self, result: Result) -> Result:
        """Returns a result with the fields that only this kind of run has."""
        return result

    def ended(self) -> str:
        """Returns what a run that ended by itself is called, else an empty text."""
        return ""

    def resume(self) -> None:
        """Takes the steps of a journal, if there is one."""
        return

    @abc.abstractmethod
    def take(self) -> bool:
        """Takes the next steps: one, or a chunk.

        Returns:
          Whether it was not interrupted.
        """

    def finish(self, stopped: str) -> Iterator[None]:
        """Takes steps after the end of the run, which ended for this reason."""
        del stopped
        yield from ()

    @abc.abstractmethod
    def figures(self) -> dict[str, str]:
        """Returns texts about the latest steps for the progress bar, by name."""

    @abc.abstractmethod
    def report(self) -> Report:
        """Reports the latest steps to a callback."""

    @abc.abstractmethod
    def params(self, stopped: str) -> optax.Params:
        """Returns the parameters of the result of a run that ends for this reason."""

    def outside(self) -> states.SolverState | None:
        """Returns the state as the caller gets it."""
        return self.state

    def history(self) -> History:
        """Returns the numbers of all steps so far."""
        return History.of(self.rows)


def run(
    steps: Steps,
    policy: Policy,
    callback: Callable[[Report], object] | None,
    progress: bool,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    rate: LearningRate | None = None,
    rising: Rising | None = None,
) -> Result:
    """Takes steps until a budget, a failure, a callback or Ctrl-C ends the run.

    Args:
      steps: Takes the steps.
      policy: The rule by which failures end the run.
      callback: Gets a `Report` after each step or chunk; `None` for none.
      progress: Whether to show figures of the latest steps.
      context: Makes the context in which the callback is called.
      rate: The learning rate that was found before the first step.
      rising: Warns if the loss rises.

    Raises:
      RunError: If too many evaluations failed. It has the result so far.
    """

    def ends() -> bool:
        """Asks the callback, which ends the run by a true value or StopIteration."""
        if callback is None:
            return False
        report = steps.report()
        with context():
            try:
                return bool(callback(report))
            except StopIteration:
                return True

    try:
        steps.resume()
        with progress_bar(progress, steps.budget) as show:
            if progress:
                steps.show = lambda: show(
                    steps.figures() | states.failure_counts(steps.failures)
                )
            stopped = _take_all(steps, policy, ends, rising)
            params = steps.params(stopped)
    except RunError as error:
        error.state = steps.outside()
        error.result = _result(steps, steps.params("failure"), "failure", rate)
        raise
    except BaseException as error:
        # Nothing that was evaluated is lost by a callback's error, or by Ctrl-C.
        with contextlib.suppress(Exception):
            result = _result(steps, steps.params("failure"), "failure", rate)
            error.result = result  # type: ignore[attr-defined]
        raise
    return _result(steps, params, stopped, rate)


def _take_all(
    steps: Steps,
    policy: Policy,
    ends: Callable[[], bool],
    rising: Rising | None,
) -> str:
    """Takes the steps; returns the reason for which the run ended."""
    budget, limits = steps.budget, policy.limits(steps.failures)
    begun, standstill = budget.evaluations, _Standstill(steps)
    while not (stopped := budget.reason() or steps.ended()):
        before = len(steps.rows)
        if not steps.take():
            stopped = "interrupted"
            break
        steps.show()
        policy.check(steps.failures, steps.number, limits, steps.last_failure)
        for row in steps.rows[before:]:
            standstill.see(row)
            if rising is not None:
                rising.see(np.atleast_1d(row["value"]))
        if ends():
            stopped = budget.reason() or "callback"
            break
    for _ in steps.finish(stopped):
        steps.show()
        ends()
    count, taken = budget.evaluations - begun, max(budget.steps, budget.evaluations > 0)
    policy.check_used(steps.has_used(taken), taken, steps.last_failure)
    if 2 * steps.num_failed > count:
        checks.warn(
            f"fun failed at {steps.num_failed} of {count} points, which were left out. "
            f"The last failure: {steps.last_failure.rstrip('.')}. If fun fails in a "
            "region, give bounds without it."
        )
    return stopped


class _Standstill:
    """A single warning if all values of the first steps of a run are equal.

    Equal values give no direction and no step size, so that the run stays at its start.
    A function that has changed before may be at its minimum: a run that continues is
    not looked at.
    """

    def __init__(self, steps: Steps):
        """Begins to look at a run."""
        self._values: list[float] | None = None if steps.number else []
        self._eps, self._advice = float(np.finfo(steps.dtype).eps), steps.still

    def see(self, row: StepNumbers) -> None:
        """Looks at the numbers of one or several steps, as a `History` has them.

        Runs of workers do not know slopes when they see the values.
        """
        if self._values is None:
            return
        few = slice(_STILL - len(self._values))
        value, std, points = (
            np.atleast_1d(row[name])[few]
            for name in ("value", "value_std", "evaluations")
        )
        slope = np.atleast_1d(row.get("slope", np.zeros_like(value)))[few]
        # The mean of n equal values may differ from them by n roundings.
        with np.errstate(all="ignore"):
            rounding = points * self._eps * np.abs(value)
        equal = bool(np.all((std <= rounding) & (slope == 0)))
        self._values += value.tolist()
        first = self._values[0]
        if not equal or np.any(value != first):
            self._values = None
        elif len(self._values) >= _STILL:
            self._values = None
            checks.warn(
                f"fun returned {first:.6g} at all points of the first {_STILL} steps, "
                f"as a constant does. {self._advice}"
            )


def _result(
    steps: Steps, params: optax.Params, stopped: str, rate: LearningRate | None
) -> Result:
    """Returns the result of a run that has ended for this reason."""
    history = steps.history()
    count = int(np.sum(history.evaluations))
    count += 0 if rate is None else rate.num_evaluations
    with np.errstate(all="ignore"):
        values = history.value.astype(steps.dtype)
    found = Result(
        params=params,
        best=steps.best,
        values=values,
        num_evaluations=count,
        state=steps.outside(),
        history=history,
        stopped=stopped,
        learning_rate=rate,
    )
    return steps.completed(found)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Makes the first Ctrl-C a flag to read, if signals can be handled."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []
    previous = signal.getsignal(signal.SIGINT)

    def handle(signum: int, frame: object) -> None:
        del frame
        if received:
            raise KeyboardInterrupt
        received.append(signum)
        # A handler may interrupt a write to `sys.stderr`.
        text = "\nThe run ends after this evaluation or step; Ctrl-C again aborts it.\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())

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
