"""The transformations with moments, against NumPy in float64 and against Optax.

Optax's own suites, in `test_optax_suite.py`, test what all optimizers must do.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from radazo_jax._src.optimizers import moments
from tests.helpers.moments import (
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
from tests.helpers.tables import jit

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
        assert_close([leaf(u) for u in updates], expected, rtol=5e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize(
    ("dtype", "nu_dtype", "rtol"),
    [("float64", "float64", 1e-12), ("complex64", "float32", 5e-6)],
)
def test_is_the_paper_algorithm_in_other_dtypes(
    name, bias_correction, dtype, nu_dtype, rtol
):
    with jax.enable_x64(True):
        params = np.zeros(5, dtype)
        gs = gradients(60, params)
        tx = TRANSFORMS[name][0](bias_correction=bias_correction)
        updates, state = run(tx, params, gs)
        expected = reference(name, gs, bias_correction=bias_correction)
        assert (state.mu.dtype, state.nu.dtype) == (dtype, nu_dtype)
        assert_close(updates, expected, rtol)


# --- Precision ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_moments_of_narrow_parameters_are_float32(name, dtype):
    params = jnp.zeros((3, 2), dtype)
    gs = [jnp.asarray(g, dtype) for g in gradients(60, np.zeros((3, 2), np.float32))]
    updates, state = run(TRANSFORMS[name][0](), params, gs)
    assert state.mu.dtype == state.nu.dtype == jnp.float32
    assert {u.dtype for u in updates} == {jnp.dtype(dtype)}
    # The gradients and the updates are rounded, each by half of an ulp.
    expected = reference(name, [np.asarray(g, np.float32) for g in gs])
    actual = [np.asarray(u, np.float64) for u in updates]
    np.testing.assert_allclose(actual, expected, rtol=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mu_dtype", ["bfloat16", jnp.float16, np.dtype("float32")])
def test_mu_dtype_is_that_of_the_stored_first_moment_alone(name, mu_dtype):
    gs = gradients(20)
    tx = TRANSFORMS[name][0](mu_dtype=mu_dtype)
    state, step = tx.init(PARAMS), jit(tx.update)
    for g in gs:
        update, new_state = step(g, state)
        assert types_of(new_state) == types_of(state)
        # The update is made from the first moment before it is rounded.
        m = 0.9 * np.asarray(state.mu["w"], np.float64) + 0.1 * g["w"]
        v = np.asarray(new_state.nu["w"], np.float64)
        np.testing.assert_allclose(update["w"], m / np.sqrt(v + 1e-8), rtol=1e-5)
        state = new_state
    assert {m.dtype for m in jax.tree.leaves(state.mu)} == {jnp.dtype(mu_dtype)}
    assert {v.dtype for v in jax.tree.leaves(state.nu)} == {jnp.dtype("float32")}
    assert {u.dtype for u in jax.tree.leaves(update)} == {jnp.dtype("float32")}


def test_mixed_precision_follows_each_leaf():
    with jax.enable_x64(True):
        params = {
            "a": jnp.ones(2, jnp.bfloat16),
            "b": jnp.ones(2, jnp.float64),
            "c": jnp.ones(2, jnp.complex64),
        }
        tx = moments.scale_by_radazo(b1=jnp.float32(0.5), eps_root=jnp.float64(1))
        update, state = jit(tx.update)(params, tx.init(params))
        assert types_of(update) == types_of(params)
        assert [state.nu[name].dtype for name in "abc"] == [
            *(jnp.float32, jnp.float64, jnp.float32)
        ]
        state = moments.scale_by_radazo(mu_dtype="bfloat16").init(params)
        assert [state.mu[name].dtype for name in "abc"] == [
            *(jnp.bfloat16, jnp.bfloat16, jnp.complex64)
        ]


def test_weakly_typed_parameters_and_updates():
    tx = moments.scale_by_radazo()
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    state = tx.init(weak)
    update, new_state = tx.update(weak, state)
    assert types_of(new_state) == types_of(state)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((update, new_state)))


@pytest.mark.parametrize(
    "inner",
    [optax.scale_by_rms(0.99, 1e-8), optax.trace(0.9), optax.trace(0.9, nesterov=True)],
)
def test_float32_moments_of_optax_parts(inner):
    tx = moments.with_float32_moments(inner)
    gs = gradients(40)
    assert_bitwise_equal(run(tx, PARAMS, gs), run(inner, PARAMS, gs))
    narrow = [jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), g) for g in gs]
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), PARAMS)
    updates, state = run(tx, params, narrow)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    assert types_of(updates[-1]) == types_of(params)
    widened = [jax.tree.map(lambda x: x.astype(jnp.float32), g) for g in narrow]
    expected, _ = run(inner, PARAMS, widened)
    assert_bitwise_equal(
        updates, [jax.tree.map(lambda x: x.astype(jnp.bfloat16), u) for u in expected]
    )


def test_numbers_are_arrays_of_one_element():
    tx = moments.with_float32_moments(optax.scale_by_rms(0.99, 1e-8))
    updates, _ = tx.update({"a": 3.0}, tx.init({"a": 1.0}))
    expected, _ = tx.update({"a": jnp.float32(3)}, tx.init({"a": jnp.float32(1)}))
    assert_bitwise_equal(updates, expected)


# --- Trees and hyperparameters ---


@pytest.mark.parametrize("name", NAMES)
def test_empty_nodes(name):
    params = {"a": jnp.ones(2), "none": None, "masked": optax.MaskedNode(), "empty": ()}
    tx = TRANSFORMS[name][0]()
    update, state = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(update) == jax.tree.structure(params)
    assert jax.tree.structure(state.mu) == jax.tree.structure(params)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("changed", "messages"),
    [
        (PARAMS | {"head": np.ones(3)}, ("updates must have the tree", "'head': *")),
        *(
            (PARAMS | {"w": np.ones(shape)}, ("updates['w'] must have", str(shape)))
            for shape in ((3, 3), ())
        ),
    ],
)
def test_updates_of_other_parameters(name, changed, messages):
    tx = TRANSFORMS[name][0]()
    state = tx.init(PARAMS)
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match="Call init again") as error:
            update(changed, state)
        assert all(message in str(error.value) for message in messages)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("b1", 1.0, ValueError),
        ("b2", "0.99", TypeError),
        ("eps_root", -1e-12, ValueError),
        ("initial_accumulator_value", -1.0, ValueError),
        ("mu_dtype", "int32", TypeError),
        ("mu_dtype", jnp.complex64, TypeError),
    ],
)
def test_bad_hyperparameters(name, argument, value, error):
    with pytest.raises(error, match=f"{argument} must be .*got"):
        TRANSFORMS[name][0](**{argument: value})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_traced_hyperparameters(name, bias_correction, dtype):
    """A population of optimizers: vmap over their hyperparameters."""
    g = jnp.array([0.3, -40.0], dtype)
    b1, b2, eps, v0 = (
        np.array(x, np.float32)
        for x in ([0.5, 0.8], [0.9, 0.7], [1e-3, 1e-4], [0.1, 0.2])
    )

    def step(b1, b2, eps, v0):
        tx = TRANSFORMS[name][0](b1, b2, eps, v0, bias_correction)
        return tx.update(g, tx.init(g))[0]

    actual = jax.jit(jax.vmap(step))(b1, b2, eps, v0)
    for i in range(2):
        expected = reference(
            name, [np.asarray(g)], b1[i], b2[i], eps[i], v0[i], bias_correction
        )
        np.testing.assert_allclose(actual[i], expected[0], rtol=1e-5)
