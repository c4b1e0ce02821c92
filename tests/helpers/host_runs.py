"""Functions and methods that the tests of runs on the host share."""

import warnings
from collections import Counter

import jax
import numpy as np

import radazo_jax as zo
from radazo_jax.methods import End

CENTER = np.array([1.0, -2.0, 0.5])
START = np.zeros(3)


def bowl(x):
    return float(np.sum((np.asarray(x, float) - CENTER) ** 2))


def ripples(x):
    return bowl(x) + float(np.sum(np.sin(9 * np.asarray(x, float)) ** 2))


def rosenbrock(x):
    return float(np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2))


def noisy(seed=0):
    """Draws noise at each call."""
    draws = np.random.default_rng(seed)
    return lambda x: bowl(x) + 0.1 * float(draws.standard_normal())


def random_search(size=4, steps=5):
    """The best of normal points around the best, `size` a step."""

    def method(start):
        best, lowest = start.params, np.inf
        for _ in range(steps):
            moves = start.rng.normal(size=(size, len(best)))
            points = start.round(start.box.clip(best + moves))
            values = yield points
            i = int(np.argmin(np.nan_to_num(values, nan=np.inf)))
            if values[i] < lowest:
                best, lowest = points[i], values[i]
        return End(best, lowest, "all steps were taken")

    return method


def repeating(start):
    """Asks for points twice in steps of seven, as a check for noise does."""
    best = start.params
    for _ in range(20):
        points = start.round(start.box.clip(best + start.rng.normal(size=(5, 3))))
        asked = np.concatenate([points, points[:2]])
        best = asked[np.argmin(np.nan_to_num((yield asked), nan=np.inf))]
    return End(best, 0.0, "all steps were taken")


METHODS = {
    "untuned": zo.methods.untuned(),
    "slopes": zo.methods.slopes(),
    "many": zo.methods.many(),
    "evolution": zo.methods.evolution(),
    "custom": random_search(steps=30),
    "repeating": repeating,
}


class Function:
    """A function of a point, and of how often it was evaluated before if it is noisy.

    Attributes:
      calls: The points of all calls, as bytes.
      counts: The number of evaluations of each point.
    """

    def __init__(self, noise=0.0, fails=False, dtype=float, fun=ripples):
        self.noise, self.fails, self.dtype, self.fun = noise, fails, dtype, fun
        self.calls, self.counts = [], Counter()

    def __call__(self, x):
        name = np.asarray(x, np.float64).tobytes()
        self.calls.append(name)
        count, self.counts[name] = self.counts[name], self.counts[name] + 1
        words = np.frombuffer(name, np.uint32)
        draw = np.random.default_rng([count, *words]).normal() if self.noise else 0.0
        fails = self.fails and bowl(x) % 1 < 0.2
        if self.fails == "by mistakes":  # Anywhere, so that ten in a row are rare.
            fails = False
            if words.sum() % 5 == 1:
                raise KeyError("mesh")
        return np.nan if fails else self.dtype(self.fun(x) + self.noise * draw)

    def continued(self, evaluations):
        """The same function of a process that finds these evaluations."""
        found = Function(self.noise, self.fails, self.dtype, self.fun)
        found.counts.update(x.tobytes() for x in evaluations.points)
        return found


def run(fun=bowl, method=METHODS["untuned"], start=START, **options):
    return zo.minimize(fun, start, method, **{"progress": False, **options})


def quiet(call, *args, **options):
    """A call whose warnings of a table are expected."""
    with warnings.catch_warnings():
        for text in ("of which the run used", "at which fun now", "was not complete"):
            warnings.filterwarnings("ignore", f".*{text}")
        warnings.filterwarnings("ignore", ".*failures after its last|fun failed at")
        return call(*args, **options)


def rows(evaluations, used=True):
    """The points and values that a run has used, in the order of their points."""
    found = [
        (x.point, x.repeat, np.array(x.value).tobytes())
        for x in evaluations.rows
        if x.is_used or not used
    ]
    return sorted(found)


def columns(history):
    names = "step", "value", "value_std", "evaluations", "failed"
    return repr([getattr(history, name).tolist() for name in names])


def assert_same(found, expected):
    """Two results with the same steps."""
    both = [(x.params, x.best.params) for x in (found, expected)]
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_array_equal(a, b)
    assert rows(found.evaluations) == rows(expected.evaluations)
    assert found.best[1:3] == expected.best[1:3]
    assert found.best.num_values == expected.best.num_values
    assert found.num_evaluations == expected.num_evaluations
    assert found[6:9] == expected[6:9]  # Why the run ended, and its stages.
    assert columns(found.history) == columns(expected.history)
