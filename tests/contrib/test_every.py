"""Each of the paper's relatives in every run, and what all refuse."""

import contextlib
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.relatives import (
    EXACT_SLOPES,
    MAKERS,
    PARAMS,
    SLOPES,
    Steps,
    flat,
    make,
    quadratic,
    rows,
    traced,
)
from tests.helpers.tables import every, jit, slow


@pytest.mark.parametrize("name", every(MAKERS, "query_reuse"))
def test_a_step_with_few_values_or_none(name):
    """A step without a value is skipped; one with some of the values is finite."""
    run = zo.ask_tell(PARAMS, optax.sgd(1e-3), make(name), key=3)
    for _ in range(5):
        run.tell(quadratic(rows(run.ask())))
    before = run.params
    run.tell(np.full(len(rows(run.ask())), np.nan))
    chex.assert_trees_all_equal(run.params, before)
    values = quadratic(rows(run.ask()))
    values[-1] = np.inf
    run.tell(values)
    run.tell(quadratic(rows(run.ask())))
    assert np.isfinite(flat(run.params)).all()


def on_explicit_mesh():
    types = (jax.sharding.AxisType.Explicit,) * 2
    return jax.make_mesh((4, 2), ("k", "model"), axis_types=types)


KINDS = itertools.cycle(("float64", "sharded", "orthonormal", "bfloat16"))


@pytest.mark.parametrize(
    ("name", "kind"), [("linear_interpolation", "bfloat16"), *map(slow, MAKERS, KINDS)]
)
def test_dtypes_meshes_and_distributions(name, kind):
    """Two steps: a state stays of its types, and a gradient has the parameters'."""
    estimator, evaluator, mesh = make(name), zo.vectorized(), None
    params = {"w": jnp.ones((4, 2)), "b": jnp.ones(3)}
    if kind == "orthonormal":
        estimator = make(name, distribution=zo.orthonormal())
    with jax.enable_x64(kind == "float64"):
        if kind in ("float64", "bfloat16"):
            params = jax.tree.map(lambda p: p.astype(kind), params)
        if kind == "sharded":
            mesh, evaluator = on_explicit_mesh(), zo.sharded("k")
            specs = {"w": jax.P("model", None), "b": jax.P()}
            params = jax.tree.map(
                lambda p, spec: jax.device_put(p, jax.NamedSharding(mesh, spec)),
                params,
                specs,
            )

        def loss(params):
            return jnp.sum(params["w"] ** 2) + jnp.sum(params["b"] ** 2)

        @jit
        def two(params):
            def estimate(key, state):
                return zo.estimators.estimate(
                    estimator, loss, key, params, state, evaluator=evaluator
                )

            first = estimator.init(params)
            _, state = estimate(0, first)
            (_, gradient), last = estimate(1, state)
            chex.assert_trees_all_equal_shapes_and_dtypes(first, state, last)
            assert jax.tree.map(jax.typeof, gradient) == jax.tree.map(
                jax.typeof, params
            )
            return gradient

        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            gradient = two(params)
        assert all(
            np.isfinite(np.asarray(g, np.float64)).all() for g in gradient.values()
        )


@pytest.mark.parametrize("name", every(sorted(EXACT_SLOPES), "query_reuse"))
def test_the_slope_is_that_along_the_gradient(name):
    """Exactly, in the first step, on a linear function."""
    estimate, *_ = Steps(make(name), lambda at: at @ SLOPES)(0)
    exact = flat(estimate.gradient) @ SLOPES
    np.testing.assert_allclose(estimate.slope, exact, rtol=5e-3)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("variance_reduced", {"period": 1}, "period must be an int ≥ 2; got 1"),
        (
            "variance_reduced",
            {"period": 3, "anchor_steps": 3},
            "anchor_steps must be fewer than period, 3; got 3",
        ),
        ("coordinate_wise", {"uniform_fraction": 1.5}, r"number in \(0, 1\]; got 1.5"),
        ("query_reuse", {"memory_size": 1}, "memory_size must be an int ≥ 2; got 1"),
        ("momentum_perturbation", {"b1": 1.5}, r"b1 must be a number in \(0, 1\]; got"),
        (
            "momentum_perturbation",
            {"b1": 1.0, "uncertainty": 0.0},
            "uncertainty must be positive where b1 is 1; got 0.0",
        ),
        ("normalized_batch", {"num_directions": 1}, "must be an int ≥ 2; got 1"),
        ("gaussian_process", {"memory_size": 1}, "must be an int ≥ 5; got 1"),
        ("gaussian_process", {"memory_size": 513}, "must be an int ≤ 512; got 513"),
    ],
)
def test_bad_arguments(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(zo.contrib, name)(**arguments)


def test_a_prior_that_is_no_function_or_returns_no_tree_like_params():
    with pytest.raises(TypeError, match="prior must be a function of params; got "):
        zo.contrib.prior_guided(prior=PARAMS)
    guided = zo.contrib.prior_guided(prior=lambda x: x["a"])
    state = zo.contrib.PriorGuidedState(())
    message = r"prior must return a tree like params, .*; got \(2, 2\)"
    with pytest.raises(ValueError, match=message):
        zo.estimators.estimate(guided, traced, 0, PARAMS, state)


@pytest.mark.parametrize("name", MAKERS)
def test_bad_arguments_of_all(name):
    with pytest.raises(ValueError, match="smoothing must be a finite number > 0"):
        make(name, smoothing=0.0)
