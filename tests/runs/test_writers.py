"""Functions that write to their arguments: a run reports the points it asked for."""

import functools
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.black_boxes import ESTIMATOR, OPTIMIZER, spawning
from tests.helpers.writers import Writer


def run(fun, start, steps=3, **options):
    options = {"progress": False, **options}
    return zo.minimize_black_box(fun, start, OPTIMIZER, ESTIMATOR, steps, 0, **options)


def check(seeds, how):
    for seed in seeds:
        writer = Writer(seed)
        result = how(writer, writer.start)
        assert result.best.number >= 0
        assert result.best.value == writer.pure(result.best.params), seed
        pure = run(writer.pure, writer.start)
        assert result.best.value == pure.best.value, seed
        chex.assert_trees_all_equal(result.state, pure.state)


def test_a_function_that_empties_its_argument():
    def fun(p):
        value = float(np.sum(p**2))
        p *= 0
        return value

    best = run(fun, np.ones(4, np.float32)).best
    assert best.value == float(np.sum(best.params**2)) > 0


def test_in_turn():
    check(range(100), run)


@pytest.mark.slow
def test_in_threads():
    with ThreadPoolExecutor(3) as pool:
        check(range(100), functools.partial(run, executor=pool))


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_in_processes(count):
    with spawning() as pool:
        check(range(count), functools.partial(run, executor=pool))


@pytest.mark.slow
def test_in_batches():
    def how(writer, start):
        return run(writer.batched, start, batched=True)

    check(range(100), how)


def test_in_retries():
    """The next try does not contain the writes of a failed one."""

    def how(writer, start):
        calls = []

        def fun(params):
            value = writer(params)
            calls.append(value)
            if len(calls) % 3 == 1:
                raise OSError("no answer")
            return value

        return run(fun, start, on_failure="retry")

    check(range(20), how)


def test_candidates_belong_to_the_caller():
    """So does the start: the state of `ask_tell` is a copy of both."""
    writer = Writer(2)
    init, ask, tell = zo.ask_tell(OPTIMIZER, ESTIMATOR)
    states = []
    for writes in (False, True):
        # JAX may share the memory of some NumPy arrays, depending on their address.
        starts = [jax.tree.map(np.copy, writer.start) for _ in range(30)]
        for start in starts:
            state = init(start, 0)
            if writes:
                jax.tree.map(lambda x: x.fill(9), start)
            chex.assert_trees_all_equal(state.params, writer.start)
        for _ in range(3):
            candidates, state = ask(state)
            kept = jax.tree.map(np.copy, candidates)
            points = [jax.tree.map(lambda x, i=i: x[i], candidates) for i in range(4)]
            values = [(writer if writes else writer.pure)(point) for point in points]
            again, _ = ask(state)
            state = tell(state, values)
            if writes:
                jax.tree.map(lambda x: x.fill(9), candidates)
            chex.assert_trees_all_equal(again, kept)
        states.append(state)
    chex.assert_trees_all_equal(*states)
