"""The loop of runs whose steps are taken on the host."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from radazo_jax._src.runs import ask_tell, history
from radazo_jax._src.runs.journal import Done, Tell
from radazo_jax._src.runs.records import Record
from radazo_jax._src.runs.standstill import Standstill
from radazo_jax._src.runs.states import Policy, RunError, SolverState
from radazo_jax._src.runs.stop import Budget


class Values(NamedTuple):
    """The values at the points of a step.

    Attributes:
      values: The values, [n], of the dtype in which they are used.
      failures: Texts about the points that failed.
    """

    values: np.ndarray
    failures: Sequence[str]


def run(
    state: SolverState,
    evaluate: Callable[[SolverState], Values | None],
    tell: Tell,
    budget: Budget,
    policy: Policy,
    *,
    write: Callable[[Record], None],
    after: Callable[[SolverState, Done], Any],
    last: str = "",
    stacklevel: int = 2,
) -> tuple[SolverState, str]:
    """Takes steps, one by one.

    Args:
      state: The state before the first step.
      evaluate: Gives the values of a step, or `None` to stop before it.
      tell: Takes the step.
      budget: Ends the run by its budgets; `after` counts the steps.
      policy: Ends the run by its failures.
      write: Gets the values of each step before it is taken.
      after: Called after each step; a true value ends the run.
      last: The last failure so far.
      stacklevel: The user's frame for warnings, counted from the caller.

    Returns:
      The state after the last step, and the reason for which the run ended.

    Raises:
      RunError: If too many evaluations failed.
    """
    total = ask_tell.checksum_of(state.params)
    limits = policy.limits(state)
    names = history.names(state)
    standstill = Standstill(state.step, stacklevel + 1)
    while not (stopped := budget.reason()):
        number = int(state.step)
        start = time.perf_counter()
        try:
            found = evaluate(state)
            if found is None:
                stopped = "interrupted"
                break
            seconds = time.perf_counter() - start
            last = found.failures[-1] if found.failures else last
            record = Record(
                number, found.values, int(total), seconds, tuple(found.failures)
            )
            write(record)
        except (RuntimeError, OSError) as error:
            raise RunError(
                f"step {number} could not be taken: {error} The error's state is the "
                "run up to this step.",
                state,
            ) from error
        state, numbers, total = tell(state, found.values)
        policy.check(state, limits, last)
        standstill.saw_values(record.values)
        if after(state, Done.of(record, names, np.asarray(numbers))):
            stopped = budget.reason() or "callback"
            break
    policy.check_used(state, budget.steps, last)
    return state, stopped


def ends(callback: Callable[..., Any] | None, *info: Any) -> bool:
    """Whether a callback ends the run, by a true value or by StopIteration."""
    if callback is None:
        return False
    try:
        return bool(callback(*info))
    except StopIteration:
        return True


def last_failure(steps: Sequence[Done]) -> str:
    """Returns the last failure of some steps, or an empty string."""
    failures = [failure for done in steps for failure in done.record.failures]
    return failures[-1] if failures else ""


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
    progress: bool, done: int, total: int | None
) -> Iterator[Callable[[int, dict[str, str]], None]]:
    """Yields `report(steps, figures)`; `total` is `None` if it is not known."""
    if not progress:
        yield lambda steps, figures: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:

        def line(steps: int, figures: dict[str, str]) -> None:
            nonlocal done
            done += steps
            listed = ", ".join(f"{name} {text}" for name, text in figures.items())
            of_total = "" if total is None else f"/{total}"
            print(f"step {done}{of_total}: {listed}", file=sys.stderr)

        yield line
        return
    with tqdm(initial=done, total=total, unit="step") as bar:
        compiled = bar.disable  # A disabled bar has no clock.

        def show(steps: int, figures: dict[str, str]) -> None:
            nonlocal compiled
            bar.set_postfix(figures, refresh=False)
            if compiled:
                bar.update(steps)
                return
            # The first steps include compilation, so the bar estimates from the next.
            compiled, start = True, bar.start_t
            bar.n += steps
            bar.initial = bar.last_print_n = bar.n
            bar.unpause()
            bar.start_t = start
            bar.refresh()

        try:
            yield show
        finally:
            bar.initial = done  # The last line has the rate of the whole run.
