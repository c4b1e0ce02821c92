"""Measures `distribute`: kills, bytes, the driver, throughput, catching up, scale.

    python examples/research/benchmarks/workers.py --output docs/benchmarks/workers.json

Worker processes of Dask on this machine train a decoder. Each case is a row; `--only`
measures some of them, and `--resume` takes those that are there.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import distributed
import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from examples.apps.tpu import decoder
from examples.common import cli
from examples.common.record import collect
from radazo_jax._src.runs.journal import Record
from radazo_jax._src.workers.fleet import Fleet
from radazo_jax._src.workers.messages import Reply, Request
from radazo_jax._src.workers.replica import Description, Recipe, Replica

ROOT = Path(__file__).parents[3]
SIZES = decoder.Sizes(2, 32, 4, 64, 32, "float32")
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 32))
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
_BLOCK = 10  # Steps in a turn; the first one meets the data and threads of others.


def language_model() -> tuple[Any, Any]:
    """A decoder of 31,000 parameters, as each worker builds it."""
    params = jax.jit(lambda key: decoder.init(key, SIZES))(jax.random.key(0))
    return lambda params: decoder.loss_fn(params, TOKENS, SIZES.heads), params


def square(dimension: int) -> tuple[Any, Any]:
    return lambda x: jnp.sum(x**2), jnp.linspace(-1, 1, dimension)


def run_of(num_members: int, make_fun: Any = language_model) -> dict[str, Any]:
    return {
        "make_fun": make_fun,
        "params": None,
        "optimizer": zo.radazo(1e-3),
        "estimator": zo.forward_difference(zo.rademacher(), num_members - 1),
    }


# --- Worker processes ---------------------------------------------------------------


@contextlib.contextmanager
def scheduler(folder: Path) -> Iterator[tuple[distributed.Client, "Processes"]]:
    """A scheduler, and the means to start worker processes."""
    with distributed.LocalCluster(
        n_workers=0, dashboard_address=":0", silence_logs=100
    ) as cluster:
        processes = Processes(cluster.scheduler_address, folder)
        with distributed.Client(cluster) as client:
            try:
                yield client, processes
            finally:
                for process in processes.alive.values():
                    process.kill()


class Processes:
    """Worker processes without a nanny, by name; what they compile is kept."""

    def __init__(self, address: str, folder: Path):
        self.alive: dict[str, subprocess.Popen[bytes]] = {}
        self._address, self._count = address, 0
        self._environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": ONE_THREAD,
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def start(self, cpu: int | None = None) -> str:
        name, self._count = f"worker{self._count}", self._count + 1
        pinned = [] if cpu is None else ["taskset", "-c", str(cpu)]
        module = [sys.executable, "-m", "distributed.cli.dask_worker"]
        options = ["--no-nanny", "--nthreads", "1", "--name", name, "--no-dashboard"]
        self.alive[name] = subprocess.Popen(
            [*pinned, *module, self._address, *options],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return name

    def kill(self, name: str) -> None:
        process = self.alive.pop(name)
        process.kill()
        process.wait()


def serving(client: distributed.Client, names: Any) -> list[str]:
    """The workers that have built the run."""
    known = client.scheduler_info(n_workers=-1)["workers"]
    built = client.run(serves, on_error="ignore")
    found = {known[x]["name"] for x in known if built.get(x)}
    return [name for name in names if name in found]


def serves(dask_worker: Any) -> bool:
    """Whether a worker has built the run."""
    return "radazo_jax_step" in dask_worker.handlers


def slowed(process: subprocess.Popen[bytes], stop: threading.Event) -> None:
    """Stops a process for nine tenths of the time."""
    while not stop.is_set() and process.poll() is None:
        for what, seconds in ((signal.SIGSTOP, 0.045), (signal.SIGCONT, 0.005)):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(what)
            time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)


def kills(num_workers: int, num_steps: int, num_kills: int) -> dict[str, Any]:
    """Compares parameters after random kills and joins with a run of one process."""
    run, rng = run_of(16), random.Random(0)
    steps = [sorted(rng.sample(range(2, num_steps - 2), num_kills)) for _ in range(2)]
    kill_at, join_at = steps
    stop, killed, joined = threading.Event(), 0, 0
    with tempfile.TemporaryDirectory() as name, scheduler(Path(name)) as found:
        client, processes = found
        first = [processes.start() for _ in range(num_workers)]
        client.wait_for_workers(num_workers)
        slow = processes.alive[first[0]]
        thread = threading.Thread(target=slowed, args=(slow, stop))
        thread.start()

        def callback(step: int, values: Any) -> None:
            nonlocal killed, joined
            while joined < num_kills and join_at[joined] <= step:
                processes.start()
                joined += 1
            while killed < num_kills and kill_at[killed] <= step:
                others = [x for x in processes.alive if x != first[0]]
                # Waits for one that is in the run, and that is not the slow one.
                while not (candidates := serving(client, others)):
                    time.sleep(0.2)
                processes.kill(rng.choice(candidates))
                killed += 1

        path = Path(name) / "run.jsonl"
        result = zo.distribute(
            **run,
            client=client,
            num_steps=num_steps,
            journal=path,
            progress=False,
            callback=callback,
        )
        stop.set()
        thread.join()
        lines = len(path.read_bytes().splitlines())
    expected = of_one_process(run, num_steps)
    same = jax.tree.map(np.array_equal, result.params, expected)
    died = sum("died" in x.left for x in result.workers.values())
    return {
        "steps": num_steps,
        "workers": num_workers,
        "kills": killed,
        "joins": joined,
        "died_during_the_run": died,
        "took_part": sum(x.evaluations > 0 for x in result.workers.values()),
        "failed": int(result.failures.evaluations),
        "lines": lines,
        "bitwise_equal": "yes" if all(jax.tree.leaves(same)) else "no",
    }


def of_one_process(run: dict[str, Any], num_steps: int) -> Any:
    """The parameters of a loop over the points, one by one."""
    replica = replica_of(run)
    n = replica.describe().line["points"]
    none = np.zeros((0, n), np.float32)
    empty = np.zeros(0, np.uint32)
    reply = replica.answer(Request(0, 0, none, empty, np.zeros(0, np.uint16)))
    for step in range(num_steps):
        values = replica.evaluate(np.arange(n, dtype=np.uint16))
        sums = np.array([reply.checksum], np.uint32)
        reply = replica.answer(
            Request(0, step, values[None], sums, np.zeros(0, np.uint16))
        )
    return replica.params()


def replica_of(run: dict[str, Any]) -> Replica:
    return Replica(recipe_of(run))


def recipe_of(run: dict[str, Any]) -> Recipe:
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    return Recipe(**run, sample=None, bounds=None, batch_size=1, key=key)


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
            callback=lambda *_: counted.append(traffic(client)),
        )
        (address,) = result.workers
        payload = Request(
            0,
            5,
            np.zeros((1, num_members), np.float32),
            np.zeros(1, np.uint32),
            np.zeros(num_members, np.uint16),
        )
        steps = np.diff([x[address] for x in counted[2:]], axis=0).mean(axis=0)
    return {
        "d": dimension,
        "members": num_members,
        "sent_bytes": float(steps[0]),
        "of_which_payload": len(payload.encode()),
        "received_bytes": float(steps[1]),
        "allowed_bytes": 8 * num_members + 200,
    }


# --- Time ---------------------------------------------------------------------------


def driver(num_workers: int, num_members: int) -> dict[str, Any]:
    """The time of the driver's thread for a step, with workers that answer at once."""
    messenger = Simulated(num_workers, num_members, 0.0, 0.0, 0.0)
    fleet = Fleet(messenger, recipe_of(run_of(num_members)), 0, 1e9)
    seconds: list[float] = []

    async def steps() -> None:
        await fleet.start(lambda: False)
        await asyncio.sleep(0.01)
        for step in range(200):
            start = time.thread_time()
            found = await fleet.evaluate(lambda: False)
            assert found is not None
            fleet.records.append(Record(step, found.values, 0, 0.0))
            seconds.append(time.thread_time() - start)
        await fleet.close()

    asyncio.run(steps())
    median = 1e3 * statistics.median(seconds[20:])
    return {"workers": num_workers, "members": num_members, "driver_ms": median}


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
        seconds: dict[str, list[float]] = {name: [] for name in ("workers", *alone)}
        block: list[float] = []
        last, together = time.perf_counter(), 0

        def callback(step: int, values: Any) -> bool:
            nonlocal last, together
            # The second worker is ready later than the first, and then catches up.
            if together or (step % 10 == 0 and all(client.run(serves).values())):
                together += 1
            if together > 100:
                block.append(time.perf_counter() - last)
            if len(block) == _BLOCK:
                # By turns, so that all meet the same load of the machine.
                seconds["workers"].append(statistics.median(block[1:]))
                for name, step_of in alone.items():
                    seconds[name].append(statistics.median(timed(step_of)[1:]))
                block.clear()
            last = time.perf_counter()
            return len(seconds["workers"]) == num_blocks

        result = zo.distribute(
            **run,
            client=client,
            num_steps=10**5,
            batch_size=batch_size,
            progress=False,
            callback=callback,
        )
    shares = [x.evaluations for x in result.workers.values()]
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


def batches(batch_size: int) -> dict[str, Any]:
    """The processor time in which a worker evaluates whole batches, and two more."""
    replica = Replica(recipe_of(run_of(64))._replace(batch_size=batch_size))
    replica.describe()

    def milliseconds(num_points: int) -> float:
        seconds, members = [], np.arange(num_points, dtype=np.uint16)
        for _ in range(20):
            start = time.process_time()
            replica.evaluate(members)
            seconds.append(time.process_time() - start)
        return 1e3 * statistics.median(seconds)

    sizes = {"half_ms": 32, "two_more_ms": 34, "all_ms": 64}
    times = {name: milliseconds(size) for name, size in sizes.items()}
    return {"batch_size": batch_size} | times


def steps_of(run: dict[str, Any], batch_size: int | None) -> Callable[[], None]:
    """Steps of one program, which has been compiled."""
    fun, params = run["make_fun"]()
    evaluator = zo.vectorized(batch_size)
    init, step = zo.solver(fun, run["optimizer"], run["estimator"], evaluator)
    compiled = jax.jit(step)
    state = init(params, 0)

    def take() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(compiled(state))

    take()
    return take


def catch_up(num_steps: int) -> dict[str, Any]:
    """Compares taking the steps of a journal with a copy of another state."""
    run = run_of(16)
    ahead, late = replica_of(run), replica_of(run)
    values = np.ones((num_steps, ahead.describe().line["points"]), np.float32)
    values += np.random.default_rng(0).normal(size=values.shape).astype(np.float32) / 99
    late.describe()
    none = np.zeros(0, np.uint16)
    # The checksums come from the first of the two.
    state, sums = ahead._state, []
    assert state is not None
    from radazo_jax._src.runs import ask_tell

    total = ask_tell.checksum_of(state.params)
    for row in values:
        sums.append(int(total))
        state, _, total = ahead._tell(state, row)
    ahead._state = state
    start = time.perf_counter()
    for first in range(0, num_steps, 4096):
        part = slice(first, first + 4096)
        checksums = np.array(sums[part], np.uint32)
        reply = late.answer(Request(0, first, values[part], checksums, none))
        assert not reply.drifted
    replayed = time.perf_counter() - start
    start = time.perf_counter()
    leaves = ahead.leaves()
    copied = late.copy(leaves)
    assert copied.step == num_steps
    return {
        "steps": num_steps,
        "replay_s": replayed,
        "copy_s": time.perf_counter() - start,
        "message_MB": values.nbytes / 1e6,
        "state_MB": sum(x.nbytes for x in leaves) / 1e6,
    }


# --- Simulation ---------------------------------------------------------------------


class Clock(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its time jumps to the next event."""

    jumped = 0.0

    def __init__(self) -> None:
        super().__init__()
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            self.jumped += timeout or 0.0
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.jumped


class Simulated:
    """Workers that take the time of their evaluations, and die at random."""

    def __init__(
        self,
        num_workers: int,
        num_members: int,
        evaluation: float,
        message: float,
        deaths_per_second: float,
    ):
        self._alive = {f"w{i}": 1.0 for i in range(num_workers)}
        self._evaluation, self._message = evaluation, message
        self._deaths, self._count = deaths_per_second, num_workers
        self._steps: dict[str, int] = {}
        self._rng = random.Random(0)
        line = {"points": num_members, "dtype": "float32"}
        self._description = Description(line, (), 10**6, max(evaluation, 1e-4), 1e-3)
        self.died = 0

    async def addresses(self) -> list[str]:
        return list(self._alive)

    async def install(self, address: str, run: int, recipe: Any) -> Description:
        # Those that come later read a checkpoint and compile.
        await asyncio.sleep(10.0 if int(address[1:]) >= self._count else 0.0)
        self._steps.setdefault(address, 0)
        return self._description

    async def ask(self, address: str, request: Request) -> Reply:
        members = len(request.members)
        # The speeds of workers differ by a twentieth from step to step.
        noise = max(self._rng.gauss(1.0, 0.05), 0.5)
        seconds = self._message + members * self._evaluation * noise
        if self._rng.random() < self._deaths * seconds:
            await asyncio.sleep(seconds / 2)
            del self._alive[address]
            self.died += 1
            self._alive[f"w{self._count + self.died}"] = 1.0
            raise OSError("connection closed")
        await asyncio.sleep(seconds)
        self._steps[address] = request.first + len(request.values)
        none = np.zeros((0, 0), np.float32)
        values = np.ones(members, np.float32)
        step = self._steps[address]
        return Reply(step, 0, (0, 0, 0), self._evaluation, 1e-3, none, values)

    async def copy(self, address: str, run: int, peer: str) -> Reply:
        none = np.zeros((0, 0), np.float32)
        step = self._steps[address] = self._steps[peer]
        return Reply(step, 0, (0, 0, 0), 0.0, 1e-3, none, none.ravel())

    async def params(self, address: str, run: int) -> Any:
        return None

    async def close(self, address: str, run: int) -> None:
        pass


def simulation(num_workers: int, evaluation: float, message: float) -> dict[str, Any]:
    """The share of the workers' time that is spent on evaluations that are used."""
    members, steps = 4 * num_workers, 20
    deaths = 0.01 / 60
    messenger = Simulated(num_workers, members, evaluation, message, deaths)
    fleet = Fleet(messenger, recipe_of(run_of(members)), 0, 60.0)
    loop, ends = Clock(), [0.0]
    spent = 0.0

    async def run() -> None:
        nonlocal spent
        await fleet.start(lambda: False)
        await asyncio.sleep(1.0)
        ends[0] = loop.time()
        for step in range(steps):
            start = time.thread_time()
            found = await fleet.evaluate(lambda: False)
            spent += time.thread_time() - start
            assert found is not None
            fleet.records.append(Record(step, found.values, 0, 0.0))
            ends.append(loop.time())
        await fleet.close()

    loop.run_until_complete(run())
    # The driver works before and after the workers do.
    seconds = ends[-1] - ends[0] + spent
    return {
        "workers": num_workers,
        "evaluation_s": evaluation,
        "message_ms": 1e3 * message,
        "steps": steps,
        "died": messenger.died,
        "driver_ms": 1e3 * spent / steps,
        "efficiency": steps * members * evaluation / num_workers / seconds,
    }


CASES: dict[str, Any] = {
    "driver 8": lambda: driver(8, 64),
    "driver 64": lambda: driver(64, 64),
    "wire 1e4 64": lambda: wire(10**4, 64),
    "wire 1e4 16": lambda: wire(10**4, 16),
    "wire 1e7 16": lambda: wire(10**7, 16),
    "catch_up": lambda: catch_up(10_000),
    "batches 1": lambda: batches(1),
    "batches 8": lambda: batches(8),
    "batches 32": lambda: batches(32),
    "throughput 1": lambda: throughput(1),
    "throughput 8": lambda: throughput(8),
    "throughput 32": lambda: throughput(32),
    "simulation 1": lambda: simulation(1000, 1.0, 2e-3),
    "simulation 10": lambda: simulation(1000, 10.0, 2e-3),
    "kills": lambda: kills(8, 500, 40),
}


def main() -> None:
    parser = cli.parser(__doc__)
    cli.add_record(parser, resume=True)
    tables = sorted({name.split()[0] for name in CASES})
    parser.add_argument("--only", nargs="+", choices=tables, default=tables)
    args = parser.parse_args()
    cases = [
        ({"case": name, "table": name.split()[0]}, measure)
        for name, measure in CASES.items()
        if name.split()[0] in args.only
    ]
    collect(args.output, args.resume, cases, lambda rows: rows)


if __name__ == "__main__":
    main()
