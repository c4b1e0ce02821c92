"""Measures `distribute`: bytes of a step, throughput, and a run with kills.

    python -m benchmarks.workers --output records/benchmarks/workers.json

Worker processes of Dask on this machine train a decoder. Each case is a row; `--only`
measures some of them, and `--resume` takes those that are there.
"""

import contextlib
import random
import signal
import socket
import statistics
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import distributed
import jax
import numpy as np

import radazo_jax as zo
from benchmarks.worker_processes import (
    Processes,
    run_of,
    scheduler,
    serves,
    serving,
    square,
)
from common import options
from common.record import collect

_BLOCK = 10  # Steps in a turn; the first one meets the data and threads of others.


# --- Kills --------------------------------------------------------------------------


def _slowed(process: subprocess.Popen[bytes], stop: threading.Event) -> None:
    """Stops a process for nine tenths of the time."""
    while not stop.is_set() and process.poll() is None:
        for what, seconds in ((signal.SIGSTOP, 0.045), (signal.SIGCONT, 0.005)):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(what)
            time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def slowed(process: subprocess.Popen[bytes]) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=_slowed, args=(process, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Disturbance:
    """Starts and kills workers at random steps, called after each step.

    Attributes:
      killed: The number of workers that were killed.
      joined: The number of workers that were started during the run.
    """

    def __init__(
        self,
        client: distributed.Client,
        processes: Processes,
        spared: str,
        num_steps: int,
        num_kills: int,
    ):
        self.killed = self.joined = 0
        self._client, self._processes, self._spared = client, processes, spared
        self._rng = random.Random(0)
        self._kill_at, self._join_at = (
            sorted(self._rng.sample(range(2, num_steps - 2), num_kills))
            for _ in range(2)
        )

    def __call__(self, report: zo.runs.Report) -> None:
        step = report.step
        while self.joined < len(self._join_at) and self._join_at[self.joined] <= step:
            self._processes.start()
            self.joined += 1
        while self.killed < len(self._kill_at) and self._kill_at[self.killed] <= step:
            self._processes.kill(self._rng.choice(self._candidates()))
            self.killed += 1

    def _candidates(self) -> list[str]:
        """Workers that are in the run; waits until there is one."""
        others = [x for x in self._processes.alive if x != self._spared]
        while not (candidates := serving(self._client, others)):
            time.sleep(0.2)
        return candidates


def kills(num_workers: int, num_steps: int, num_kills: int) -> dict[str, Any]:
    """Compares parameters after random kills and joins with an undisturbed run."""
    run = run_of(16)
    with tempfile.TemporaryDirectory() as name, scheduler(Path(name)) as found:
        client, processes = found
        first = [processes.start() for _ in range(num_workers)]
        client.wait_for_workers(num_workers)
        disturb = Disturbance(client, processes, first[0], num_steps, num_kills)
        path = Path(name) / "run.jsonl"
        with slowed(processes.alive[first[0]]):
            result = zo.distribute(
                **run,
                client=client,
                num_steps=num_steps,
                journal=path,
                progress=False,
                callback=disturb,
            )
        lines = len(path.read_bytes().splitlines())
    same = jax.tree.map(np.array_equal, result.params, undisturbed(run, num_steps))
    died = sum("died" in x.left for x in result.workers.values())
    return {
        "steps": num_steps,
        "workers": num_workers,
        "kills": disturb.killed,
        "joins": disturb.joined,
        "died_during_the_run": died,
        "took_part": sum(x.evaluations > 0 for x in result.workers.values()),
        "failed": int(result.state.failures.evaluations),
        "lines": lines,
        "bitwise_equal": "yes" if all(jax.tree.leaves(same)) else "no",
    }


def undisturbed(run: dict[str, Any], num_steps: int) -> Any:
    """The parameters of a run on one worker."""
    with tempfile.TemporaryDirectory() as name, scheduler(Path(name)) as found:
        client, processes = found
        processes.start()
        client.wait_for_workers(1)
        result = zo.distribute(
            **run, client=client, num_steps=num_steps, progress=False
        )
    return result.params


# --- Messages -----------------------------------------------------------------------


def traffic(client: distributed.Client) -> dict[str, np.ndarray]:
    """The bytes sent and received, by address, as Linux counts them."""
    found: dict[str, np.ndarray] = {}
    for group in (client.rpc.available, client.rpc.occupied):
        for address, comms in group.items():
            for comm in comms:
                info = comm.stream.socket.getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_INFO, 136
                )
                counts = np.array(struct.unpack_from("<QQ", info, 120))
                found[address] = found.get(address, 0) + counts
    return found


def wire(dimension: int, num_members: int) -> dict[str, Any]:
    """Bytes per step between the driver and a worker that evaluates all members."""
    counted: list[dict[str, np.ndarray]] = []
    with tempfile.TemporaryDirectory() as name, scheduler(Path(name)) as found:
        client, processes = found
        processes.start()
        client.wait_for_workers(1)
        result = zo.distribute(
            **run_of(num_members, lambda: square(dimension)),
            client=client,
            num_steps=6,
            progress=False,
            callback=lambda report: counted.append(traffic(client)),
        )
        (address,) = result.workers
    steps = np.diff([x[address] for x in counted[2:]], axis=0).mean(axis=0)
    return {
        "d": dimension,
        "members": num_members,
        "sent_bytes": float(steps[0]),
        "received_bytes": float(steps[1]),
        "allowed_bytes": 8 * num_members + 1000,
    }


# --- Throughput ---------------------------------------------------------------------


class Turns:
    """Times the steps of workers and of other programs by turns, in blocks.

    All meet the same load of the machine. It is called after each step of the workers.

    Attributes:
      seconds: The median time of a step in each block, by name.
    """

    def __init__(
        self,
        client: distributed.Client,
        alone: dict[str, Callable[[], None]],
        num_blocks: int,
    ):
        self.seconds: dict[str, list[float]] = {n: [] for n in ("workers", *alone)}
        self._client, self._alone, self._num_blocks = client, alone, num_blocks
        self._block: list[float] = []
        self._last, self._together = time.perf_counter(), 0

    def __call__(self, report: zo.runs.Report) -> bool:
        # The second worker is ready later than the first, and then catches up.
        if self._together or (
            report.step % 10 == 1 and all(self._client.run(serves).values())
        ):
            self._together += 1
        if self._together > 100:
            self._block.append(time.perf_counter() - self._last)
        if len(self._block) == _BLOCK:
            self.seconds["workers"].append(statistics.median(self._block[1:]))
            for name, step_of in self._alone.items():
                self.seconds[name].append(statistics.median(timed(step_of)[1:]))
            self._block.clear()
        self._last = time.perf_counter()
        return len(self.seconds["workers"]) == self._num_blocks


def throughput(batch_size: int, num_blocks: int = 12) -> dict[str, Any]:
    """Compares two workers of a thread each with one process of two threads.

    The process takes the same steps in one program, its points one after another or
    all together, whichever is faster.
    """
    run = run_of(64)
    with tempfile.TemporaryDirectory() as name, scheduler(Path(name)) as found:
        client, processes = found
        for cpu in range(2):
            processes.start(cpu)
        client.wait_for_workers(2)
        sizes = {"one_by_one": 1, "by_eights": 8, "all_together": None}
        alone = {name: steps_of(run, size) for name, size in sizes.items()}
        turns = Turns(client, alone, num_blocks)
        result = zo.distribute(
            **run,
            client=client,
            num_steps=10**5,
            batch_size=batch_size,
            progress=False,
            callback=turns,
        )
    shares = [x.evaluations for x in result.workers.values()]
    seconds = turns.seconds
    best = min(alone, key=lambda name: statistics.median(seconds[name]))
    pairs = zip(seconds[best], seconds["workers"], strict=True)
    return {
        "batch_size": batch_size,
        **{f"{x}_ms": 1e3 * statistics.median(found) for x, found in seconds.items()},
        "one_process/two_workers": statistics.median(a / b for a, b in pairs),
        "least_share": min(shares) / sum(shares),
    }


def timed(step_of: Callable[[], None]) -> list[float]:
    """The durations of the steps of a block."""
    seconds = []
    for _ in range(_BLOCK):
        start = time.perf_counter()
        step_of()
        seconds.append(time.perf_counter() - start)
    return seconds


def steps_of(run: dict[str, Any], batch_size: int | None) -> Callable[[], None]:
    """Steps of one program, which has been compiled."""
    fun, params = run["make_fun"]()
    evaluator = zo.vectorized(batch_size)
    init, step = zo.solver(fun, run["optimizer"], run["estimator"], evaluator=evaluator)
    compiled = jax.jit(step)
    state = init(params, 0)

    def take() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(compiled(state))

    take()
    return take


CASES: dict[str, Any] = {
    "wire 1e4 64": lambda: wire(10**4, 64),
    "wire 1e4 16": lambda: wire(10**4, 16),
    "wire 1e7 16": lambda: wire(10**7, 16),
    "throughput 1": lambda: throughput(1),
    "throughput 8": lambda: throughput(8),
    "throughput 32": lambda: throughput(32),
    "kills": lambda: kills(8, 500, 40),
}


@options.command(__doc__)
@options.output
@options.resume
@options.some("--only", of=sorted({name.split()[0] for name in CASES}), text="Tables")
def main(output: Path | None, resume: bool, only: Sequence[str]) -> None:
    cases = [
        ({"case": name, "table": name.split()[0]}, measure)
        for name, measure in CASES.items()
        if name.split()[0] in only
    ]
    collect(output, resume, cases, lambda rows: rows)


if __name__ == "__main__":
    main()
