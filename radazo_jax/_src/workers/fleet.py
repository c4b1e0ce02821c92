"""Steps on workers that join, die, are slow or drift."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from radazo_jax._src.runs.journal import Record
from radazo_jax._src.workers.cluster import Cluster
from radazo_jax._src.workers.messages import Reply, Request
from radazo_jax._src.workers.replica import Description, Recipe
from radazo_jax._src.workers.roster import NONE, Inbox, Roster, Worker, now
from radazo_jax._src.workers.shares import Members, Repeats, shared_out

_POLL = 0.1  # Seconds between looks at clocks and at Ctrl-C.
_LAG = 8  # Steps that a worker may lack when it is asked for members.
_CHUNK = 4096  # Steps in a message.
_LATE = 3.0  # A worker is late after this multiple of its expected time, and
_GRACE = 0.25  # these seconds more.
_MOST_PROBLEMS = 3  # In a row, of a worker.
_MOST_DRIFTS = 3  # Of a worker, in so many steps:
_DRIFT_STEPS = 100
_MOST_TIES = 2  # In a row.
_BANDWIDTH = 1e8  # Bytes per second of a copied state, until one is measured.


class Fleet:
    """The steps of a run, and the workers that they are sent to.

    All coroutines run on one event loop.

    Attributes:
      roster: The workers.
      records: The steps so far, to which the driver adds.
      numbers: The numbers of steps, by step.
      failures: The counts of `Failures` before the current step.
    """

    def __init__(self, messenger: Cluster, recipe: Recipe, run: int, timeout: float):
        self.records: list[Record] = []
        self.numbers: dict[int, np.ndarray] = {}
        self.failures = (0, 0, 0)
        self._messenger, self._run, self._timeout = messenger, run, timeout
        self._batch_size = recipe.batch_size
        self._resumed = 0  # Number of steps from a journal.
        self._inbox = Inbox()
        self.roster = Roster(messenger, recipe, run, timeout, self._inbox)
        self._members = Members(0, np.dtype(np.float32))  # Of the current step.
        self._repeats = Repeats(recipe.batch_size)
        self._bandwidth = _BANDWIDTH
        self._checked, self._ties = 0.0, 0
        self._known = 0  # Number of workers when members were last given.
        self._gives = False  # Whether an idle worker may lack something.

    def resume(self, records: list[Record]) -> None:
        """Begins after the steps of a journal."""
        self.records, self._resumed = records, len(records)
        failed = sum(int((~np.isfinite(x.values)).sum()) for x in records)
        self.failures = (failed, 0, 0)

    async def start(self, interrupted: Callable[[], bool]) -> Description | None:
        """Waits for the first worker, which describes the run.

        Raises:
          ValueError: If there is none, or one cannot build the run.
        """
        self.roster.start()
        while self.roster.description is None:
            if interrupted():
                return None
            await self._wait()
        return self.roster.description

    async def evaluate(self, interrupted: Callable[[], bool]) -> Members | None:
        """Returns the values of the next step, or `None` if it was interrupted.

        Raises:
          RuntimeError: If there are no workers, or they compute different parameters.
        """
        return await self._round(self._line["points"], interrupted)

    async def finish(self, interrupted: Callable[[], bool], fetches: bool) -> Any:
        """Returns the parameters after the last step, or `None` if interrupted."""
        while (found := await self._round(0, interrupted)) is not None:
            for address in found.checksums if fetches else ():
                fetching = self._messenger.params(address, self._run)
                try:
                    return await asyncio.wait_for(fetching, self._timeout)
                except TimeoutError:
                    reason = f"gave no parameters for {self._timeout:.3g} s"
                except OSError as error:
                    reason = f"died: {error!r}"
                if worker := self.roster.workers.get(address):
                    self._lose(worker, reason)
                    self.roster.check_not_alone()
            if not fetches:
                break
        return None

    async def _round(
        self, num_members: int, interrupted: Callable[[], bool]
    ) -> Members | None:
        """The values of the current step; without members, only checksums."""
        self.roster.step = len(self.records)
        self.roster.check_not_alone()
        found = self._members = Members(num_members, np.dtype(self._line["dtype"]))
        self._gives = True
        self._give()
        while not (found.complete() and self._answers(num_members) and self._agree()):
            await self._wait()
            if interrupted():
                return None
            self._give()
        return found

    def _answers(self, num_members: int) -> bool:
        """Whether all checksums are there, which are waited for without members."""
        known = bool(self._members.checksums)
        return num_members > 0 or (known and not self.roster.waits())

    async def _wait(self) -> None:
        """Waits for news or a moment, then looks at the clocks."""
        await self._inbox.handle(_POLL)
        if now() - self._checked < _POLL:
            return
        self._checked = now()
        for worker in list(self.roster.workers.values()):
            elapsed = now() - worker.since
            if worker.task is None:
                continue
            if elapsed > self._timeout + worker.expected:
                self._lose(worker, f"gave no answer for {elapsed:.3g} s")
            elif worker.is_asked(self.roster.step) and (
                elapsed > _LATE * worker.expected + _GRACE
            ):
                worker.late = self._gives = True
                done = max(self._batches(worker.members), 0.1)
                worker.rate = min(worker.rate, done / elapsed)
                self._members.give_up(worker.members)
        self.roster.check_not_alone()

    # --- Requests -----------------------------------------------------------------

    def _give(self) -> None:
        """Sends each idle worker the members or the steps that it lacks."""
        # With many workers, a look at all of them after each reply takes long.
        if not self._gives and self._known == len(self.roster.workers):
            return
        step, found = self.roster.step, self._members
        self._known = len(self.roster.workers)
        idle = [w for w in self.roster.workers.values() if w.task is None]
        for worker in idle:
            if step - worker.step > _LAG:
                self._catch_up(worker)
        ready = [w for w in idle if w.task is None and w.excluded != step]
        rates = [worker.rate for worker in ready]
        shared = shared_out(found, rates, self._known, self._batch_size)
        for worker, members in zip(ready, shared, strict=True):
            found.send(members)
            if not len(members):
                # A worker that was slow once is asked again in the end.
                worker.rate = min(1.1 * worker.rate, max(rates))
            if len(members) or worker.address not in found.checksums:
                self._send(worker, members)
        self._gives = len(found.missing()) > 0

    def _batches(self, members: np.ndarray) -> int:
        """The number of batches in which a worker evaluates members."""
        return -(-len(members) // self._batch_size)

    def _send(self, worker: Worker, members: np.ndarray) -> None:
        """Sends the steps up to this one, or as many as a message has."""
        step, first = self.roster.step, 0 if worker.restarts else worker.step
        part = self.records[first : first + _CHUNK]
        n = self._line["points"]
        values = [x.values for x in part]
        request = Request(
            self._run,
            first,
            np.array(values, self._line["dtype"]).reshape(len(part), n),
            np.array([x.params for x in part], np.uint32),
            members,
            worker.restarts,
        )
        worker.restarts, worker.members = False, members
        worker.of_step = step if first + len(part) == step else -1
        evaluating = self._batches(members) / worker.rate
        expected = len(part) * worker.seconds_per_step + evaluating
        asking = self._messenger.ask(worker.address, request)
        self._begin(worker, asking, expected, self._answered)

    def _catch_up(self, worker: Worker) -> None:
        """Sends the values of many steps, or the state of a peer if that is faster."""
        step = self.roster.step
        seconds = self.roster.described.size / self._bandwidth
        peers = [
            peer.address
            for peer in self.roster.workers.values()
            if peer is not worker and step - peer.step <= _LAG and peer.excluded != step
        ]
        taking = (step - worker.step) * worker.seconds_per_step
        if worker.restarts or not peers or taking <= seconds:
            self._send(worker, NONE)
            return
        worker.of_step, worker.members = -1, NONE
        copying = self._messenger.copy(worker.address, self._run, peers[0])
        self._begin(worker, copying, seconds, self._copied)

    def _begin(
        self,
        worker: Worker,
        exchange: Any,
        expected: float,
        then: Callable[[Worker, Reply], None],
    ) -> None:
        async def exchanged() -> None:
            try:
                outcome = await exchange
            except Exception as error:
                outcome = error
            self._inbox.put(lambda: self._received(worker, outcome, then))

        worker.since, worker.expected, worker.late = now(), expected, False
        worker.task = asyncio.create_task(exchanged())

    # --- Replies ------------------------------------------------------------------

    def _received(
        self,
        worker: Worker,
        outcome: Reply | Exception | None,
        then: Callable[[Worker, Reply], None],
    ) -> None:
        if self.roster.workers.get(worker.address) is not worker:
            return  # It was lost before.
        if not isinstance(outcome, Reply):
            reason = f"died: {outcome!r}" if outcome else "has lost the run"
            self._lose(worker, reason)
            return
        self._release(worker)
        self._gives |= outcome.problem != "" or outcome.step != self.roster.step
        worker.problems = worker.problems + 1 if outcome.problem else 0
        if outcome.problem:
            if worker.of_step == self.roster.step:
                last = outcome.problem.strip().rpartition("\n")[2]
                self._members.fail(worker.members, last)
            if worker.problems >= _MOST_PROBLEMS:
                self.roster.leave_out(worker.address, outcome.problem)
                self._lose(worker, "failed")
        elif outcome.drifted:
            self._drifted(worker, worker.step)
            worker.step, worker.excluded = 0, -1
        else:
            then(worker, outcome)

    def _release(self, worker: Worker) -> None:
        """Counts the members of a worker as asked of nobody."""
        if worker.is_asked(self.roster.step):
            self._members.give_up(worker.members)
        worker.task = None

    def _lose(self, worker: Worker, reason: str) -> None:
        """Lets a worker go, and its members to others."""
        if worker.task is not None and worker.of_step == self.roster.step:
            self._members.fail(worker.members, f"its worker {reason}")
        self.roster.remove(worker, reason)
        self._release(worker)
        self._gives = True

    def _copied(self, worker: Worker, reply: Reply) -> None:
        self._bandwidth = self.roster.described.size / max(now() - worker.since, 1e-9)
        self._answered(worker, reply)

    def _answered(self, worker: Worker, reply: Reply) -> None:
        step, elapsed = self.roster.step, max(now() - worker.since, 1e-9)
        for i, row in enumerate(reply.numbers, reply.step - len(reply.numbers)):
            self.numbers.setdefault(i, row)
        worker.step, worker.seconds_per_step = reply.step, reply.seconds_per_step
        if count := len(reply.values):
            worker.rate = (worker.rate + self._batches(reply.values) / elapsed) / 2
            self.roster.count(worker, count, elapsed)
        if reply.step == step:
            self.failures = reply.failures
            self._members.checksums[worker.address] = reply.checksum
            if count == len(worker.members):
                self._members.receive(worker.address, worker.members, reply.values)
        elif self.records[reply.step].params not in (0, reply.checksum):
            # Its next message tells it, and it drops its state.
            worker.excluded = step

    # --- Parameters ---------------------------------------------------------------

    def _agree(self) -> bool:
        """Whether all values are of the same run; drops values of other parameters."""
        found, step = self._members, self.roster.step
        if not found.checksums:
            problem = next(iter(found.failures.values()), "")
            raise RuntimeError(f"no worker could evaluate: {problem}.")
        agreed = found.agreed()
        others = {a for a, checksum in found.checksums.items() if checksum != agreed}
        if not others:
            self._ties = 0
            return self._same_function()
        self._ties += agreed is None
        if self._ties > _MOST_TIES:
            listed = ", ".join(f"{a} {c:08x}" for a, c in found.checksums.items())
            raise RuntimeError(
                "workers must compute the same parameters from the same values; got "
                f"the checksums {listed}. Take workers with the same instruction set."
            )
        for address in others & self.roster.workers.keys():
            worker = self.roster.workers[address]
            worker.restarts, worker.step = True, 0
            self._drifted(worker, step)
        found.revoke(others)
        self._gives = True
        return False

    def _same_function(self) -> bool:
        """Whether the workers agree about members that all evaluate; drops others."""
        found, workers = self._members, self.roster.workers
        if found.repeats is None:
            found.repeats = self._repeats.of(self.roster.step, found)
            here = [workers[x] for x in found.checksums if x in workers]
            idle = [worker for worker in here if worker.task is None]
            for worker in idle if len(idle) > 1 and len(found.repeats) else ():
                found.send(found.repeats)
                self._send(worker, found.repeats)
        if len(found.repeats) and self.roster.waits():
            return False
        others = self.roster.other_functions(found.repeated, found.repeats)
        for address in others & workers.keys():
            self._lose(workers[address], "evaluates another function")
        found.revoke(others)
        return not others

    def _drifted(self, worker: Worker, at: int) -> None:
        """Reports a worker whose parameters before a step are not the run's."""
        if self.roster.step == self._resumed and not self._members.checksums:
            # None of the workers has the parameters of the journal.
            self._distrust_journal(worker)
            return
        steps = self.roster.rebuild(worker, at)
        recent = sum(self.roster.step - i < _DRIFT_STEPS for i in steps)
        if recent >= _MOST_DRIFTS:
            self.roster.leave_out(
                worker.address,
                f"its parameters differed from the run's {recent} times in "
                f"{_DRIFT_STEPS} steps. Its processor may round differently.",
            )
            self._lose(worker, "drifted")

    def _distrust_journal(self, worker: Worker) -> None:
        """From now on compares parameters between workers alone."""
        if any(record.params for record in self.records):
            self.records = [record._replace(params=0) for record in self.records]
            self.roster.note(
                f"worker {worker.address} computes other parameters from the values of "
                "the journal than the program that wrote it, which rounds in another "
                "way. The run continues from the values."
            )

    @property
    def _line(self) -> dict[str, Any]:
        return self.roster.described.line
