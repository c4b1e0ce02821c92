"""Fleets of workers in the test process: real runs, and calls that can fail."""

import contextlib
import pickle
import time
from typing import Any, NamedTuple
from unittest import mock

import chex
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from radazo_jax._src.runs.journal import Journal
from radazo_jax._src.workers import distribute
from radazo_jax._src.workers.fleet import Fleet
from radazo_jax._src.workers.replica import Replica
from tests.helpers.compare import Hashed
from tests.helpers.short_runs import traced

PARAMS = {"w": np.full((6, 4), 0.25, np.float32), "b": np.zeros(4, np.float32)}
INPUTS = np.linspace(-1, 1, 18, dtype=np.float32).reshape(3, 6)
ESTIMATOR = zo.forward_difference(Hashed(), 4)
OPTIMIZER = zo.zo_sgd(1e-2)
STEPS = 12
_RECIPES = []  # Their functions stay in this process.


def loss(params):
    return jnp.mean((jnp.tanh(INPUTS @ params["w"]) + params["b"][None] - 0.5) ** 2)


def make_fun():
    return loss


class _Kept(NamedTuple):
    """A recipe that is pickled by its place."""

    place: int

    def __reduce__(self):
        return _kept, (self.place,)


def _kept(place):
    return _RECIPES[place]


class Here:
    """An engine of workers in this process.

    Attributes:
      alive: The names of the workers.
      replicas: Their runs, by name.
      before: Called with a name and the arguments of `answer` before each answer;
        returns the seconds that it takes.
      change: Called with a name and a description, which it returns.
      slow: The seconds that other calls take, by worker and method.
      sent: The bytes of the requests, by name.
      freed: The replicas that were freed.
    """

    died = OSError

    def __init__(self, names="abc"):
        self.alive = set(names)
        self.replicas, self.sent, self.slow, self.freed = {}, {}, {}, []
        self.before = lambda name, first, values, members: 0
        self.change = lambda name, description: description

    def dumps(self, recipe):
        _RECIPES.append(recipe)
        return pickle.dumps(_Kept(len(_RECIPES) - 1))

    def names(self):
        return set(self.alive)

    def build(self, name, given, timeout):
        self.replicas[name] = Replica(*given)
        return name, self.replicas[name]

    def call(self, actor, method, timeout, *args):
        name, replica = actor
        seconds = self.slow.get((name, method), 0)
        if method == "answer":
            self.sent.setdefault(name, []).append(len(pickle.dumps(args)))
            seconds = self.before(name, *args) or 0
        time.sleep(min(seconds, timeout))
        if seconds >= timeout:
            raise TimeoutError
        if name not in self.alive or self.replicas.get(name) is not replica:
            raise OSError("connection reset")
        found = getattr(replica, method)(*args)
        is_built = method == "describe" and not isinstance(found, str)
        return self.change(name, found) if is_built else found

    def free(self, actor):
        self.freed.append(actor[1])


def trained(num_steps=3, fun=loss, estimator=ESTIMATOR):
    """The run of one process, by other programs."""
    return traced(fun, PARAMS, num_steps, (OPTIMIZER, estimator))


def run(here, num_steps=STEPS, **changes):
    """`distribute` on workers of this process."""
    given = {
        "make_fun": make_fun,
        "params": PARAMS,
        "optimizer": OPTIMIZER,
        "estimator": ESTIMATOR,
        "timeout": 30.0,
        "progress": False,
    }
    with mock.patch.object(distribute, "_engine", lambda client: client):
        return zo.distribute(**given | changes, client=here, num_steps=num_steps)


@contextlib.contextmanager
def shown():
    """Yields a list, into which the fleet of a run comes."""
    fleets = []

    def made(*args):
        fleets.append(Fleet(*args))
        return fleets[0]

    with mock.patch.object(distribute, "Fleet", made):
        yield fleets


def assert_soon(holds, seconds=10):
    for _ in range(20 * seconds):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError


class Reference(NamedTuple):
    """A run of one process."""

    params: Any
    lines: list[Any]  # The values and the checksum of each step.
    failures: tuple[int, int, int]


def reference(num_steps=STEPS, **changes):
    """The same run of one process: a loop over its points, one by one."""
    here = Here("a")
    run(here, 1, **changes)
    (given,) = {(x._versions, x._recipe) for x in here.replicas.values()}
    replica = Replica(*given)
    n, values = replica.describe().line["points"], []
    none = np.zeros(0, np.int32)
    lines, reply = [], replica.answer(0, np.zeros((0, 0)), none)
    for step in range(num_steps):
        values = [replica.evaluate(np.array([i], np.int32))[0] for i in range(n)]
        lines.append((np.array(values), int(reply.checksums[-1])))
        reply = replica.answer(step, np.array([values]), none)
    return Reference(replica.params(), lines, reply.failures)


def assert_same(result, expected):
    """The parameters and all values, bit for bit."""
    chex.assert_trees_all_equal(result.params, expected.params)
    assert len(result.values) == len(expected.lines)
    chex.assert_trees_all_equal(tuple(result.state.failures), expected.failures)


def assert_same_lines(path, expected):
    """The values and checksums of a journal."""
    found = Journal(path).read().records
    assert [x.params for x in found] == [checksum for _, checksum in expected.lines]
    np.testing.assert_array_equal(
        [x.values for x in found], [values for values, _ in expected.lines]
    )
