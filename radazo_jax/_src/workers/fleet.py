"""The workers of a run: they join, die or are late, and evaluate its points."""

import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from radazo_jax._src.base import checks, trees
from radazo_jax._src.runs.journal import Record
from radazo_jax._src.steps.states import RunError
from radazo_jax._src.workers.replica import Description, Reply

_POLL = 0.1  # Seconds between looks at clocks and at Ctrl-C,
_LOOK = 0.5  # and for workers that join or leave.
_LAG = 8  # Steps that a worker may lack when it is asked for members.
_CHUNK = 50  # Steps in a message.
_LATE, _GRACE = 3.0, 0.25  # Late is so many times as long as before, and seconds more.
_CHECKED = 10  # Steps, in one of which two workers evaluate the same member.
_MOST_LOST = 5  # Workers that were lost while they evaluated the same member.
_JOURNAL = "the journal"


@dataclasses.dataclass
class WorkerReport:
    """The part of a worker in a run.

    Attributes:
      joined: The number of the step at which it was first ready.
      evaluations: Number of values that it returned, with those that came too late.
      left: The reason for which it last left; empty if it never did.
    """

    joined: int
    evaluations: int = 0
    left: str = ""


@dataclasses.dataclass(eq=False)
class Worker:
    """A worker that builds the run or has built it.

    Attributes:
      name: Its name.
      actor: Its `Replica`, as the engine has it.
      step: The number of steps that it has taken.
      asked: The time at which it was asked; infinite if it is idle.
      until: The time at which it is late; at once while it builds.
      members: The members of this step that it evaluates.
    """

    name: str
    actor: Any = None
    step: int = 0
    asked: float = -np.inf
    until: float = -np.inf
    members: list[int] = dataclasses.field(default_factory=list)


class Fleet:
    """The workers of a run, and what they compute in its current step.

    Attributes:
      run: The `Description` of the run by the first worker; `None` before.
      records: The steps so far, to which the driver adds.
      numbers: The numbers of steps, by step.
      failures: The counts of `Failures` before the current step.
      values: The values of the current step, [n].
      reports: The part of each worker by name, also of those that left.
    """

    def __init__(self, engine: Any, given: Any, size: int, timeout: float, ends: Any):
        """Begins without workers.

        Args:
          engine: Holds a `Replica` on each worker.
          given: The arguments of a `Replica`.
          size: Number of members that a worker evaluates together.
          timeout: Seconds after which a worker without an answer is dropped.
          ends: Called to know whether the run is interrupted.
        """
        self.run: Any = None
        self.values = np.zeros(0)
        self.numbers: dict[int, np.ndarray] = {}
        self.reports: dict[str, WorkerReport] = {}
        self._engine, self._given = engine, given
        self._size, self._timeout, self._ends = size, timeout, ends
        self._inbox: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._alive_at = self._look_at = time.monotonic()
        self._workers: dict[str, Worker] = {}
        # Names; the failures of those that were there from the beginning end the run.
        self._left_out, self._initial = set[str](), set[str]()
        self._seconds = np.inf  # Duration of the last batch; of a build before.
        self._why = ""  # For which the last worker left.
        self._owners: dict[int, str] = {}  # Of the values of this step, by member.
        self._known: set[str] = set()  # Workers that have taken all steps.
        self._lost: list[int] = []  # The members of workers that were lost.
        self.resume([])

    def resume(self, records: list[Record]) -> None:
        """Begins after the steps of a journal."""
        self.records = records
        # Checksums, and who has them.
        self._sums = {x.step: (x.params, _JOURNAL) for x in records if x.params}
        failed = sum(int((~np.isfinite(x.values)).sum()) for x in records)
        self.failures: tuple[int, ...] = (failed, 0, 0)

    def evaluate(self, count: int) -> Record | None:
        """Returns the values of the next step, or `None` if it was interrupted.

        Without members, it waits for the checksums of all workers.

        Raises:
          RunError: If there are no workers, or they compute different parameters
            or values.
        """
        self.values = np.zeros(count, self.run.line["dtype"])
        self._owners, self._known, self._lost = {}, set(), []
        begun, step = time.monotonic(), len(self.records)

        def complete() -> bool:
            now = time.monotonic()
            waits = [w for w in self._workers.values() if w.asked <= now <= w.until]
            near = [w for w in waits if step - w.step <= _LAG]
            # Two must agree, if there are two: one may have other parameters.
            agree = count and len(self._known) > 1 and not any(w.members for w in near)
            enough = agree or (self._known and not near)
            return bool(enough) and len(self._owners) == count

        if not self.until(complete):
            return None
        values, seconds = self.values, time.monotonic() - begun
        failures = tuple(f"returned {x}" for x in values[~np.isfinite(values)])
        return Record(step, values, self._sums[step][0], seconds, failures)

    def params(self, fetches: bool) -> Any:
        """Returns the parameters after the last step, or `None` if interrupted."""
        for _ in range(_MOST_LOST):
            if not (self.evaluate(0) and fetches):
                return None
            for worker in [w for w in self._workers.values() if w.name in self._known]:
                try:
                    return self._engine.call(worker.actor, "params", self._timeout)
                except Exception as error:
                    self._lose(worker, f"gave no parameters: {error!r}")
        raise _ended(f"no worker gives params{self._why}.")

    def close(self) -> None:
        """Frees what the workers hold."""
        for freeing in [self._free(worker) for worker in self._workers.values()]:
            freeing.join(self._timeout)

    def until(self, done: Callable[[], bool]) -> bool:
        """Handles answers of workers until done; returns False if interrupted."""
        while not done():
            if self._ends():
                return False
            now = time.monotonic()
            if any(worker.asked > 0 for worker in self._workers.values()):
                self._alive_at = now  # Of a worker that has built the run.
            if now - self._alive_at > self._timeout and not self._workers:
                text = f"client must have workers; got none in {self._timeout:.3g} s"
                text += f"{self._why}. Start some, as by `dask worker ADDRESS`."
                raise _ended(text) if self.run else ValueError(text)
            if now >= self._look_at:
                self._look_at = np.inf
                self._begin(self._seen, self._engine.names)
            for worker in self._workers.values():
                if worker.until < now:
                    worker.members = []  # They go to others.
            self._give()
            with contextlib.suppress(queue.Empty):
                then, outcome = self._inbox.get(timeout=_POLL)
                while True:  # All that is there, before members are given again.
                    then(outcome)
                    then, outcome = self._inbox.get_nowait()
        return True

    def _begin(self, then: Callable, call: Callable, *args: object) -> threading.Thread:
        """Calls a function in a thread, and `then` with what it returns or raises."""

        def run() -> None:
            try:
                self._inbox.put((then, call(*args)))
            except Exception as error:
                self._inbox.put((then, error))

        # A daemon: the interpreter exits even if it hangs.
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    # --- Workers ------------------------------------------------------------------

    def _seen(self, names: set[str] | Exception) -> None:
        """Begins with workers that are new, and lets those go that are not there."""
        if isinstance(names, Exception):
            raise _ended(f"client has lost its scheduler: {names!r}.")
        self._look_at = time.monotonic() + _LOOK
        self._initial |= set() if self.run else names
        for name in self._workers.keys() - names:
            self._lose(self._workers[name], "died")
        for name in names - self._workers.keys() - self._left_out:
            worker = self._workers[name] = Worker(name)
            then = functools.partial(self._joined, worker, time.monotonic())
            self._begin(then, self._build, worker)

    def _build(self, worker: Worker) -> Description | str:
        """Builds the run on a worker, which describes it."""
        worker.actor = self._engine.build(worker.name, self._given, self._timeout)
        return self._engine.call(worker.actor, "describe", self._timeout)

    def _joined(self, worker: Worker, begun: float, found: object) -> None:
        """Begins to use a worker that has built the run."""
        name, hangs = worker.name, isinstance(found, TimeoutError)
        if self._workers.get(name) is not worker:
            return  # It was lost before.
        problem = found if isinstance(found, str) else repr(found)
        if hangs:
            problem = f"it has not built the run in {self._timeout:.3g} s (timeout)."
            self._initial -= {name} if self.run else set()  # The others continue.
        elif isinstance(found, self._engine.died):  # If it is alive, it is asked again.
            self._lose(worker, f"died while it built the run: {problem:.300}")
            return
        elif isinstance(found, Description):
            self.run = self.run or found
            problem = self._difference(found)
        if problem:
            self._leave_out(worker, problem)
        else:
            self._initial.discard(name)
            self.reports.setdefault(name, WorkerReport(len(self.records)))
            # It has compiled, and evaluated a batch: nobody is late before that.
            self._seconds = min(self._seconds, time.monotonic() - begun)
            worker.asked = np.inf

    def _difference(self, built: Description) -> str:
        """Returns a text if a worker has built another run than the first worker."""
        first = next(iter(self.reports), "")
        for name, got in built.line.items():
            if name != "device" and got != (wanted := self.run.line[name]):
                return f"{name} is {got}; on {first} it is {wanted}."
        if not self._same(got := built.value, wanted := self.run.value):
            return f"the first value is {got:.9g}; on {first} it is {wanted:.9g}."
        return ""

    def _same(self, value: np.floating, other: np.floating) -> bool:
        """Returns whether two values at a point are of the same function."""
        near, begun = trees.rounding(value), np.abs(self.run.value)
        # Terms of the loss are rounded as if they were as large as at the start.
        least = near * np.nan_to_num(begun, posinf=0)
        return bool(np.isclose(value, other, near, least, equal_nan=True))

    def _leave_out(self, worker: Worker, reason: str) -> None:
        """Lets a worker not join again; raises if that ends the run."""
        text = f"make_fun must build the run on all workers; on {worker.name}, {reason}"
        self._lose(worker, reason)
        self._left_out.add(worker.name)
        if worker.name in self._initial:
            raise ValueError(text)
        checks.warn(f"worker {worker.name} is left out: {text}")
        if not self._workers:
            raise _ended(text)

    def _lose(self, worker: Worker, reason: str) -> None:
        """Lets a worker go, and its members to others."""
        if worker.name in self.reports:
            self.reports[worker.name].left = reason
        del self._workers[worker.name]
        self._free(worker)
        self._why = f"; the last one, {worker.name}, {reason}"
        self._lost += worker.members
        if max(map(self._lost.count, worker.members), default=0) >= _MOST_LOST:
            raise _ended(f"a point has lost {_MOST_LOST} workers{self._why}.")

    def _free(self, worker: Worker) -> threading.Thread:
        return self._begin(lambda outcome: None, self._engine.free, worker.actor)

    # --- Steps --------------------------------------------------------------------

    def _give(self) -> None:
        """Sends idle workers the steps that they lack, and shares of the members."""
        step = len(self.records)
        idle = [w for w in self._workers.values() if w.asked == np.inf]
        ready = [worker for worker in idle if step - worker.step <= _LAG]
        shares = dict(zip(ready, self._shares(ready), strict=True))
        for worker in idle:
            members = shares.get(worker, [])
            if not members and worker.name in self._known:
                continue
            # As many steps as a message has.
            part = self.records[worker.step : worker.step + _CHUNK]
            values = np.array([record.values for record in part])
            expected = self._seconds * max(-(-len(members) // self._size), 1)
            worker.members, worker.asked = members, time.monotonic()
            worker.until = worker.asked + _LATE * expected + _GRACE
            then = functools.partial(self._answered, worker, members)
            args = worker.step, values, np.array(members, np.int32)
            limit = self._timeout + expected * max(len(part), 1)
            self._begin(then, self._engine.call, worker.actor, "answer", limit, *args)

    def _shares(self, ready: list[Worker]) -> list[list[int]]:
        """Returns members that nobody evaluates, in whole batches, for each worker."""
        count, workers = len(self.values), self._workers.values()
        given = self._owners.keys() | {i for w in workers for i in w.members}
        todo = [i for i in range(count) if i not in given]
        share = self._size * -(-len(todo) // (self._size * max(len(ready), 1)))
        shares = [todo[share * i :][:share] for i in range(len(ready))]
        turn, last = divmod(len(self.records), _CHECKED)
        if last == 0 and 0 < len(todo) == count and len(ready) > 1:
            member, i = turn % count, turn % len(ready)
            shares[(i + (member in shares[i])) % len(ready)].append(member)
        return shares

    def _answered(self, worker: Worker, members: list[int], reply: object) -> None:
        """Takes the values and the checksums of a worker."""
        name, records = worker.name, self.records
        if self._workers.get(name) is not worker:
            return  # It was lost before.
        if isinstance(reply, str):
            self._leave_out(worker, reply)
            return
        if not isinstance(reply, Reply):
            hangs = isinstance(reply, TimeoutError)
            reason = "gave no answer in time" if hangs else "died"
            self._lose(worker, f"{reason}: {reply!r:.300}")
            return
        elapsed, first = time.monotonic() - worker.asked, worker.step
        worker.asked, worker.members = np.inf, []
        worker.step += len(reply.numbers)
        self.reports[name].evaluations += len(members)
        if members:
            batch = elapsed / -(-len(members) // self._size)
            self._seconds = min(batch, 2 * self._seconds)  # One of them may have hung.
        self.numbers |= dict(enumerate(reply.numbers, first))
        for step, checksum in enumerate(reply.checksums, first):
            self._compare(name, step, checksum)
        if worker.step == len(records):
            self.failures = reply.failures
            self._known.add(name)
            for i, value in zip(members, reply.values, strict=True):
                owner = self._owners.setdefault(i, name)  # The first value counts.
                if owner == name:
                    self.values[i] = value
                elif not self._same(value, other := self.values[i]):
                    raise _ended(
                        "make_fun must build the same function on all workers; at "
                        f"point {i} of step {worker.step}, {owner} has the value "
                        f"{other:.9g}, and {name} has {value:.9g}."
                    )

    def _compare(self, name: str, step: int, checksum: int) -> None:
        """Raises if a worker has other parameters before a step than the run."""
        known, owner = self._sums.setdefault(step, (checksum, name))
        if known != checksum:
            text = (
                f"workers must compute the same parameters as {owner}; before step "
                f"{step}, it has the checksum {known:08x}, and {name} {checksum:08x}."
            )
            if owner != _JOURNAL:
                raise _ended(f"{text} Take workers with the same instruction set.")
            checks.warn(f"{text} The run continues from the values of the journal.")
            self._sums = {i: x for i, x in self._sums.items() if x[1] != _JOURNAL}
        self._sums[step] = checksum, name


def _ended(text: str) -> RunError:
    """Returns the error of a run that workers end."""
    return RunError(f"{text} The same call resumes the run from its journal, if any.")
