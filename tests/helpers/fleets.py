"""Fleets of workers in the test process: real runs, and messages that can fail."""

import asyncio
import threading
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from radazo_jax._src.runs.journal import Journal
from radazo_jax._src.runs.stop import Budget
from radazo_jax._src.steps.states import Policy
from radazo_jax._src.workers.distribute import Driver
from radazo_jax._src.workers.messages import Request, decode, encode
from radazo_jax._src.workers.replica import Recipe, Replica
from tests.helpers.compare import Hashed
from tests.helpers.short_runs import traced

PARAMS = {"w": np.full((6, 4), 0.25, np.float32), "b": np.zeros(4, np.float32)}
INPUTS = np.linspace(-1, 1, 18, dtype=np.float32).reshape(3, 6)
ESTIMATOR = zo.forward_difference(Hashed(), 4)
OPTIMIZER = zo.zo_sgd(1e-2)
STEPS = 12


def loss(params):
    return jnp.mean((jnp.tanh(INPUTS @ params["w"]) + params["b"][None] - 0.5) ** 2)


def make_fun():
    return loss


class Here:
    """A `Cluster` of workers in this process.

    Attributes:
      alive: The addresses of the workers.
      replicas: Their runs, by address.
      before: Called with an address and a request before each answer.
      change: Called with an address and a description, which it returns.
      sent: The sizes of the requests, by address.
    """

    def __init__(self, addresses=("a", "b", "c")):
        self.alive = set(addresses)
        self.replicas = {}
        self.before = lambda address, request: None
        self.change = lambda address, description: description
        self.copied = []
        self.sent = {}

    def start(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def stop(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def sync(self, function, *args):
        return asyncio.run_coroutine_threadsafe(function(*args), self.loop).result()

    async def addresses(self):
        return sorted(self.alive)

    async def install(self, address, run, recipe):
        try:
            replica = Replica(recipe)
            description = replica.describe()
        except Exception as error:
            return f"Traceback: {error}"
        self.replicas[address] = replica
        return self.change(address, description)

    async def ask(self, address, request):
        message = encode(request)
        self.sent.setdefault(address, []).append(len(message))
        if address not in self.alive:
            self.replicas.pop(address, None)
            raise OSError("connection closed")
        request = decode(message)
        if (waits := self.before(address, request)) is not None:
            await waits
        return decode(encode(self.replicas[address].answer(request)))

    async def copy(self, address, run, peer):
        self.copied.append((address, peer))
        return self.replicas[address].copy(self.replicas[peer].leaves())

    async def params(self, address, run):
        return self.replicas[address].params()

    async def close(self, address, run):
        self.replicas.pop(address, None)


def trained(num_steps=3, fun=loss, estimator=ESTIMATOR):
    """The run of one process, by other programs."""
    return traced(fun, PARAMS, num_steps, (OPTIMIZER, estimator))


def recipe(
    *,
    make_fun=make_fun,
    params=PARAMS,
    optimizer=OPTIMIZER,
    estimator=ESTIMATOR,
    batch_size=1,
    sample=None,
):
    data = np.asarray(jax.random.key_data(jax.random.key(0)))
    return Recipe(
        *(make_fun, params, optimizer, estimator),
        *(sample, None, batch_size, data),
    )


def run(
    here,
    num_steps=STEPS,
    *,
    timeout=30.0,
    journal=None,
    callback=None,
    **changes,
):
    """`distribute` on workers of this process."""
    given = timeout, Budget(num_steps), Policy.of("drop", 10)
    driver = Driver(here, recipe(**changes), *given)
    here.start()
    try:
        return driver.run(journal, True, False, callback)
    finally:
        here.stop()


class Reference(NamedTuple):
    """A run of one process."""

    params: Any
    lines: list[Any]  # The step, the values and the checksum of each.
    failures: tuple[int, int, int]


def reference(num_steps=STEPS, **changes):
    """The same run of one process: a loop over its points, one by one."""
    replica = Replica(recipe(**changes))
    n = replica.describe().line["points"]
    lines, reply = [], replica.answer(message(0, ()))
    for step in range(num_steps):
        values = [replica.evaluate(np.array([i], np.int32))[0] for i in range(n)]
        lines.append((step, np.array(values), reply.checksum))
        reply = replica.answer(message(step, [lines[-1]]))
    return Reference(replica.params(), lines, reply.failures)


def message(first, lines, members=()):
    """A request to take the steps of some lines."""
    values = np.array([line[1] for line in lines], np.float32)
    return Request(
        0,
        first,
        values.reshape(len(lines), -1) if lines else np.zeros((0, 0), np.float32),
        np.array([line[2] for line in lines], np.uint32),
        np.array(members, np.int32),
    )


def assert_same(result, expected):
    """The parameters and all values, bit for bit."""
    chex.assert_trees_all_equal(result.params, expected.params)
    assert len(result.values) == len(expected.lines)
    chex.assert_trees_all_equal(tuple(result.state.failures), expected.failures)


def assert_same_lines(path, expected):
    """The values and checksums of a journal."""
    found = Journal(path).read().records
    assert [x.params for x in found] == [line[2] for line in expected.lines]
    np.testing.assert_array_equal(
        [x.values for x in found], [line[1] for line in expected.lines]
    )
