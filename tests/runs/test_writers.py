"""Functions that write to their arguments: a run reports the points it asked for."""

import copy
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.black_boxes import ESTIMATOR, OPTIMIZER, spawning
from tests.helpers.short_runs import called
from tests.helpers.tables import slow
from tests.helpers.workers import Writer

X = np.linspace(-1, 1, 6, dtype=np.float32)
STARTS = [
    X,
    {"a": [X, X[:4].reshape(2, 2)], "b": {"c": X[:3]}},
]
WRITERS = [
    (Writer(write), start) for write in ("scale", "sort", "empty") for start in STARTS
]


def run(fun, start, **options):
    options = {"progress": False, **options}
    return called(fun, start, OPTIMIZER, ESTIMATOR, num_steps=3, key=0, **options)


def pure(writer):
    return lambda params: writer(copy.deepcopy(params))


def check(writer, start, how):
    start = copy.deepcopy(start)
    result, expected = how(writer, start), run(pure(writer), start)
    assert result.best.value == expected.best.value
    assert result.best.value == pure(writer)(result.best.params)
    chex.assert_trees_all_equal(result.state, expected.state)


@pytest.mark.parametrize("how", ["in turn", "threads", slow("processes"), "batches"])
def test_a_run_equals_that_of_a_pure_function(how):
    def in_batches(writer, start):
        return run(writer.batched, start, batched=True)

    if how in ("in turn", "batches"):
        for writer, start in WRITERS:
            check(writer, start, run if how == "in turn" else in_batches)
        return
    with ThreadPoolExecutor(3) if how == "threads" else spawning() as pool:
        for writer, start in WRITERS:
            check(writer, start, lambda w, x: run(w, x, executor=pool))


def test_the_next_try_does_not_contain_the_writes_of_a_failed_one():
    def how(writer, start):
        calls = []

        def fun(params):
            value = writer(params)
            calls.append(value)
            if len(calls) % 3 == 1:
                raise OSError("no answer")
            return value

        return run(fun, start, retries=2)

    for writer, start in WRITERS:
        check(writer, start, how)


def test_candidates_belong_to_the_caller():
    """So does the start: the state of `ask_tell` is a copy of both."""
    writer, template = WRITERS[-1]
    states = []
    for writes in (False, True):
        # JAX may share the memory of some NumPy arrays, depending on their address.
        starts = [jax.tree.map(np.copy, template) for _ in range(30)]
        for start in starts:
            told = zo.ask_tell(start, OPTIMIZER, ESTIMATOR)
            if writes:
                jax.tree.map(lambda x: x.fill(9), start)
            chex.assert_trees_all_equal(told.params, template)
        for _ in range(3):
            candidates = told.ask()
            kept = jax.tree.map(np.copy, candidates)
            points = [jax.tree.map(lambda x, i=i: x[i], candidates) for i in range(4)]
            values = [(writer if writes else pure(writer))(point) for point in points]
            again = told.ask()
            told.tell(values)
            if writes:
                jax.tree.map(lambda x: x.fill(9), candidates)
            chex.assert_trees_all_equal(again, kept)
        states.append(told.state)
    chex.assert_trees_all_equal(*states)
