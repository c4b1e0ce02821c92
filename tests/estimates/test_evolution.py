"""Evolution strategies against float64 NumPy, and values with an axis of prompts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.relatives import PARAMS, Steps, flat
from tests.helpers.short_runs import called
from tests.helpers.tables import jit, mesh_of, slow

START = np.zeros(6, np.float32)
TARGETS = np.array([0.5, 1.0, 2.0], np.float32)


def of_prompts(x):
    """Three losses of a point."""
    return jnp.stack([jnp.sum((x - t) ** 2) for t in TARGETS])


def outside(x):
    return [float(np.sum((x - t) ** 2)) for t in TARGETS]


def strategy(**kwargs):
    kwargs = {"distribution": Hashed(), "population_size": 6, "smoothing": 0.1} | kwargs
    return zo.evolution_strategy(**kwargs)


# --- The estimate -----------------------------------------------------------------


@pytest.mark.parametrize("antithetic", [True, False])
def test_the_estimate_is_the_weighted_sum(antithetic):
    steps = Steps(strategy(antithetic=antithetic, shaping=zo.shaping.centered_ranks()))
    values = np.array([[1.0, 5, 2], [4, 3, 1], [2, np.nan, 0], [3, 1, 5], [0, 2, 3],
                       [5, 4, 4]])  # fmt: skip
    estimate, at, _, us = steps(0, values=lambda at: values)
    z = (at - flat(PARAMS)) / 0.1
    if antithetic:
        signs = np.tile([1, -1], 3)[:, None]
        np.testing.assert_allclose(z, np.repeat(us, 2, 0) * signs, atol=1e-5)
    weights = jit(zo.shaping.centered_ranks())(jnp.asarray(values, jnp.float32))
    factor = Hashed().factor(6)
    expected = factor / (0.1 * 17) * (np.asarray(weights, np.float64).sum(1) @ z)
    np.testing.assert_allclose(flat(estimate.gradient), expected, rtol=2e-4)
    np.testing.assert_allclose(estimate.value, np.nanmean(values), rtol=1e-6)
    assert int(estimate.num_values) == 17


def test_without_shaping_it_is_the_central_difference():
    plain = Steps(strategy(shaping=lambda values: values))
    central = Steps(zo.central_difference(Hashed(), 3, 0.1))
    a, *_ = plain(0)
    b, *_ = central(0)
    chex.assert_trees_all_close(a.gradient, b.gradient, rtol=1e-4)
    np.testing.assert_allclose(a.slope, b.slope, rtol=1e-4)
    np.testing.assert_allclose(a.value, b.value, rtol=1e-6)


# --- Runs -------------------------------------------------------------------------


def run(call, fun, steps=4, **options):
    optimizer = zo.radazo(3e-2)
    options |= {"num_steps": steps, "key": 0, "progress": False}
    return call(fun, START, optimizer, ESTIMATOR, **options)


ESTIMATOR = strategy(shaping=zo.shaping.by_group())


@pytest.mark.slow
def test_runs_with_prompts_are_one(tmp_path):
    """Compiled, as a black box, journaled and replayed."""
    compiled = run(zo.train, of_prompts)
    first, last = tmp_path / "a", tmp_path / "b"
    journaled = run(zo.train, of_prompts, journal=first)
    np.testing.assert_allclose(journaled.params, compiled.params, rtol=1e-5)
    np.testing.assert_array_equal(compiled.history.evaluations, 6)
    state = zo.replay(first, START, zo.radazo(3e-2), ESTIMATOR)
    chex.assert_trees_all_equal(state, journaled.state)
    run(called, outside, 2, journal=last)
    found = run(called, outside, journal=last)
    np.testing.assert_allclose(found.params, compiled.params, rtol=1e-4)
    assert found.num_evaluations == 24
    assert found.best.value == pytest.approx(np.mean(outside(found.best.params)))
    state = zo.replay(last, START, zo.radazo(3e-2), ESTIMATOR)
    chex.assert_trees_all_equal(state, found.state)
    history = zo.runs.History.from_journal(last)
    np.testing.assert_allclose(history.value, found.values, rtol=1e-5)


@pytest.mark.parametrize(
    "evaluator", [zo.vectorized(1), *map(slow, (zo.vectorized(2), zo.sharded("k")))]
)
def test_evaluators_give_the_same_values(evaluator):
    mesh = mesh_of(4)

    def estimate(evaluator):
        return zo.estimators.estimate(
            ESTIMATOR, of_prompts, 0, START, (), evaluator=evaluator
        )[0]

    expected = jit(lambda: estimate(zo.vectorized()))()
    with jax.set_mesh(mesh):
        found = jit(lambda: estimate(evaluator))()
    chex.assert_trees_all_close(found, expected, rtol=1e-4)


def test_failed_values(tmp_path):
    """NaN for a prompt, an array of another length, and members that raise."""
    calls = [0]

    def fun(x):
        calls[0] += 1
        if calls[0] <= 6:
            raise RuntimeError("down")
        values = outside(x)
        if calls[0] % 6 == 1:
            values[1] = np.nan
        if calls[0] % 6 == 2:
            return values[:2]
        return values

    path = tmp_path / "journal"
    result = run(called, fun, journal=path)
    assert np.isfinite(result.params).all()
    assert int(result.state.failures.skipped) == 1
    np.testing.assert_array_equal(result.history.failed, [6, 4, 4, 4])
    assert "another point" in path.read_text()
    chex.assert_trees_all_equal(
        zo.replay(path, START, zo.radazo(3e-2), ESTIMATOR).params, result.params
    )


def test_other_estimators_refuse_several_values():
    plain, optimizer = zo.forward_difference(Hashed()), zo.zo_sgd(1e-2)
    with pytest.raises(ValueError, match=r"must return a scalar loss; got an array"):
        jax.eval_shape(lambda: zo.estimators.estimate(plain, of_prompts, 0, START, ()))
    with pytest.raises(ValueError, match=r"shape \(11,\); got shape \(11, 3\)"):
        told = zo.ask_tell(START, optimizer, plain)
        told.ask()
        told.tell(np.zeros((11, 3)))
    with pytest.raises(zo.RunError, match=r"got \[.* of type list, not a number"):
        called(outside, START, optimizer, plain, num_steps=1, progress=False)
    with pytest.raises(ValueError, match=r"a scalar loss or a vector; got an array"):
        run(zo.train, lambda x: of_prompts(x)[None])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"population_size": 0}, ValueError, "population_size must be an int ≥ 2"),
        ({"population_size": 1}, ValueError, "population_size must be an int ≥ 2"),
        ({"population_size": 7}, ValueError, "must be even if antithetic is True"),
        ({"shaping": "ranks"}, TypeError, "shaping must be a function of values"),
        ({"shaping": zo.shaping.best_of(7)}, ValueError, "number of members, 6; got 7"),
        ({"shaping": lambda x: x.sum()}, ValueError, r"got \(\)"),
        ({"smoothing": 0.0}, ValueError, "smoothing must be a finite number > 0"),
        ({"distribution": "normal"}, TypeError, "distribution must be a Distribution"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        strategy(**arguments)


# --- Decay toward a point ---------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_anchored_decay(dtype):
    start = {"a": jnp.ones((2, 2), dtype), "b": jnp.zeros(3, dtype)}
    params = jax.tree.map(lambda p: p + 2, start)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for anchor in (None, start):
        tx = zo.anchored_decay(anchor, 0.25)
        updates, _ = tx.update(zeros, tx.init(start), params)
        chex.assert_trees_all_equal(updates, jax.tree.map(lambda p: p + 0.5, zeros))
    origin = jax.tree.map(jnp.zeros_like, start)
    decay = optax.add_decayed_weights(0.25)
    expected, _ = decay.update(zeros, decay.init(params), params)
    tx = zo.anchored_decay(origin, 0.25)
    updates, state = tx.update(zeros, tx.init(start), params)
    chex.assert_trees_all_equal(updates, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(state.anchor, params)


def test_errors_of_the_decay():
    with pytest.raises(ValueError, match="rate must be a finite"):
        zo.anchored_decay(None, -1.0)
    with pytest.raises(ValueError, match="anchor must be a tree like params"):
        zo.anchored_decay({"b": jnp.ones(2)}, 1.0).init({"a": jnp.ones(2)})
    decay = zo.anchored_decay(None, 1.0)
    with pytest.raises(ValueError, match="params must be passed to update"):
        decay.update(jnp.ones(2), decay.init(jnp.ones(2)))
