"""Steps on workers that join, die, are slow or drift."""

import asyncio
import contextlib
import dataclasses
import functools
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from radazo_jax._src.optimize.journal import Record
from radazo_jax._src.workers.messages import Reply, Request
from radazo_jax._src.workers.replica import Description, Recipe
from radazo_jax._src.workers.shares import Members, shares

_POLL = 0.1  # Seconds between looks at clocks and at Ctrl-C.
_LOOK = 0.5  # Seconds between looks for workers that joined.
_LAG = 8  # Steps that a worker takes before it evaluates.
_CHUNK = 4096  # Steps in a message.
_LATE = 3.0  # A worker is late after this multiple of its expected time, and
_GRACE = 0.25  # these seconds more.
_MOST_PROBLEMS = 3  # In a row, of a worker.
_MOST_DRIFTS = 3  # In so many steps:
_DRIFT_STEPS = 100
_NONE = np.zeros(0, np.uint16)  # No members.
_BANDWIDTH = 1e8  # Bytes per second of a copied state, until one is measured.


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
    """The messages that a fleet sends; see `Cluster`."""

    async def addresses(self) -> list[str]: ...
    async def install(
        self, address: str, run: int, recipe: Recipe
    ) -> Description | str | None: ...
    async def ask(self, address: str, request: Request) -> Reply | None: ...
    async def copy(self, address: str, run: int, peer: str) -> Reply | None: ...
    async def params(self, address: str, run: int) -> Any: ...
    async def close(self, address: str, run: int) -> None: ...


@dataclasses.dataclass(eq=False)
class _Worker:
    """A worker that has built the run."""

    address: str
    rate: float  # Members per second.
    seconds_per_step: float
    step: int = 0  # Of its state.
    restarts: bool = False  # Before its next steps.
    task: "asyncio.Task[None] | None" = None
    since: float = 0.0  # When the task began.
    expected: float = 0.0  # Its seconds.
    of_step: int = -1  # The step of the members, which are
    members: np.ndarray = dataclasses.field(default_factory=_NONE.copy)
    late: bool = False  # Whether others were asked for them.
    copies: bool = False  # Whether the task copies a state.
    excluded: int = -1  # The step for which its parameters are wrong.
    problems: int = 0  # Errors since the last answer.


class Fleet:
    """The workers of a run, and the steps that they are sent.

    All methods but `notes` run on one event loop.

    Attributes:
      records: The steps so far, to which the driver adds.
      numbers: The numbers of steps, by step.
      failures: The counts of `Failures` before the current step.
      reports: The part of each worker, by address.
      description: The run, as the first worker describes it.
    """

    def __init__(self, messenger: Messenger, recipe: Recipe, run: int, timeout: float):
        self.records: list[Record] = []
        self.numbers: dict[int, np.ndarray] = {}
        self.failures = (0, 0, 0)
        self.reports: dict[str, WorkerReport] = {}
        self.description: Description | None = None
        self._messenger, self._recipe, self._run = messenger, recipe, run
        self._timeout = timeout
        self._workers: dict[str, _Worker] = {}
        self._initial: set[str] | None = None
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._banned: set[str] = set()
        self._inbox: deque[Callable[[Members | None], None]] = deque()
        self._news = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._notes: list[str] = []
        self._bandwidth = _BANDWIDTH
        self._first = ""  # The worker that described the run.
        self._alone_since = self._checked = 0.0
        self._problem = ""  # The last one for which a worker was left out.
        self._ties = 0

    def notes(self) -> list[str]:
        """Returns, once, what should be reported."""
        found, self._notes = self._notes, []
        return found

    async def start(self, interrupted: Callable[[], bool]) -> Description | None:
        """Waits for the first worker, which describes the run.

        Raises:
          ValueError: If there is none, or one cannot build the run.
        """
        self._alone_since = _now()
        self._watching = asyncio.create_task(self._watch())
        while self.description is None:
            if interrupted():
                return None
            await self._wait(None)
        return self.description

    async def close(self) -> None:
        """Frees what the workers hold."""
        tasks = [self._watching, *self._joining.values()]
        tasks += [worker.task for worker in self._workers.values()]
        for task in tasks:
            if task is not None:
                task.cancel()
        closing = [
            asyncio.wait_for(self._messenger.close(address, self._run), 5.0)
            for address in self._workers
        ]
        await asyncio.gather(*closing, return_exceptions=True)

    async def evaluate(self, interrupted: Callable[[], bool]) -> Members | None:
        """Returns the values of the next step, or `None` if it was interrupted.

        Raises:
          RuntimeError: If there are no workers, or they compute different parameters.
        """
        return await self._round(self._described().line["points"], interrupted)

    async def finish(self, interrupted: Callable[[], bool], fetches: bool) -> Any:
        """Returns the parameters after the last step, or `None` if interrupted."""
        while True:
            found = await self._round(0, interrupted)
            if found is None:
                return None
            agreed = self.agreed(found)
            for address, checksum in found.checksums.items():
                if not fetches:
                    return None
                if checksum != agreed or address not in self._workers:
                    continue
                try:
                    return await self._messenger.params(address, self._run)
                except OSError as error:
                    self._lose(self._workers[address], f"died: {error}")

    @staticmethod
    def agreed(found: Members) -> int:
        """Returns the checksum that more than half of the workers have, or -1."""
        counts = Counter(found.checksums.values())
        best, count = counts.most_common(1)[0] if counts else (-1, 0)
        return best if 2 * count > counts.total() else -1

    async def _round(
        self, num_members: int, interrupted: Callable[[], bool]
    ) -> Members | None:
        step = len(self.records)
        found = Members(num_members, np.dtype(self._described().line["dtype"]))
        self._give(step, found)
        while True:
            # Without members, all checksums are waited for.
            waits = num_members == 0 and (
                not found.checksums
                or any(
                    w.task is not None and w.of_step == step and not w.late
                    for w in self._workers.values()
                )
            )
            if found.complete() and not waits and self._agree(step, found):
                return found
            await self._wait(found)
            if interrupted():
                return None
            self._give(step, found)

    async def _wait(self, found: Members | None) -> None:
        """Waits for an answer or a moment, and takes all that there are."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), _POLL)
        self._news.clear()
        if _now() - self._checked >= _POLL:
            self._check_clocks(found)
            self._checked = _now()
        while self._inbox:
            self._inbox.popleft()(found)

    def _tell(self, news: Callable[[Members | None], None]) -> None:
        self._inbox.append(news)
        self._news.set()

    def _check_clocks(self, found: Members | None) -> None:
        now = _now()
        for worker in list(self._workers.values()):
            if worker.task is None:
                continue
            elapsed = now - worker.since
            if elapsed > self._timeout + worker.expected:
                self._lose(worker, f"gave no answer for {elapsed:.3g} s", found)
            elif (
                found is not None
                and not worker.late
                and worker.of_step == (len(self.records))
                and elapsed > _LATE * worker.expected + _GRACE
            ):
                worker.late = True
                worker.rate = min(worker.rate, len(worker.members) / elapsed or 1e-9)
                found.give_up(worker.members)
        if self._workers or self._joining:
            self._alone_since = now
        elif self.description is None and now - self._alone_since > self._timeout:
            raise ValueError(
                f"client must have workers; got none in {self._timeout:.3g} s. Start "
                "some, as by `dask worker ADDRESS`."
            )
        elif self._problem or now - self._alone_since > self._timeout:
            raise RuntimeError(
                self._problem or f"client had no workers for {self._timeout:.3g} s."
            )

    # --- Members ------------------------------------------------------------------

    def _give(self, step: int, found: Members) -> None:
        """Sends each idle worker the members or the steps that it lacks."""
        idle = [w for w in self._workers.values() if w.task is None]
        for worker in idle:
            if step - worker.step > _LAG:
                self._catch_up(worker, step)
        ready = [w for w in idle if w.task is None and w.excluded != step]
        missing = found.missing()
        counts = shares(len(missing), [w.rate for w in ready])
        best = max((w.rate for w in ready), default=0.0)
        end = 0
        for worker, count in zip(ready, counts, strict=True):
            members = missing[end : end + count].astype(np.uint16)
            end += count
            if count:
                found.send(members)
            else:
                # What was slow once is tried again in the end.
                worker.rate = min(1.1 * worker.rate, best)
            if count or worker.step < step or worker.address not in found.checksums:
                self._send(worker, step, members)

    def _send(self, worker: _Worker, step: int, members: np.ndarray) -> None:
        """Sends the steps up to this one, or as many as a message has."""
        first = 0 if worker.restarts else worker.step
        part = self.records[first : min(step, first + _CHUNK)]
        dtype = np.dtype(self._described().line["dtype"])
        points = self._described().line["points"]
        values = np.array([record.values for record in part], dtype)
        request = Request(
            self._run,
            first,
            values.reshape(len(part), points),
            np.array([record.params for record in part], np.uint32),
            members,
            worker.restarts,
        )
        worker.restarts, worker.of_step = (
            False,
            step if len(part) == step - first else -1,
        )
        worker.members = members
        taken = len(part) * worker.seconds_per_step
        self._begin(
            worker,
            taken + len(members) / worker.rate,
            self._messenger.ask(worker.address, request),
        )

    def _catch_up(self, worker: _Worker, step: int) -> None:
        """Sends the values of many steps, or the state of a peer if that is faster."""
        behind = (step - worker.step) * worker.seconds_per_step
        size = self._described().size
        peers = [
            peer.address
            for peer in self._workers.values()
            if peer is not worker and step - peer.step <= _LAG and peer.excluded != step
        ]
        if peers and size / self._bandwidth < behind and not worker.restarts:
            worker.of_step, worker.members, worker.copies = -1, _NONE, True
            self._begin(
                worker,
                size / self._bandwidth,
                self._messenger.copy(worker.address, self._run, peers[0]),
            )
        else:
            self._send(worker, step, _NONE)

    def _begin(self, worker: _Worker, expected: float, exchange: Any) -> None:
        async def exchanged() -> None:
            try:
                outcome = await exchange
            except Exception as error:
                outcome = error
            self._tell(lambda found: self._received(worker, outcome, found))

        worker.since, worker.expected, worker.late = _now(), expected, False
        worker.task = asyncio.create_task(exchanged())

    def _received(self, worker: _Worker, outcome: Any, found: Members | None) -> None:
        if self._workers.get(worker.address) is not worker:
            return  # It was lost before.
        worker.task = None
        step, members = len(self.records), worker.members
        copied, worker.copies = worker.copies, False
        if found is None or worker.of_step != step:
            members = _NONE
        elif not worker.late:
            found.give_up(members)
        if outcome is None or isinstance(outcome, Exception):
            reason = f"died: {outcome!r}" if outcome else "has lost the run"
            self._lose(worker, reason, found, members)
        elif outcome.problem:
            worker.problems += 1
            if found is not None:
                found.fail(members, _last_line(outcome.problem))
            if worker.problems >= _MOST_PROBLEMS:
                self._leave_out(worker.address, outcome.problem)
                self._lose(worker, "failed", found)
        elif outcome.drifted:
            self._drifted(worker, worker.step, step)
            worker.step = 0
        else:
            self._answered(worker, outcome, members, copied, found)

    def _answered(
        self,
        worker: _Worker,
        reply: Reply,
        members: np.ndarray,
        copied: bool,
        found: Members | None,
    ) -> None:
        step, elapsed = len(self.records), _now() - worker.since
        for i, row in enumerate(reply.numbers, reply.step - len(reply.numbers)):
            self.numbers.setdefault(i, row)
        worker.step, worker.problems = reply.step, 0
        worker.seconds_per_step = reply.seconds_per_step
        if copied and elapsed > 0:
            self._bandwidth = self._described().size / elapsed
        if len(reply.values):
            worker.rate = (worker.rate + len(reply.values) / elapsed) / 2
            report = self.reports[worker.address]
            self.reports[worker.address] = report._replace(
                evaluations=report.evaluations + len(reply.values),
                seconds=report.seconds + elapsed,
            )
        if reply.step == step and found is not None:
            self.failures = reply.failures
            found.checksums[worker.address] = reply.checksum
            if len(reply.values) == len(members):
                found.receive(worker.address, members, reply.values)
        elif reply.step < step and reply.checksum != self.records[reply.step].params:
            # Its next message tells it, and it drops its state.
            worker.excluded = step

    # --- Parameters ---------------------------------------------------------------

    def _agree(self, step: int, found: Members) -> bool:
        """Whether the values are those of the same parameters; drops what is not."""
        if not found.checksums:
            problem = next(iter(found.failures.values()), "")
            raise RuntimeError(f"no worker could evaluate: {problem}.")
        agreed = self.agreed(found)
        others = {a for a, checksum in found.checksums.items() if checksum != agreed}
        if not others:
            self._ties = 0
            return True
        if agreed < 0:
            self._ties += 1
            if self._ties > 2:
                listed = ", ".join(f"{a} {c:08x}" for a, c in found.checksums.items())
                raise RuntimeError(
                    "workers must compute the same parameters from the same values; "
                    f"got the checksums {listed}. Take workers of the same kind, or "
                    "one kind with one instruction set."
                )
        for address in others & self._workers.keys():
            worker = self._workers[address]
            self._drifted(worker, step, step)
            worker.restarts, worker.step = True, 0
        found.revoke(others)
        return False

    def _drifted(self, worker: _Worker, at: int, step: int) -> None:
        """Reports a worker whose parameters before a step are not the run's."""
        address = worker.address
        report = self.reports[address]
        rebuilt = (*report.rebuilt, at)
        self.reports[address] = report._replace(rebuilt=rebuilt)
        recent = sum(step - i < _DRIFT_STEPS for i in rebuilt)
        if recent >= _MOST_DRIFTS:
            self._leave_out(
                address,
                f"its parameters differed from the run's {recent} times in "
                f"{_DRIFT_STEPS} steps. Its processor may round differently.",
            )
            self._lose(worker, "drifted")
        else:
            self._note(
                f"worker {address} had other parameters than the run before step "
                f"{at}, and is rebuilt."
            )

    # --- Workers ------------------------------------------------------------------

    async def _watch(self) -> None:
        """Lets workers join that appear."""
        while True:
            try:
                addresses = set(await self._messenger.addresses())
            except Exception as error:
                self._tell(functools.partial(_raise, error))
                return
            if self._initial is None:
                self._initial = addresses
            known = self._workers.keys() | self._joining.keys() | self._banned
            for address in addresses - known:
                self._joining[address] = asyncio.create_task(self._join(address))
            await asyncio.sleep(_LOOK)

    async def _join(self, address: str) -> None:
        try:
            built = await self._messenger.install(address, self._run, self._recipe)
        except Exception as error:
            built = f"{error!r}"
        self._tell(lambda found: self._joined(address, built))

    def _joined(self, address: str, built: Description | str | None) -> None:
        del self._joining[address]
        if built is None:
            return  # It died, or will be asked again.
        problem = built if isinstance(built, str) else self._difference(address, built)
        if isinstance(built, str):
            problem = (
                "make_fun, params, optimizer and estimator must build a run on every "
                f"worker; on {address} that failed:\n{built}"
            )
        if problem:
            self._refuse(address, problem)
            return
        assert isinstance(built, Description)
        if self.description is None:
            self.description, self._first = built, address
        self._workers[address] = _Worker(
            address, 1 / max(built.seconds, 1e-9), built.seconds_per_step
        )
        self.reports.setdefault(address, WorkerReport(joined=len(self.records)))

    def _difference(self, address: str, built: Description) -> str:
        """A text if the run of a worker is not that of the first one."""
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
        return ""

    def _refuse(self, address: str, problem: str) -> None:
        if self._initial is not None and address in self._initial:
            raise ValueError(problem)
        self._leave_out(address, problem)

    def _leave_out(self, address: str, problem: str) -> None:
        self._banned.add(address)
        self._problem = f"worker {address} is left out: {problem}"
        self._note(self._problem)

    def _lose(
        self,
        worker: _Worker,
        reason: str,
        found: Members | None = None,
        members: np.ndarray = _NONE,
    ) -> None:
        """Lets a worker go; if it is alive, it may join again."""
        if self._workers.pop(worker.address, None) is None:
            return
        if worker.task is not None:
            worker.task.cancel()
            if found is not None and worker.of_step == len(self.records):
                members = worker.members
                if not worker.late:
                    found.give_up(members)
        if found is not None:
            found.fail(members, f"its worker {reason}")
        report = self.reports[worker.address]
        self.reports[worker.address] = report._replace(left=reason)

    def _note(self, text: str) -> None:
        self._notes.append(text)

    def _described(self) -> Description:
        if self.description is None:
            raise RuntimeError("no worker has described the run.")
        return self.description


def _raise(error: Exception, found: Members | None) -> None:
    del found
    raise RuntimeError(f"client has lost its scheduler: {error!r}.") from error


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _now() -> float:
    return asyncio.get_running_loop().time()
