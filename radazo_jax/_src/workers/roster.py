"""The workers of a run: which have built it, and why others have left."""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from radazo_jax._src.workers.cluster import Cluster
from radazo_jax._src.workers.replica import Description, Recipe
from radazo_jax._src.workers.shares import differs

_LOOK = 0.5  # Seconds between looks for workers that joined.
NONE = np.zeros(0, np.int32)  # No members.


class WorkerReport(NamedTuple):
    """The part of a worker in a run.

    Attributes:
      evaluations: Number of values that it returned, with those that came too late.
      seconds: Duration of its evaluations, with the messages.
      joined: The number of the step at which it was first ready.
      rebuilt: The steps at which its parameters differed from the run's.
      left: The reason for which it last left; empty if it never did.
    """

    evaluations: int = 0
    seconds: float = 0.0
    joined: int = 0
    rebuilt: tuple[int, ...] = ()
    left: str = ""


@dataclasses.dataclass(eq=False)
class Worker:
    """A worker that has built the run.

    Attributes:
      address: Its address.
      rate: Batches that it evaluates per second.
      seconds_per_step: Duration of a step without its evaluations.
      step: The number of steps that its state has taken.
      restarts: Whether it drops its state before its next steps.
      excluded: The step for which its parameters are wrong.
      problems: Number of errors since its last answer.
      task: The exchange of messages, `None` if it is idle.
      since: The time at which the exchange began.
      expected: Seconds that the exchange should take.
      of_step: The step of the members that it was asked for.
      members: The members.
      late: Whether other workers were asked for them.
    """

    address: str
    rate: float
    seconds_per_step: float
    step: int = 0
    restarts: bool = False
    excluded: int = -1
    problems: int = 0
    task: "asyncio.Task[None] | None" = None
    since: float = 0.0
    expected: float = 0.0
    of_step: int = -1
    members: np.ndarray = dataclasses.field(default_factory=NONE.copy)
    late: bool = False

    def is_asked(self, step: int) -> bool:
        """Returns whether its answer is waited for in a step."""
        return self.task is not None and self.of_step == step and not self.late


class Inbox:
    """News from the tasks of an event loop, handled by one of them in turn."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._news = asyncio.Event()

    def put(self, handle: Callable[[], None]) -> None:
        """Adds news, as the function that handles it."""
        self._waiting.append(handle)
        self._news.set()

    async def handle(self, seconds: float) -> None:
        """Waits for news, at most so long, and handles all that there is."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)
        self._news.clear()
        while self._waiting:
            self._waiting.popleft()()


class Roster:
    """The workers of a run.

    Attributes:
      workers: Those that have built the run, by address.
      reports: The part of each worker, also of those that left.
      description: The run, as the first worker describes it.
      step: The number of the current step.
    """

    def __init__(
        self,
        messenger: Cluster,
        recipe: Recipe,
        run: int,
        timeout: float,
        inbox: Inbox,
    ):
        self.workers: dict[str, Worker] = {}
        self.reports: dict[str, WorkerReport] = {}
        self.description: Description | None = None
        self.step = 0
        self._messenger, self._recipe, self._run = messenger, recipe, run
        self._timeout, self._inbox = timeout, inbox
        self._initial: set[str] = set()  # Their failures end the run.
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._left_out: set[str] = set()
        self._watching: asyncio.Task[None] | None = None
        self._first = ""  # The worker that described the run.
        self._problem = ""  # The last one for which a worker was left out.
        self._notes: list[str] = []
        self._lost = ""  # The reason for which the last worker left.
        self._answered_at = 0.0  # The latest time without an answer that was due.

    def start(self) -> None:
        """Begins to look for workers."""
        self._answered_at = now()
        self._watching = asyncio.create_task(self._watch())

    @property
    def described(self) -> Description:
        """The run; it must have been described."""
        if self.description is None:
            raise RuntimeError("no worker has described the run.")
        return self.description

    async def close(self) -> None:
        """Frees what the workers hold."""
        tasks = [self._watching, *self._joining.values()]
        tasks += [worker.task for worker in self.workers.values()]
        for task in tasks:
            if task is not None:
                task.cancel()
        closing = [
            asyncio.wait_for(self._messenger.close(address, self._run), 5.0)
            for address in self.workers
        ]
        await asyncio.gather(*closing, return_exceptions=True)

    def waits(self) -> bool:
        """Returns whether an answer is waited for in the current step."""
        return any(worker.is_asked(self.step) for worker in self.workers.values())

    def note(self, text: str) -> None:
        """Adds what should be reported."""
        self._notes.append(text)

    def notes(self) -> list[str]:
        """Returns, once, what should be reported."""
        found, self._notes = self._notes, []
        return found

    def check_not_alone(self) -> None:
        """Raises if no worker has answered for long, or all were left out."""
        due = [w.since + w.expected if w.task else now() for w in self.workers.values()]
        due += [now() for _ in self._joining]
        self._answered_at = max([self._answered_at, *(min(x, now()) for x in due)])
        if due:
            return
        waited = now() - self._answered_at > self._timeout
        if self.description is None and waited:
            raise ValueError(
                f"client must have workers; got none in {self._timeout:.3g} s. Start "
                "some, as by `dask worker ADDRESS`."
            )
        if self._problem or waited:
            raise RuntimeError(
                self._problem
                or f"client had no workers for {self._timeout:.3g} s{self._lost}."
            )

    def count(self, worker: Worker, evaluations: int, seconds: float) -> None:
        """Counts evaluations of a worker."""
        report = self.reports[worker.address]
        self.reports[worker.address] = report._replace(
            evaluations=report.evaluations + evaluations,
            seconds=report.seconds + seconds,
        )

    def rebuild(self, worker: Worker, step: int) -> tuple[int, ...]:
        """Reports that the parameters of a worker differ; returns all such steps."""
        report = self.reports[worker.address]
        rebuilt = (*report.rebuilt, step)
        self.reports[worker.address] = report._replace(rebuilt=rebuilt)
        self.note(
            f"worker {worker.address} had other parameters than the run before step "
            f"{step}, and is rebuilt."
        )
        return rebuilt

    def other_functions(
        self, values: dict[str, np.ndarray], members: np.ndarray
    ) -> set[str]:
        """Leaves out workers that evaluate another function than most; returns them.

        Args:
          values: The values at some members of the current step, by worker.
          members: The numbers of these members.

        Raises:
          RuntimeError: If no more than half of the workers have the same values.
        """
        if not values:
            return set()
        scale = float(self.described.value)
        names, rows = list(values), np.stack(list(values.values()))
        agree = [(~differs(rows, row, scale).any(1)).sum() for row in rows]
        most = int(np.argmax(agree))
        far = differs(rows, rows[most], scale)
        others = np.flatnonzero(far.any(1))
        for k in others:
            i = int(far[k].argmax())
            problem = _other_function(
                *(rows[most, i], names[most], rows[k, i], names[k]),
                f"at point {members[i]} of step {self.step}",
            )
            if 2 * agree[most] <= len(names):
                raise RuntimeError(problem)
            self.leave_out(names[k], problem)
        return {names[k] for k in others}

    def leave_out(self, address: str, problem: str) -> None:
        """Lets a worker not join again."""
        self._left_out.add(address)
        self._problem = f"worker {address} is left out: {problem}"
        self.note(self._problem)

    def remove(self, worker: Worker, reason: str) -> None:
        """Lets a worker go; if it is alive and was not left out, it may join again."""
        del self.workers[worker.address]
        if worker.task is not None:
            worker.task.cancel()
        report = self.reports[worker.address]
        self.reports[worker.address] = report._replace(left=reason)
        self._lost = f"; the last one, {worker.address}, {reason}"
        if worker.address not in self._left_out:
            self._problem = ""  # It may join again.

    async def _watch(self) -> None:
        """Asks for workers that are new."""
        for look in itertools.count():
            try:
                addresses = set(await self._messenger.addresses())
            except Exception as error:
                self._inbox.put(functools.partial(_raise, error))
                return
            if look == 0:
                self._initial = set(addresses)
            known = self.workers.keys() | self._joining.keys() | self._left_out
            for address in addresses - known:
                self._joining[address] = asyncio.create_task(self._join(address))
            await asyncio.sleep(_LOOK)

    async def _join(self, address: str) -> None:
        built: Description | str | None
        hangs = False
        try:
            installing = self._messenger.install(address, self._run, self._recipe)
            built = await asyncio.wait_for(installing, self._timeout)
        except TimeoutError:
            built = f"it has not built the run in {self._timeout:.3g} s (timeout)."
            hangs = True
        except Exception as error:
            built = f"{error!r}"
        self._inbox.put(lambda: self._joined(address, built, hangs))

    def _joined(
        self, address: str, built: Description | str | None, hangs: bool
    ) -> None:
        del self._joining[address]
        if hangs and self.workers:
            self._initial.discard(address)  # The others continue.
        if built is None:
            return  # It died. If it has not, it is asked again.
        if isinstance(built, str):
            problem = (
                "make_fun, params, optimizer and estimator must build a run on every "
                f"worker; on {address} that failed:\n{built}"
            )
        else:
            problem = self._difference(address, built)
        if problem and address in self._initial:
            raise ValueError(problem)
        if problem or isinstance(built, str):
            self.leave_out(address, problem)
            return
        self._initial.discard(address)
        if self.description is None:
            self.description, self._first = built, address
        # As fast as the fastest until it is measured under the same load.
        rates = [worker.rate for worker in self.workers.values()]
        rate = max(1 / max(built.seconds, 1e-9), *rates, 0.0)
        self.workers[address] = Worker(address, rate, built.seconds_per_step)
        self.reports.setdefault(address, WorkerReport(joined=self.step))

    def _difference(self, address: str, built: Description) -> str:
        """A text if a worker has built another run than the first worker."""
        if self.description is None:
            return ""
        for name, expected in self.description.line.items():
            got = built.line[name]
            if name == "device" or got == expected:
                continue
            what = {
                "start": "params must have the same checksum",
                "versions": "versions must be the same",
            }.get(name, f"make_fun must build a run with the same {name}")
            return (
                f"{what} on all workers; got {expected} on {self._first} and {got} on "
                f"{address}."
            )
        value, other = self.description.value, built.value
        if not differs(np.atleast_1d(value), np.atleast_1d(other)).any():
            return ""
        return _other_function(value, self._first, other, address, "at the start")


def _other_function(
    value: np.floating[Any],
    first: str,
    other: np.floating[Any],
    address: str,
    where: str,
) -> str:
    return (
        "make_fun must build the same function on all workers; got the value "
        f"{value:.9g} {where} on {first} and {other:.9g} on {address}."
    )


def now() -> float:
    """Returns the time of the event loop, in seconds."""
    return asyncio.get_running_loop().time()


def _raise(error: Exception) -> None:
    raise RuntimeError(f"client has lost its scheduler: {error!r}.") from error
