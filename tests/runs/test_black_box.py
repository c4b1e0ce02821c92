"""Functions that JAX does not see: runs, ask/tell, bounds, what a user is told."""

import copy
import itertools
import pickle
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.black_boxes import (
    ESTIMATOR,
    OPTIMIZER,
    START,
    STEPS,
    fun,
    reference,
    run,
    traced,
)
from tests.helpers.calls import Writer
from tests.helpers.compare import Hashed
from tests.helpers.tables import slow


def test_is_the_run_of_a_traced_function():
    compiled = zo.train(
        traced, START, OPTIMIZER, ESTIMATOR, num_steps=STEPS, key=0, progress=False
    )
    chex.assert_trees_all_equal(reference().state, compiled.state)
    np.testing.assert_array_equal(reference().values, compiled.values)


def test_parameters_without_elements_stay():
    """A leaf of size 0, such as a bias that a model does not have."""
    start = {"bias": np.zeros((0, 2), np.float32), "weight": START}
    result = run(lambda x: fun(x["weight"]), start=start)
    assert result.params["bias"].shape == (0, 2)
    np.testing.assert_array_equal(result.params["weight"], reference().params)


def test_a_vectorized_function_gets_all_candidates():
    calls = []

    def batched(xs):
        calls.append(xs.shape)
        return np.array([fun(x) for x in xs]), list(range(len(xs)))

    result = run(batched, batched=True)
    chex.assert_trees_all_equal(result.state, reference().state)
    assert calls == [(4, 6)] * STEPS
    assert result.best.info == result.best.number % 4


def test_ask_and_tell_give_the_same_run():
    told = zo.ask_tell(START, OPTIMIZER, ESTIMATOR)
    for _ in range(STEPS):
        points = told.ask()
        # A checkpoint between the two, and the values in parts.
        state = pickle.loads(pickle.dumps(told.state._replace(key=None)))
        state = state._replace(key=told.state.key)
        told = zo.ask_tell(START, OPTIMIZER, ESTIMATOR, state=state)
        np.testing.assert_array_equal(told.ask(), points)
        told.tell([fun(x) for x in points[:3]])
        np.testing.assert_array_equal(told.ask(), points[3:])
        told.tell([fun(x) for x in points[3:]])
    chex.assert_trees_all_equal(told.state, reference().state)


def test_finds_the_best_of_all_points():
    seen = []

    def watched(x):
        seen.append((fun(x), x))
        return seen[-1]

    result = run(lambda x: (watched(x)[0], "told"))
    values = np.array([value for value, _ in seen])
    assert result.best.number == np.argmin(values)
    assert result.best.value == values.min()
    assert result.best.info == "told"
    np.testing.assert_array_equal(result.best.params, seen[np.argmin(values)][1])
    assert result.num_evaluations == len(values) == STEPS * 4
    chex.assert_trees_all_equal(result.state, reference().state)


def test_parameters_and_candidates_stay_within_bounds():
    points = []

    def watched(x):
        points.append(x)
        return fun(x)

    result = run(watched, bounds=(-0.25, np.full(6, 0.5, np.float32)), steps=30)
    points = np.stack([*points, result.params])
    assert points.min() == -0.25
    assert points.max() == 0.5


def bad_values(values):
    told = zo.ask_tell(START, OPTIMIZER, ESTIMATOR)
    for part in values:
        told.ask()
        told.tell(part)


def told_twice():
    told = zo.ask_tell(START, OPTIMIZER, ESTIMATOR)
    told.ask()
    told.tell(np.zeros(4))
    told.tell(np.zeros(4))


def other_tree():
    state = zo.ask_tell(START, zo.zo_sgd(1e-2), ESTIMATOR).state
    zo.ask_tell(START, OPTIMIZER, ESTIMATOR, state=state)


def not_told():
    zo.ask_tell(START, OPTIMIZER, ESTIMATOR).tell(np.zeros(4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *(
            (lambda values=values: bad_values(values), ValueError, message)
            for values, message in [
                ([np.zeros(5)], r"shape \(4,\); got shape \(5,\)"),
                ([np.zeros(1), np.zeros(4)], r"shape \(3,\); got shape \(4,\)"),
                ([np.zeros(1), np.zeros((3, 2))], r"got shape \(3, 2\)"),
                ([np.zeros(())], r"got shape \(\)"),
            ]
        ),
        (lambda: bad_values([["a"] * 4]), TypeError, "values must be real numbers"),
        (told_twice, ValueError, "told already"),
        (not_told, ValueError, "must follow an ask"),
        (other_tree, ValueError, "state must be of this optimizer"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_bar_tells_the_best_the_rate_and_failures(capsys):
    calls = itertools.count()
    run(lambda x: fun(x) if next(calls) != 2 else np.nan, steps=2, progress=True)
    shown = capsys.readouterr().err
    assert all(f"{name}=" in shown for name in ("best", "evaluations/s", "failed"))


METHOD = zo.radazo(1e-2), zo.forward_difference(Hashed(), num_directions=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda start: zo.train(jnp.sum, start, *METHOD, num_steps=1, progress=False),
        slow(lambda start: zo.diagnose(np.sum, start, METHOD[1])),
    ],
)
def test_float64_that_becomes_float32_is_noted_at_the_line_of_the_call(call):
    with warnings.catch_warnings(record=True) as noted:
        warnings.resetwarnings()  # Python's default: once for each line.
        warnings.simplefilter("default")
        for _ in range(2):
            call(np.zeros(3))
    (note,) = noted
    assert note.category is UserWarning and note.filename == __file__
    for words in ("params is float64", "float32", "jax_enable_x64"):
        assert words in str(note.message)
    call(np.zeros(3, np.float32))  # Warnings are errors in tests.
    with jax.enable_x64(True):
        call(np.zeros(3))


def test_float64_of_values_from_elsewhere_is_kept():
    assert zo.ask_tell(np.zeros(3), *METHOD).params.dtype == np.float64


def test_the_array_that_becomes_float32_is_named():
    methods = zo.radazo(1e-2), zo.forward_difference()
    init = zo.solver(lambda tree: jnp.sum(tree["b"]), *methods).init
    with pytest.warns(UserWarning, match=r"params\['b'\] is float64"):
        init({"a": 1.0, "b": np.ones(2), "c": np.ones(2)}, 0)


def test_candidates_belong_to_the_caller():
    """So does the start: the state of `ask_tell` is a copy of both."""
    x = np.linspace(-1, 1, 6, dtype=np.float32)
    template = {"a": [x, x[:4].reshape(2, 2)], "b": {"c": x[:3]}}
    writer = Writer("empty")
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
            values = [
                writer(point if writes else copy.deepcopy(point)) for point in points
            ]
            again = told.ask()
            told.tell(values)
            if writes:
                jax.tree.map(lambda x: x.fill(9), candidates)
            chex.assert_trees_all_equal(again, kept)
        states.append(told.state)
    chex.assert_trees_all_equal(*states)
