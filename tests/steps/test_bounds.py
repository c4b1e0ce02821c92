"""Bounds: what is read as a box, and what would be read as another one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import radazo_jax as zo
from radazo_jax._src.steps import box
from tests.helpers import short_runs
from tests.helpers.calls import square
from tests.helpers.short_runs import traced_square
from tests.helpers.tables import slow

_PAIRS = [(0, 5), (6, 10)]
_LOWER, _UPPER = np.transpose(_PAIRS).astype(np.float32)
_START = np.array([2.0, 7.0], np.float32)
_METHOD = (zo.zo_sgd(0.1), zo.central_difference(num_directions=2))
_EACH = {"a": [0, 0], "b": 0}, {"a": [8, 8], "b": 8}


def _away(x):
    """Its unbounded minimum violates a bound of each parameter."""
    return ((x - np.array([9.0, 2.0], np.float32)) ** 2).sum()


def trained(bounds, start=_START, fun=_away, num_steps=60, call=zo.train):
    options = {"num_steps": num_steps, "bounds": bounds, "progress": False}
    return call(fun, start, *_METHOD, **options)


def called(*args, **options):
    return trained(*args, **options, call=short_runs.called)


def told(bounds, start=_START, fun=_away, num_steps=60):
    run = zo.ask_tell(start, *_METHOD, bounds=bounds)
    for _ in range(num_steps):
        run.tell([fun(x) for x in run.ask()])
    return run


def solved(bounds, start=_START, fun=_away, num_steps=60):
    init, step = zo.solver(fun, *_METHOD, bounds=bounds)
    state, step = init(start, jax.random.key(0)), jax.jit(step)
    for _ in range(num_steps):
        state, _ = step(state)
    return state


_RUNS = [trained, solved, told, called]


@pytest.mark.parametrize("run", _RUNS)
def test_a_tuple_of_tuples_is_read_neither_as_pairs_nor_as_vectors(run):
    with pytest.raises(ValueError, match="a tuple that is not read as pairs") as error:
        run(tuple(_PAIRS))
    assert "\n" not in str(error.value)


def test_replay_reads_pairs(tmp_path):
    given = dict(num_steps=2, journal=tmp_path / "run.jsonl", progress=False)
    result = short_runs.called(_away, _START, *_METHOD, bounds=_PAIRS, **given)
    state = zo.replay(given["journal"], _START, *_METHOD, bounds=_PAIRS)
    np.testing.assert_array_equal(state.params, result.params)


@pytest.mark.parametrize(
    ("bounds", "params", "expected"),
    [
        ([(0, 1), (None, 5)], np.ones(2), ([0, -np.inf], [1, 5])),
        ([[0, None], [0, 5]], np.ones(2), ([0, 0], [np.inf, 5])),
        ([(None, 1)] * 4, np.ones((2, 2)), ([[-np.inf] * 2] * 2, [[1.0] * 2] * 2)),
        ([(0, 1)], np.float64(1), (0, 1)),
        ((None, 5), np.ones(2), ([-np.inf] * 2, [5, 5])),
        (([0, None], [None, 5]), np.ones(2), ([0, -np.inf], [np.inf, 5])),
        (
            tuple(np.transpose([(0, None), (None, 5)])),
            np.ones(2),
            ([0, -np.inf], [np.inf, 5]),
        ),
        (
            scipy.optimize.Bounds([-np.inf, 6], [5, np.inf]),
            np.ones(2),
            ([-np.inf, 6], [5, np.inf]),
        ),
        ((0, 8), {"a": np.ones(2), "b": np.float64(1)}, _EACH),
        (scipy.optimize.Bounds(0, 8), {"a": np.ones(2), "b": np.float64(1)}, _EACH),
        (((0, 6), (5, 10)), (np.float64(2), np.float64(7)), ((0, 6), (5, 10))),
        (
            ({"a": 0.0, "b": None}, {"a": None, "b": 5}),
            {"a": np.ones(2), "b": np.float64(1)},
            ({"a": [0, 0], "b": -np.inf}, {"a": [np.inf] * 2, "b": 5}),
        ),
    ],
)
def test_bounds_are_trees_like_the_parameters(bounds, params, expected):
    with jax.enable_x64(True):
        read = box.as_trees(box.as_bounds(bounds), params)
        for found, given in zip(read, expected, strict=True):
            assert jax.tree.structure(found) == jax.tree.structure(params)
            jax.tree.map(np.testing.assert_array_equal, dict(x=found), dict(x=given))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([(0, 1)], "got 1 pairs, and 3 elements in 2 arrays"),
        ([(0, 1, 2)] * 3, r"got \[\(0, 1, 2\)"),
        (({"a": 0}, {"a": 1, "b": 1}), r"without a bound of params\['b'\]"),
        ({"a": (0, 1), "b": (0, 1)}, r"\(lower, upper\)"),
        ((0, {"a": [1, 2, 3], "b": 1}), r"for shapes \{a"),
        ((np.nan, 1), "-np.inf, np.inf or None"),
        ([np.zeros(2), np.ones(2)], "which may be either"),
    ],
)
def test_other_bounds_are_refused_in_one_line(bounds, message):
    start = {"a": np.full(2, 0.5, np.float32), "b": np.float32(0.5)}
    with pytest.raises(ValueError, match=message) as error:
        zo.minimize(lambda p: 0.0, start, bounds=bounds, progress=False)
    text = str(error.value)
    assert "\n" not in text and "_Pairs" not in text and "_Elements" not in text


_BOUNDS = [
    _PAIRS,
    np.array(_PAIRS),
    jnp.array(_PAIRS),
    tuple(np.transpose(_PAIRS)),
    (_LOWER, _UPPER),
    (jnp.array(_LOWER), jnp.array(_UPPER)),
    ([0, 6], [5, 10]),
    scipy.optimize.Bounds([0, 6], [5, 10]),
    scipy.optimize.Bounds(lb=[0, 6], ub=np.array([5.0, 10.0]), keep_feasible=True),
]


@pytest.mark.parametrize("bounds", _BOUNDS)
def test_forms_are_read_as_one_box(bounds):
    read = box.as_trees(box.as_bounds(bounds), _START)
    np.testing.assert_array_equal(read, [[0, 6], [5, 10]])


@pytest.mark.parametrize("run", _RUNS)
def test_runs_end_at_the_corner_of_the_box(run):
    """All runs read bounds by one function."""
    bounds = scipy.optimize.Bounds([0, 6], [5, np.inf])
    np.testing.assert_array_equal(run(bounds).params, [5, 6])


# --- Starts on, and off, the bounds -----------------------------------------------


def minimized(bounds, start, num_steps=3, fun=None):
    options = {"max_evaluations": num_steps, "progress": False}
    return zo.minimize(square, start, bounds=bounds, **options)


def asked(bounds, start, **options):
    return zo.ask_tell(start, bounds=bounds)


def _flat(x):
    return traced_square(x) / 10


UP = np.nextafter(np.float32(0.5), np.float32(1))


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (called, 3),
        slow(trained, 3),
        *((call, 0) for call in (told, solved, asked)),
        (minimized, 3),
    ],
)
@pytest.mark.parametrize("value", [0.5, UP])
def test_a_start_off_a_bound_by_rounding_is_clipped(call, steps, value):
    start = np.array([value, 0.25, 0.25], np.float32)
    found = call((0.0, 0.5), start, num_steps=steps, fun=_flat)
    found = np.asarray(found.params)
    assert np.all(found <= 0.5) and abs(found[0] - 0.5) < 0.1


@pytest.mark.parametrize("call", [slow(called), slow(trained), minimized])
def test_equal_bounds_give_their_point(call):
    start = np.full(3, 4, np.float32)
    found = call((4.0, 4.0), start, num_steps=3, fun=traced_square)
    np.testing.assert_array_equal(found.params, start)


def test_a_start_in_float64_off_a_bound_by_rounding_is_clipped():
    start = np.array([0.1 + 0.2, 0.2, 0.2])  # The sum is above 0.3.
    assert np.all(called((0.0, 0.3), start, square, 3).params <= 0.3)


@pytest.mark.parametrize(("value", "bound"), [(1.75, 1.25), (-3.5, -2.25)])
def test_a_start_far_off_a_bound_is_named(value, bound):
    """The array, the element, its value and the bound."""
    start = {"b": np.zeros(2, np.float32), "w": np.zeros(5, np.float32)}
    start["w"][3] = value
    with pytest.raises(ValueError, match="params must") as caught:
        told((-2.25, 1.25), start)
    assert all(word in str(caught.value) for word in ("w", "3", str(value), str(bound)))
