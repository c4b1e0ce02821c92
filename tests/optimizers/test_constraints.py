"""The rules of the paper's relatives: running maximum, projections, votes of signs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize

import radazo_jax as zo
from tests.helpers.moments import PARAMS, assert_close, gradients, run


def box(tree):
    lower, upper = (optax.tree.full_like(tree, x) for x in (-0.5, 1.0))
    return optax.projections.projection_box(tree, lower, upper)


# --- The running maximum -----------------------------------------------------------


def chen(gs, b1=0.9, b2=0.99, eps_root=1e-8, v0=0.0):
    """The updates of algorithm 1 of Chen et al. (2019) for one array, in float64."""
    m, v, largest = np.zeros(gs[0].shape), v0, v0
    for g in gs:
        m = b1 * m + (1 - b1) * g.astype(np.float64)
        v = b2 * v + (1 - b2) * g.astype(np.float64) ** 2
        largest = np.maximum(largest, v)
        yield m / np.sqrt(largest + eps_root)


@pytest.mark.parametrize("v0", [0.0, 3.0])
def test_amsgrad_is_the_algorithm_of_chen_et_al(v0):
    gs = gradients(60)
    # Smaller gradients later, or the maximum is the latest.
    gs = [
        jax.tree.map(lambda g, t=t: g * np.float32(0.9**t), g) for t, g in enumerate(gs)
    ]
    tx = zo.scale_by_zo_adamm(amsgrad=True, initial_accumulator_value=v0)
    updates, state = run(tx, PARAMS, gs)
    expected = list(chen([g["w"] for g in gs], v0=v0))
    assert_close([u["w"] for u in updates], expected, rtol=5e-6)
    assert (state.nu_max["w"] > state.nu["w"]).all()
    plain, _ = run(zo.scale_by_zo_adamm(initial_accumulator_value=v0), PARAMS, gs)
    assert not np.allclose(plain[-1]["w"], updates[-1]["w"], rtol=0.1)


def test_amsgrad_with_bias_correction_is_optax_amsgrad():
    gs = jax.tree.map(jnp.asarray, gradients(30))
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = run(optax.scale_by_amsgrad(0.9, 0.99, 0.0, 1e-8), PARAMS, gs)
    tx = zo.scale_by_zo_adamm(amsgrad=True, bias_correction=True)
    actual, _ = run(tx, PARAMS, gs)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6)


# --- Projections -------------------------------------------------------------------


def test_steps_end_in_the_set():
    params = {"w": jnp.array([0.9, -0.4, 0.3]), "b": jnp.array(0.0)}
    gs = {"w": jnp.array([-1.0, 2.0, 0.1]), "b": jnp.array(5.0)}
    tx = optax.chain(zo.zo_sgd(0.25), zo.keep_params_in(box))
    updates, _ = tx.update(gs, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["w"], [1.0, -0.5, 0.275], rtol=1e-6)
    np.testing.assert_allclose(params["b"], -0.5, rtol=1e-6)


def test_the_projection_of_a_diagonal_metric_onto_a_box():
    """The weighted least-squares problem, solved by SciPy, has ZO-AdaMM's steps."""
    rng = np.random.default_rng(0)
    adamm = zo.zo_adamm(0.3, amsgrad=True)
    tx = optax.chain(adamm, zo.keep_params_in(box))
    params = jnp.asarray(rng.uniform(-0.5, 1, 5), jnp.float32)
    state, free_state = tx.init(params), adamm.init(params)
    for _ in range(4):
        g = jnp.asarray(rng.normal(size=5) * 10.0 ** rng.uniform(-2, 2, 5), jnp.float32)
        free, free_state = adamm.update(g, free_state, params)
        root = np.sqrt(np.sqrt(np.asarray(free_state[0].nu_max, np.float64)))
        target = np.asarray(params, np.float64) + np.asarray(free, np.float64)
        solved = scipy.optimize.lsq_linear(
            np.diag(root), root * target, (-0.5, 1.0), method="bvls", tol=1e-14
        )
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params, solved.x, atol=1e-5)
        assert (abs(target - solved.x) > 0.1).any()


def test_bad_projections():
    with pytest.raises(TypeError, match="projection must be a function such as"):
        zo.keep_params_in((0.0, 1.0))
    outside = {"a": jnp.zeros(2), "b": jnp.array([0.0, 1.5])}
    message = r"params must lie in the set of projection at the start; .* params\['b'\]"
    with pytest.raises(ValueError, match=message):
        zo.keep_params_in(box).init(outside)
    tx = zo.keep_params_in(box)
    with pytest.raises(ValueError, match="params must be passed to update"):
        tx.update(jnp.zeros(2), tx.init(jnp.zeros(2)))
