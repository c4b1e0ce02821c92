"""Both kinds of runs that call a Python function, as one function of its options."""

import chex
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers import host_runs, short_runs
from tests.helpers.calls import is_lost, square
from tests.helpers.compare import Hashed

METHOD = zo.zo_sgd(1e-2), zo.forward_difference(Hashed(), 4)
POPULATION = zo.zo_sgd(1e-2), zo.evolution_strategy(zo.rademacher(), population_size=6)


def searching(start):
    """The start, and then points around the best one, four a step."""
    yield start.params[None]
    return (yield from host_runs.random_search(steps=30)(start))


def by_method(fun=square, **options):
    given = {"method": searching, "start": np.ones(3), "max_evaluations": 17}
    return host_runs.run(fun, **given | options)


def by_optimizer(fun=square, **options):
    return short_runs.run(fun, **{"method": METHOD, **options})


def by_population(fun=square, **options):
    return short_runs.run(fun, method=POPULATION, key=1, **options)


EACH_DOOR = pytest.mark.parametrize("run", [by_method, by_optimizer])


def losing(lost):
    """A function that loses some points; the start has a value."""
    return lambda x: lost(x) if is_lost(x) else square(x)


def assert_same(found, expected):
    """Two results with the same steps."""
    for part in ("params", "state"):
        chex.assert_trees_all_equal(getattr(found, part), getattr(expected, part))
    chex.assert_trees_all_equal(found.best.params, expected.best.params)
    assert found.best[1:3] == expected.best[1:3]
    assert found.num_evaluations == expected.num_evaluations
    np.testing.assert_array_equal(found.values, expected.values)
    np.testing.assert_array_equal(found.history.failed, expected.history.failed)
