"""Runs of steps on the host, and how they are rebuilt from their journals."""

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np

from radazo_jax._src import checks, trees
from radazo_jax._src.base import GradientEstimator, Points
from radazo_jax._src.runs import ask_tell, history, journal, step
from radazo_jax._src.runs.journal import Record
from radazo_jax._src.runs.standstill import Standstill
from radazo_jax._src.runs.states import Policy, RunError, SolverState
from radazo_jax._src.runs.stop import Watch

Path = str | os.PathLike[str]

_PART = 1000  # Steps of a journal.
_PACKAGES = ("radazo_jax", "jax", "jaxlib", "optax")


# `tell_in_place` of one run: it takes a state and values, and returns the state after,
# its numbers, and the checksum of the parameters.
Tell = Callable[
    [SolverState, jax.typing.ArrayLike], tuple[SolverState, jax.Array, jax.Array]
]


# Given the records of a journal, what is called before each of their steps.
_BeforeEach = Callable[[Sequence[Record]], Callable[[SolverState], None]]


class Values(NamedTuple):
    """The values at the points of a step.

    Attributes:
      values: The values, [n], of the dtype in which they are used.
      failures: Texts about the points that failed.
    """

    values: np.ndarray
    failures: Sequence[str]


class Done(NamedTuple):
    """A step that was taken.

    Attributes:
      record: Its values.
      numbers: The numbers of the step for a `History`, by name.
    """

    record: Record
    numbers: dict[str, Any]

    @classmethod
    def of(cls, record: Record, names: Sequence[str], numbers: np.ndarray) -> "Done":
        """A step, by the names of what was recorded of it."""
        named = dict(zip(names, numbers, strict=True))
        named["evaluations"] = len(record.values)
        return cls(record, {"step": record.step, "seconds": record.seconds} | named)


def run(
    state: SolverState,
    evaluate: Callable[[SolverState], Values | None],
    tell: Tell,
    watch: Watch,
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
      watch: Ends the run by its budgets; `after` counts the steps.
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
    while not (stopped := watch.reason()):
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
            stopped = watch.reason() or "callback"
            break
    policy.check_used(state, watch.steps, last)
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
def journaled(
    path: Path | None,
    fun: Any,
    state: SolverState,
    estimator: GradientEstimator,
    tell: Tell,
    watch: Watch,
    before_each: _BeforeEach | None = None,
) -> Iterator[tuple[SolverState, list[Done], Callable[[Record], None]]]:
    """Takes the steps that a journal holds, and opens it for those to come.

    Args:
      path: The journal; without one, nothing is read or written.
      fun: The function, of which the journal keeps an identity.
      state: The state before the first step.
      estimator: The estimator.
      tell: Takes a step.
      watch: Limits the number of steps to read.
      before_each: Given the records, returns what is called before each of their steps.

    Yields:
      The state, the steps, and what writes a record.
    """
    if path is None:
        yield state, [], lambda record: None
        return
    run = line_of_run(fun, state, estimator)
    found = journal.read(path)
    done: list[Done] = []
    if found is not None:
        journal.check_same_run(path, found.run, run)
        allowed = watch.allowed([len(record.values) for record in found.records])
        records = found.records[:allowed]
        before = before_each(records) if before_each and records else None
        state, done = rebuild(state, records, tell, before)
    with journal.appending(path, run, found) as write:
        yield state, done, write


def rebuild(
    state: SolverState,
    records: Sequence[Record],
    tell: Tell,
    before: Callable[[SolverState], None] | None = None,
    exact: bool = True,
) -> tuple[SolverState, list[Done]]:
    """Takes the steps of records, without an evaluation.

    Args:
      state: The state before the first step.
      records: The values of the steps.
      tell: Takes a step.
      before: Called with the state before each step.
      exact: Whether to compare the parameters with the checksums of the run.

    Returns:
      The state after the last, and the steps.

    Raises:
      ValueError: If the parameters differ from the run's.
    """
    total, names = ask_tell.checksum_of(state.params), history.names(state)
    done: list[Done] = []
    on_cpu = jax.default_backend() == "cpu"
    # Part by part: what lies on the device takes a hundred times the memory.
    for first in range(0, len(records), _PART):
        part = records[first : first + _PART]
        sums, numbers = [], []
        for record in part:
            if before is not None:
                before(state)
            sums.append(total)
            state, of_step, total = tell(state, record.values)
            numbers.append(of_step)
            if on_cpu:
                # Several hundred queued steps with collectives end the process there.
                jax.block_until_ready(total)
        for checksum, record in zip(jax.device_get(sums), part, strict=True):
            if exact and record.params not in (0, int(checksum)):
                raise ValueError(
                    "journal must be rebuilt by the params, optimizer, estimator, "
                    "versions and kind of machine that it was written with; got other "
                    f"parameters before step {record.step}. With exact=False, replay "
                    "rebuilds it up to rounding." + checks.refer_to("replay")
                )
        steps = zip(part, jax.device_get(numbers), strict=True)
        done += [Done.of(record, names, of_step) for record, of_step in steps]
    return state, done


def line_of_run(
    fun: Any, state: SolverState, estimator: GradientEstimator
) -> dict[str, Any]:
    """The first line of a journal, which identifies the run."""
    points = _points(state, estimator)
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    shapes = {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }
    device = jax.devices()[0]
    return {
        "fun": journal.identity(fun) if callable(fun) else None,
        "key": np.asarray(jax.random.key_data(state.key)).tolist(),
        "params": shapes,
        "start": f"{int(ask_tell.checksum_of(state.params)):08x}",
        "distribution": repr(points.directions.distribution),
        "scales": np.asarray(points.scales[0]).tolist(),
        "points": points.num_points,
        "dtype": str(trees.widest(state.params)),
        "versions": {name: _version(name) for name in _PACKAGES},
        "device": f"{device.platform} {device.device_kind}",
    }


@functools.partial(jax.jit, static_argnames="estimator")
def _points(state: SolverState, estimator: GradientEstimator) -> Points:
    return step.points_without_loss(state, estimator)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


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
