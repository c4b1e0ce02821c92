"""The two transformations, against NumPy in float64 and against Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from moments import (
    NAMES,
    PARAMS,
    TRANSFORMS,
    assert_bitwise_equal,
    assert_close,
    gradients,
    reference,
    run,
    types_of,
)

from radazo_jax._src.transforms import moments

# --- The numbers ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"bias_correction": True},
        {"b1": 0.5, "b2": 0.7, "eps_root": 1e-2, "v0": 3.0},
        {"b1": 0.0, "b2": 0.0, "eps_root": 1.0},
        {"b1": np.float64(0.5), "b2": np.array(0.7), "bias_correction": True},
    ],
)
def test_is_the_paper_algorithm(name, kwargs):
    gs = gradients(60)
    arguments = dict(kwargs)
    arguments["initial_accumulator_value"] = arguments.pop("v0", 0.0)
    updates, _ = run(TRANSFORMS[name][0](**arguments), PARAMS, gs)
    for leaf in (lambda t: t["w"], lambda t: t["b"][0]):
        expected = reference(name, [leaf(g) for g in gs], **kwargs)
        actual = [leaf(u) for u in updates]
        assert_close(actual, expected, rtol=5e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias_correction", [False, True])
def test_is_the_paper_algorithm_in_double_precision(name, bias_correction):
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: p.astype(np.float64), PARAMS)
        gs = gradients(60, params)
        tx = TRANSFORMS[name][0](bias_correction=bias_correction)
        updates, state = run(tx, params, gs)
        expected = reference(
            name, [g["w"] for g in gs], bias_correction=bias_correction
        )
        assert {leaf.dtype for leaf in jax.tree.leaves((state.mu, state.nu))} == {
            jnp.dtype("float64")
        }
        assert_close([u["w"] for u in updates], expected, rtol=1e-12)


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
def test_radazo_is_a_chain_of_optax_parts_bit_for_bit(bias_correction, jitted):
    b1, b2, eps_root, v0 = 0.87, 0.983, 1e-6, 0.25
    ours = moments.scale_by_radazo(b1, b2, eps_root, v0, bias_correction)
    optax_chain = optax.chain(
        optax.ema(b1, debias=bias_correction),
        optax.scale_by_rms(b2, eps_root, v0, bias_correction=bias_correction),
    )
    if jitted:
        ours, optax_chain = (
            optax.GradientTransformation(jax.jit(tx.init), jax.jit(tx.update))
            for tx in (ours, optax_chain)
        )
    gs = jax.tree.map(jnp.asarray, gradients(64))
    # Optax raises the Python float `decay` to an integer power.
    with jax.numpy_dtype_promotion("standard"):
        expected, optax_state = run(optax_chain, PARAMS, gs)
    actual, state = run(ours, PARAMS, gs)
    assert_bitwise_equal(actual, expected)
    assert_bitwise_equal(state.mu, optax_state[0].ema)
    assert_bitwise_equal(state.nu, optax_state[1].nu)
    assert_bitwise_equal(state.count, optax_state[0].count)


def test_zo_adamm_with_bias_correction_is_optax_adam():
    gs = jax.tree.map(jnp.asarray, gradients(50))
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = run(optax.scale_by_adam(0.9, 0.99, 0.0, 1e-8), PARAMS, gs)
    actual, _ = run(moments.scale_by_zo_adamm(bias_correction=True), PARAMS, gs)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "kwargs", "first"),
    [
        ("radazo", {}, 10.0),
        ("radazo", {"bias_correction": True}, 1.0),
        ("radazo", {"b2": 0.75}, 2.0),
        ("zo_adamm", {}, 1.0),
        ("zo_adamm", {"bias_correction": True}, 1.0),
    ],
)
def test_first_update(name, kwargs, first):
    g = jnp.array([0.3, -40.0, 1e-2])
    tx = TRANSFORMS[name][0](eps_root=0.0, **kwargs)
    update, _ = tx.update(g, tx.init(g))
    np.testing.assert_allclose(update, first * np.sign(g), rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_no_update(name):
    g = jnp.zeros(3)
    tx = TRANSFORMS[name][0]()
    update, _ = tx.update(g, tx.init(g))
    np.testing.assert_array_equal(update, 0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias_correction", [False, True])
def test_complex(name, bias_correction):
    params = np.zeros((5,), np.complex64)
    gs = gradients(50, params)
    tx = TRANSFORMS[name][0](bias_correction=bias_correction)
    updates, state = run(tx, params, gs)
    expected = reference(name, gs, bias_correction=bias_correction)
    assert_close(updates, expected, rtol=5e-6)
    assert state.mu.dtype == jnp.complex64
    assert state.nu.dtype == jnp.float32


# --- Precision ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_moments_of_narrow_parameters_are_float32(name, dtype):
    params = jnp.zeros((3, 2), dtype)
    gs = [jnp.asarray(g, dtype) for g in gradients(60, np.zeros((3, 2), np.float32))]
    updates, state = run(TRANSFORMS[name][0](), params, gs)
    assert state.mu.dtype == state.nu.dtype == jnp.float32
    assert {u.dtype for u in updates} == {jnp.dtype(dtype)}
    # What is rounded is what comes in and what goes out: one half of an ulp.
    expected = reference(name, [np.asarray(g, np.float32) for g in gs])
    actual = [np.asarray(u, np.float64) for u in updates]
    np.testing.assert_allclose(actual, expected, rtol=float(jnp.finfo(dtype).eps))


def test_narrow_second_moments_would_stall():
    """The reason for float32: one percent of v is less than an ulp of a bfloat16."""
    g = jnp.full((1,), 0.02, jnp.bfloat16)
    tx = moments.scale_by_zo_adamm(initial_accumulator_value=1.0)
    state = tx.init(g)
    for _ in range(500):
        _, state = tx.update(g, state)
    assert state.nu[0] < 0.01


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mu_dtype", ["bfloat16", jnp.float16, np.dtype("float32")])
def test_mu_dtype_is_that_of_the_stored_first_moment_alone(name, mu_dtype):
    gs = gradients(60)
    tx = TRANSFORMS[name][0](mu_dtype=mu_dtype)
    state = tx.init(PARAMS)
    for g in gs:
        update, new_state = tx.update(g, state)
        assert types_of(new_state) == types_of(state)
        # The update is made from the first moment before it is rounded.
        m = 0.9 * np.asarray(state.mu["w"], np.float64) + 0.1 * g["w"]
        v = np.asarray(new_state.nu["w"], np.float64)
        np.testing.assert_allclose(update["w"], m / np.sqrt(v + 1e-8), rtol=1e-5)
        state = new_state
    assert {m.dtype for m in jax.tree.leaves(state.mu)} == {jnp.dtype(mu_dtype)}
    assert {v.dtype for v in jax.tree.leaves(state.nu)} == {jnp.dtype("float32")}
    assert {u.dtype for u in jax.tree.leaves(update)} == {jnp.dtype("float32")}


def test_mu_dtype_does_not_apply_to_complex_parameters():
    params = {"c": jnp.zeros(2, jnp.complex64), "r": jnp.zeros(2)}
    state = moments.scale_by_radazo(mu_dtype="bfloat16").init(params)
    assert state.mu["c"].dtype == jnp.complex64
    assert state.mu["r"].dtype == jnp.bfloat16


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "params_dtype", ["bfloat16", "float16", "float32", "complex64"]
)
@pytest.mark.parametrize("updates_dtype", ["bfloat16", "float32"])
def test_types_of_the_state_are_stable(name, params_dtype, updates_dtype):
    updates = jnp.ones((2, 3), updates_dtype)
    params = jnp.ones((2, 3), params_dtype)
    tx = TRANSFORMS[name][0](bias_correction=True)
    state = tx.init(params)
    update, new_state = tx.update(updates, state, params)
    assert types_of(new_state) == types_of(state)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(new_state))
    assert new_state.count.dtype == jnp.int32
    assert update.dtype == updates_dtype


def test_weakly_typed_parameters_and_updates():
    tx = moments.scale_by_radazo()
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    state = tx.init(weak)
    update, new_state = tx.update(weak, state)
    assert types_of(new_state) == types_of(state)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((update, new_state)))


def test_mixed_precision_follows_each_leaf():
    with jax.enable_x64(True):
        params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.float64)}
        tx = moments.scale_by_radazo(b1=jnp.float32(0.5), eps_root=jnp.float64(1))
        update, state = tx.update(params, tx.init(params))
        assert types_of(update) == types_of(params)
        assert state.nu["a"].dtype == jnp.float32
        assert state.nu["b"].dtype == jnp.float64
