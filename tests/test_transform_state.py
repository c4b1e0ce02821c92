"""State, structure, hyperparameters and compilation of the two transformations."""

import functools

import chex
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
    gradients,
    reference,
    run,
    types_of,
)

from radazo_jax._src.transforms import moments

# --- Trees ---


@pytest.mark.parametrize("name", NAMES)
def test_state_is_of_arrays(name):
    make, state_type = TRANSFORMS[name]
    state = make().init(PARAMS)
    assert type(state) is state_type
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", NAMES)
def test_initial_accumulator_value(name):
    state = TRANSFORMS[name][0](initial_accumulator_value=0.5).init(PARAMS)
    assert all(np.all(nu == 0.5) for nu in jax.tree.leaves(state.nu))
    assert all(np.all(mu == 0.0) for mu in jax.tree.leaves(state.mu))


@pytest.mark.parametrize("name", NAMES)
def test_abstract_parameters(name):
    abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), PARAMS)
    tx = TRANSFORMS[name][0]()
    assert types_of(tx.init(abstract)) == types_of(tx.init(PARAMS))
    shapes = jax.eval_shape(tx.init, abstract)
    assert jax.tree.structure(shapes) == jax.tree.structure(tx.init(PARAMS))


@pytest.mark.parametrize("name", NAMES)
def test_empty_nodes(name):
    params = {"a": jnp.ones(2), "none": None, "masked": optax.MaskedNode(), "empty": ()}
    tx = TRANSFORMS[name][0]()
    update, state = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(update) == jax.tree.structure(params)
    assert jax.tree.structure(state.mu) == jax.tree.structure(params)


@pytest.mark.parametrize("name", NAMES)
def test_map_params(name):
    tx = TRANSFORMS[name][0]()
    state = tx.init(PARAMS)
    mapped = optax.tree.map_params(
        tx, lambda leaf: leaf + 1.0, state, transform_non_params=lambda _: None
    )
    assert mapped.count is None
    assert all(np.all(leaf == 1.0) for leaf in jax.tree.leaves(mapped))
    assert len(jax.tree.leaves(mapped)) == 2 * len(jax.tree.leaves(PARAMS))


@pytest.mark.parametrize("name", NAMES)
def test_extra_arguments_are_ignored(name):
    tx = TRANSFORMS[name][0]()
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    state = tx.init(PARAMS)
    plain = tx.update(PARAMS, state)
    extra = tx.update(PARAMS, state, PARAMS, value=1.0, value_fn=lambda p: 0.0)
    assert_bitwise_equal(extra, plain)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.eval_shape])
def test_changed_structure(name, transform):
    tx = TRANSFORMS[name][0]()
    state = tx.init({"w": jnp.ones(2)})
    update = (
        functools.partial(jax.eval_shape, tx.update)
        if transform is jax.eval_shape
        else transform(tx.update)
    )
    with pytest.raises(ValueError, match="updates must have the tree") as error:
        update({"w": jnp.ones(2), "head": jnp.ones(3)}, state)
    assert "{'w': *}" in str(error.value)
    assert "{'head': *, 'w': *}" in str(error.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(3, 3), (3,), (1, 2), ()])
def test_changed_shape(name, shape):
    tx = TRANSFORMS[name][0]()
    state = tx.init(PARAMS)
    updates = {"w": jnp.ones(shape), "b": (jnp.ones(4),)}
    with pytest.raises(ValueError, match=r"updates\['w'\] must have") as error:
        jax.jit(tx.update)(updates, state)
    assert "(3, 2)" in str(error.value)
    assert str(shape) in str(error.value)


# --- Hyperparameters ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("b1", 1.0, ValueError),
        ("b1", -0.1, ValueError),
        ("b1", float("nan"), ValueError),
        ("b1", "0.9", TypeError),
        ("b1", optax.constant_schedule(0.9), TypeError),
        ("b2", 1, ValueError),
        ("b2", -1e-9, ValueError),
        ("b2", float("nan"), ValueError),
        ("b2", None, TypeError),
        ("eps_root", -1e-12, ValueError),
        ("eps_root", float("nan"), ValueError),
        ("eps_root", True, TypeError),
        ("initial_accumulator_value", -1.0, ValueError),
        ("initial_accumulator_value", float("nan"), ValueError),
        ("initial_accumulator_value", np.ones(2), ValueError),
        ("mu_dtype", "int32", TypeError),
        ("mu_dtype", jnp.complex64, TypeError),
        ("mu_dtype", bool, TypeError),
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


# --- Compilation ---


@pytest.mark.parametrize("name", NAMES)
def test_jit_and_scan_take_the_same_steps(name):
    tx = TRANSFORMS[name][0](bias_correction=True, mu_dtype="bfloat16")
    gs = gradients(20)
    stepped, last = run(
        optax.GradientTransformation(tx.init, jax.jit(tx.update)), PARAMS, gs
    )

    def body(state, g):
        update, state = tx.update(g, state)
        return state, update

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *gs)
    state, scanned = jax.jit(lambda s, g: jax.lax.scan(body, s, g))(
        tx.init(PARAMS), stacked
    )
    assert types_of(state) == types_of(last)
    for t, update in enumerate(stepped):
        for a, e in zip(
            jax.tree.leaves(jax.tree.map(lambda x, t=t: x[t], scanned)),
            jax.tree.leaves(update),
            strict=True,
        ):
            np.testing.assert_allclose(a, e, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_once(name):
    tx = TRANSFORMS[name][0]()
    chex.clear_trace_counter()  # It counts by name, in all tests of a process.
    step = jax.jit(chex.assert_max_traces(tx.update, 1))
    state = tx.init(PARAMS)
    for g in gradients(4):
        _, state = step(g, state)
    assert state.count == 4


def test_numbers_are_arrays_of_one_element():
    tx = moments.with_float32_moments(optax.scale_by_rms(0.99, 1e-8))
    updates, _ = tx.update({"a": 3.0}, tx.init({"a": 1.0}))
    expected, _ = tx.update({"a": jnp.float32(3)}, tx.init({"a": jnp.float32(1)}))
    assert_bitwise_equal(updates, expected)


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
