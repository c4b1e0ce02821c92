"""The workers of a run: which have built it, and why others have left."""

import asyncio
import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from radazo_jax._src import trees
from radazo_jax._src.workers.messages import Reply, Request
from radazo_jax._src.workers.replica import Description, Recipe

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


class Messenger(Protocol):
    """The messages to workers; `Cluster` sends them by Dask."""

    async def addresses(self) -> list[str]: ...
    async def install(
        self, address: str, run: int, recipe: Recipe
    ) -> Description | str | None: ...
    async def ask(self, address: str, request: Request) -> Reply | None: ...
    async def copy(self, address: str, run: int, peer: str) -> Reply | None: ...
    async def params(self, address: str, run: int) -> Any: ...
    async def close(self, address: str, run: int) -> None: ...


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
        messenger: Messenger,
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
        self._initial: set[str] | None = None
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._left_out: set[str] = set()
        self._watching: asyncio.Task[None] | None = None
        self._first = ""  # The worker that described the run.
        self._problem = ""  # The last one for which a worker was left out.
        self._notes: list[str] = []
        self._alone_since = 0.0

    def start(self) -> None:
        """Begins to look for workers."""
        self._alone_since = now()
        self._watching = asyncio.create_task(self._watch())

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

    def note(self, text: str) -> None:
        """Adds what should be reported."""
        self._notes.append(text)

    def notes(self) -> list[str]:
        """Returns, once, what should be reported."""
        found, self._notes = self._notes, []
        return found

    def check_not_alone(self) -> None:
        """Raises if there have been no workers for long, or all were left out."""
        if self.workers or self._joining:
            self._alone_since = now()
            return
        waited = now() - self._alone_since > self._timeout
        if self.description is None and waited:
            raise ValueError(
                f"client must have workers; got none in {self._timeout:.3g} s. Start "
                "some, as by `dask worker ADDRESS`."
            )
        if self._problem or waited:
            raise RuntimeError(
                self._problem or f"client had no workers for {self._timeout:.3g} s."
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

    async def _watch(self) -> None:
        """Asks for workers that are new."""
        while True:
            try:
                addresses = set(await self._messenger.addresses())
            except Exception as error:
                self._inbox.put(functools.partial(_raise, error))
                return
            if self._initial is None:
                self._initial = addresses
            known = self.workers.keys() | self._joining.keys() | self._left_out
            for address in addresses - known:
                self._joining[address] = asyncio.create_task(self._join(address))
            await asyncio.sleep(_LOOK)

    async def _join(self, address: str) -> None:
        built: Description | str | None
        try:
            installing = self._messenger.install(address, self._run, self._recipe)
            built = await asyncio.wait_for(installing, self._timeout)
        except TimeoutError:
            built = f"it has not built the run in {self._timeout:.3g} s (timeout)."
        except Exception as error:
            built = f"{error!r}"
        self._inbox.put(lambda: self._joined(address, built))

    def _joined(self, address: str, built: Description | str | None) -> None:
        del self._joining[address]
        if built is None:
            return  # It died. If it has not, it is asked again.
        if isinstance(built, str):
            problem = (
                "make_fun, params, optimizer and estimator must build a run on every "
                f"worker; on {address} that failed:\n{built}"
            )
        else:
            problem = self._difference(address, built)
        if problem and self._initial is not None and address in self._initial:
            raise ValueError(problem)
        if problem or isinstance(built, str):
            self.leave_out(address, problem)
            return
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
            # Other numbers of a function make other values, which are compared below.
            if name in ("device", "captured") or got == expected:
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
        most = trees.rounding(value) * max(abs(value), abs(other))
        if abs(value - other) <= most or not np.isfinite([value, other]).any():
            return ""
        return (
            "make_fun must build the same function on all workers; got the value "
            f"{value:.9g} at the start on {self._first} and {other:.9g} on {address}."
        )


def now() -> float:
    """Returns the time of the event loop, in seconds."""
    return asyncio.get_running_loop().time()


def _raise(error: Exception) -> None:
    raise RuntimeError(f"client has lost its scheduler: {error!r}.") from error
