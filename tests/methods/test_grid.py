"""Whole numbers and other grids: points, methods, runs, and bad input."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from radazo_jax._src.host.vectors import Vectors
from radazo_jax._src.methods import grid
from radazo_jax._src.methods.contract import Box
from tests.helpers.driver import drive
from tests.helpers.host_runs import assert_same

METHODS = {"untuned": zo.methods.untuned(), "evolution": zo.methods.evolution()}


def run(fun, start, **options):
    return zo.minimize(fun, start, progress=False, **options)


def rotated(d, condition, seed=0):
    """A quadratic function with a random basis, and its matrix and center."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((d, d)))[0]
    matrix = (basis * condition ** np.linspace(0, 1, d)) @ basis.T
    center = rng.uniform(-3, 3, d)
    return lambda x: float((x - center) @ matrix @ (x - center)), matrix, center


def lowest_of_all(matrix, center, whole, most):
    """The minimum over all whole numbers in a box, the others at their best there."""
    free = ~whole
    inner = matrix[np.ix_(free, free)]
    cross = np.linalg.solve(inner, matrix[np.ix_(free, whole)])
    reduced = matrix[np.ix_(whole, whole)] - matrix[np.ix_(whole, free)] @ cross
    values = np.arange(-most, most + 1)
    points = np.array(list(itertools.product(values, repeat=int(whole.sum()))))
    moves = points - center[whole]
    return float(np.min(np.sum(moves @ reduced * moves, 1)))


# --- Points -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "dtype", "given", "expected"),
    [
        (1, "float64", [0.4, 0.6, -1.2], [0, 1, -1]),
        (0, "float64", [0.4, 0.6, -1.2], [0.4, 0.6, -1.2]),
        (0.1, "float64", [0.31, 0.68, -0.04], [0.3, 0.7, 0.0]),
        (0.15, "float64", [0.45, 1.04, 0.61], [0.45, 1.05, 0.6]),
        ([0.5, 0, 8], "float64", [0.7, 0.7, 13], [0.5, 0.7, 16]),
        (0.1, "float32", [0.31, 0.68, -0.04], [0.3, 0.7, 0.0]),
        (1, "bfloat16", [257.0, 3.2, -0.2], [256, 3, 0]),
        (np.pi, "float64", [3, 7, 0], [np.pi, 2 * np.pi, 0]),
    ],
)
def test_points_are_multiples_as_they_are_written(step, dtype, given, expected):
    vectors = Vectors(np.zeros(3, jnp.dtype(dtype)), step)
    found = vectors.round(np.array(given))
    expected = np.array(expected, jnp.dtype(dtype)).astype(float)
    np.testing.assert_array_equal(found, expected)
    assert not np.any(np.signbit(found[found == 0]))
    np.testing.assert_array_equal(vectors.round(found), found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", [1, 0.1, 0.3, 1 / 3, 7])
def test_rounding_twice_changes_nothing(dtype, step):
    vectors = Vectors(np.zeros(1, jnp.dtype(dtype)), step)
    once = vectors.round(np.linspace(-500, 500, 4001)[:, None])
    np.testing.assert_array_equal(vectors.round(once), once)


def test_bounds_are_rounded_inward_to_multiples():
    start = {"a": np.zeros(2), "b": np.zeros((), np.float32)}
    vectors = Vectors(start, {"a": [1, 0.1], "b": 0.2})
    bounds = {"a": [0.5, 3 * 0.1], "b": -np.inf}, {"a": [7.9, 0.7], "b": 0.6}
    lower, upper = vectors.box(bounds)
    np.testing.assert_array_equal(lower, [1, 0.3, -np.inf])
    np.testing.assert_array_equal(upper, [7, 0.7, np.float32(0.6)])


# --- Methods ----------------------------------------------------------------------


def test_models_fit_a_quadratic_function():
    fun, matrix, center = rotated(4, 100.0)
    points = np.random.default_rng(1).standard_normal((15, 4))
    values = np.array([fun(x) for x in points]) - fun(np.zeros(4))
    given = np.zeros((4, 4)), np.full(16, 1e-12)
    points, values = np.vstack([np.zeros(4), points]), np.append(0, values)
    gradient, hessian = grid.fitted(points, values, *given)
    np.testing.assert_allclose(hessian, 2 * matrix, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(gradient, -2 * matrix @ center, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_the_low_point_of_a_model_is_the_lowest_of_its_grid(seed):
    _, matrix, center = rotated(4, 10.0, seed)
    step = np.array([0.5, 0.5, 0.25, 0.0])
    shift, box = center / 4, Box(-np.ones(4), np.ones(4))
    model = grid.GridModel(-2 * matrix @ shift, 2 * matrix, box, step)
    every = [np.arange(-1, 1 + x / 2, x) for x in step[:3]]
    slice_of = [np.array([*x, 0.0]) for x in itertools.product(*every)]
    lowest = min(model.change(model.settled(s, step == 0)) for s in slice_of)
    found = model.lowest()
    np.testing.assert_array_equal(found[:3] / step[:3] % 1, 0)
    assert model.change(found) == pytest.approx(lowest, rel=1e-9)


@pytest.mark.parametrize("whole", [[1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 1, 0, 0, 0]])
def test_minima_of_rotated_quadratic_functions(whole):
    fun, matrix, center = rotated(5, 100.0, 3)
    whole = np.array(whole, bool)
    box = np.full(5, -9.0), np.full(5, 9.0)
    result = run(fun, np.full(5, 8.0), bounds=box, step=whole * 1.0)
    assert result.reason == "no neighbor is better"
    lowest = lowest_of_all(matrix, center, whole, 6)
    assert result.best.value == pytest.approx(lowest, rel=1e-6)
    assert np.all(result.params[whole] % 1 == 0)
    assert result.num_evaluations <= 200


def test_moves_are_steps_if_the_function_is_flat_between_them():
    def depth_and_width(x):  # Values of few digits, and a range of thousands.
        depth, width, rate = x["depth"], x["width"], x["rate"]
        away = (depth - 7) ** 2 + (width / 64 - 9) ** 2 + (rate + 3.2) ** 2
        return round(float(away) * 0.01 + 0.1, 4)

    start = {"depth": 1.0, "width": 4096.0, "rate": -1.0}
    lower = {"depth": 1, "width": 64, "rate": -5}
    upper = {"depth": 12, "width": 4096, "rate": 0}
    step = {"depth": 1, "width": 64, "rate": 0}
    given = dict(bounds=(lower, upper), step=step)
    result = run(depth_and_width, start, **given)
    assert (result.params["depth"], result.params["width"]) == (7, 576)
    assert abs(result.params["rate"] + 3.2) < 0.1


def test_a_minimum_has_no_better_neighbor():
    def knapsack(x):
        prices, weights = np.random.default_rng(2).uniform(1, 9, (2, 8))
        return float(-prices @ x + 10 * max(0.0, weights @ x - 40))

    result = run(knapsack, np.zeros(8), bounds=(0.0, 3.0), step=1)
    assert result.reason == "no neighbor is better"
    for move in np.vstack([np.eye(8), -np.eye(8)]):
        if np.all((result.params + move >= 0) & (result.params + move <= 3)):
            assert knapsack(result.params + move) >= result.best.value


def ripples(x):
    return float(np.sum((x - 3) ** 2 + 40 * (1 - np.cos(2 * np.pi * (x - 3) / 7))))


def test_a_budget_is_used_for_further_searches():
    given = dict(bounds=(-30.0, 30.0), step=1)
    alone = run(ripples, np.full(3, -18.0), **given)
    result = run(ripples, np.full(3, -18.0), max_evaluations=1500, **given)
    assert result.best.value == 0 < alone.best.value
    assert any("evolution" in stage.method for stage in result.stages)


def test_a_run_ends_once_all_points_are_known():
    start = np.array([2.0, 2.0])
    given = dict(bounds=(-2.0, 2.0), step=1, max_evaluations=1000)
    result = run(lambda x: float(np.sum(x**2)), start, **given)
    assert result.stopped == "converged" and result.num_evaluations <= 26


@pytest.mark.parametrize("name", METHODS)
def test_no_point_is_evaluated_twice_but_the_start(name):
    seen = []
    run(
        lambda x: seen.append(x.tobytes()) or ripples(x),
        np.zeros(3), method=METHODS[name], step=[1, 0, 0.5], max_evaluations=300,
    )  # fmt: skip
    assert len(seen) - len(set(seen)) == 1


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_points_lie_on_the_grid_and_within_bounds(name, dtype):
    seen, dtype = [], jnp.dtype(dtype)
    lower, upper = np.array([-2.5, -1, 0.3]), np.array([9.5, 3, 4.05])
    result = run(
        lambda x: seen.append(x) or ripples(np.asarray(x, float)),
        np.array([0, 0, 1], dtype),
        method=METHODS[name],
        bounds=(lower, upper),
        step=[1, 0, 0.1],
        max_evaluations=150,
    )
    points = np.stack([*seen, result.params])
    assert points.dtype == dtype and len(points) >= 100
    multiples = [np.arange(-2, 10.0), np.arange(3, 41) / 10]
    for column, expected in zip(points.T[[0, 2]], multiples, strict=True):
        assert set(column.tolist()) <= set(expected.astype(dtype).tolist())
    assert len(np.unique(points[:, 1])) > 5
    assert result.best.value < ripples(np.array([0, 0, 1.0]))


def test_noise_is_averaged_on_a_grid():
    noise = np.random.default_rng(0)
    result = run(
        lambda x: float(np.sum((x - 4) ** 2) + 0.5 * noise.standard_normal()),
        np.zeros(4), step=1, max_evaluations=800,
    )  # fmt: skip
    np.testing.assert_array_equal(result.params, 4)
    assert result.best.num_values > 5


def test_points_that_fail_are_avoided():
    def fun(x):
        if x[0] + x[1] > 7:
            raise ArithmeticError
        return float(np.sum((x - 5) ** 2))

    result = run(fun, np.zeros(2), bounds=(-9.0, 9.0), step=1)
    assert result.best.value == 5 and result.history.failed.sum() > 0


def test_many_parameters_have_a_strategy():
    result = run(
        lambda x: float(np.sum((x - 1) ** 2)),
        np.full(101, -3.0),
        step=1,
        bounds=(-3.0, 3.0),
        max_evaluations=200,
    )
    assert result.best.value < 0.6 * 101 * 16 and np.all(result.params % 1 == 0)


def test_without_a_step_nothing_changes():
    fun, _, _ = rotated(3, 10.0)
    plain, zero = run(fun, np.ones(3)), run(fun, np.ones(3), step=0)
    assert_same(zero, plain)
    driven = drive(zo.methods.untuned(), fun, np.ones(3))
    np.testing.assert_array_equal(driven.params, plain.params)


# --- Runs -------------------------------------------------------------------------

TREE = {"a": np.array([5.0, -4.0]), "b": np.array(1.0, np.float32)}
STEP = {"a": [1, 0], "b": 0.25}


def of_tree(x):
    return ripples(np.append(x["a"], x["b"]))


def test_executors_workers_and_ask_tell_take_the_same_steps():
    given = dict(step=STEP, bounds=(-9.0, 9.0), key=3)
    plain = run(of_tree, TREE, max_evaluations=120, **given)
    with ThreadPoolExecutor(3) as pool:
        found = run(of_tree, TREE, max_evaluations=120, executor=pool, **given)
    assert_same(found, plain)
    alone, told = run(of_tree, TREE, **given), zo.ask_tell(TREE, **given)
    while not told.ended:
        points = told.ask()
        rows = zip(*points.values(), strict=True)
        told.tell([of_tree({"a": a, "b": b}) for a, b in rows])
    np.testing.assert_array_equal(told.evaluations.values, alone.evaluations.values)
    assert told.ended == alone.reason


def test_a_journal_resumes_to_the_bit_and_names_another_step(tmp_path):
    given = dict(step=STEP, bounds=(-9.0, 9.0), key=3)
    whole = run(of_tree, TREE, max_evaluations=130, **given)
    path = tmp_path / "run.jsonl"
    first = run(of_tree, TREE, max_evaluations=57, journal=path, **given)
    assert first.num_evaluations == 57
    assert_same(run(of_tree, TREE, max_evaluations=130, journal=path, **given), whole)
    given |= {"evaluations": first.evaluations}
    assert_same(run(of_tree, TREE, max_evaluations=130, **given), whole)
    given |= {"step": STEP | {"a": [1, 2]}}
    with pytest.raises(
        ValueError, match=r"element 1 of the step was 0.0 there, .* 2.0"
    ):
        run(of_tree, TREE, **given)


def test_functions_of_jax():
    fun = jax.jit(lambda x: jnp.sum((x - 3.3) ** 2))
    result = run(fun, np.zeros(3, np.float32), step=0.1)
    np.testing.assert_array_equal(result.params, np.full(3, 3.3, np.float32))


def test_a_method_of_a_user_gets_the_grid():
    def method(start):
        np.testing.assert_array_equal(start.step, [1, 0.5])
        yield start.round(start.params + np.array([[0.6, 0.6]]))
        yield start.params + np.array([[0.5, 0.5]])

    with pytest.raises(zo.RunError, match=r"yield rounded points"):
        run(lambda x: float(x @ x), np.zeros(2), method=method, step=[1, 0.5])


# --- Bad input --------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        *(-1, np.nan, np.inf, "1", [1, 1, 1]),
        *({"a": 1}, {"a": None, "b": 1}, {"a": 1j, "b": 1}),
        *({"a": [1, -1], "b": 1}, {"a": [1, 1, 1], "b": 1}),
    ],
)
def test_a_step_that_is_none_is_refused(step):
    with pytest.raises(ValueError, match=r"step must be a number of at least 0, or a"):
        run(of_tree, TREE, step=step)


def test_bounds_between_two_multiples_are_refused():
    start = TREE | {"b": 0.92}
    with pytest.raises(ValueError, match=r"step must have a multiple .* params\['b'\]"):
        run(
            of_tree, start, step=STEP, bounds=({"a": -9, "b": 0.9}, {"a": 9, "b": 0.95})
        )


def test_a_start_off_the_grid_is_rounded_with_one_warning_a_call():
    start = {"a": np.array([0.0, 0.3]), "b": np.array(0.6)}
    found = None
    for most in (30, 40):
        with pytest.warns(UserWarning, match=r"params\['b'\].* at 0.5") as caught:
            found = run(
                of_tree, start, step=STEP, max_evaluations=most,
                evaluations=found and found.evaluations,
            )  # fmt: skip
        assert len(caught) == 1


@pytest.mark.parametrize("call", ["train", "ask_tell"])
def test_optimizers_refuse_a_step_and_name_methods(call):
    start, parts = np.zeros(2, np.float32), (zo.radazo(1e-2), zo.forward_difference())
    if call == "ask_tell":
        expected, message = ValueError, "step must be None unless a method takes"
    else:
        expected, message = TypeError, "got step. Pass step, an argument of minimize"
    with pytest.raises(expected, match=message):
        if call == "ask_tell":
            zo.ask_tell(start, *parts, step=1)
        else:
            zo.train(jnp.sum, start, *parts, step=1, num_steps=3)


@pytest.mark.parametrize("name", ["slopes", "many", "quadratic"])
def test_methods_of_short_differences_refuse_a_step(name):
    method = getattr(zo.methods, name)()
    with pytest.raises(zo.RunError, match=rf"{name}\(\), which takes short diff"):
        run(of_tree, TREE, method=method, step=STEP)
