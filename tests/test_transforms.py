"""The two transformations, against NumPy in float64 and against Optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from radazo_jax._src.optimize import transforms

TRANSFORMS = {
    "radazo": (transforms.scale_by_radazo, transforms.ScaleByRadazoState),
    "zo_adamm": (transforms.scale_by_zo_adamm, transforms.ScaleByZoAdammState),
}
NAMES = tuple(TRANSFORMS)
PARAMS = {"w": np.zeros((3, 2), np.float32), "b": (np.zeros(4, np.float32),)}


def gradients(num_steps, params=None, seed=0):
    """A trajectory of noisy gradients, with coordinates of very different sizes."""
    rng = np.random.default_rng(seed)
    params = PARAMS if params is None else params

    def draw(p):
        size = 10.0 ** rng.uniform(-3, 2, p.shape)
        noise = rng.normal(size=(num_steps, *p.shape))
        if np.iscomplexobj(p):
            noise = noise + 1j * rng.normal(size=noise.shape)
        return (size * (noise + 0.3)).astype(p.dtype)

    drawn = jax.tree.map(draw, params)
    return [jax.tree.map(lambda d, t=t: d[t], drawn) for t in range(num_steps)]


def reference(name, gs, b1=0.9, b2=0.99, eps_root=1e-8, v0=0.0, bias_correction=False):
    """Algorithms 1 and 2 of Shu et al. (2025) for one array, in double precision."""
    m, v = np.zeros_like(gs[0], dtype=np.result_type(gs[0], np.float64)), v0
    updates = []
    for t, g in enumerate(gs, start=1):
        m = b1 * m + (1 - b1) * g.astype(m.dtype)
        m_hat = m / (1 - b1**t) if bias_correction else m
        # The line in which the algorithms differ.
        measured = m_hat if name == "radazo" else g.astype(m.dtype)
        v = b2 * v + (1 - b2) * np.abs(measured) ** 2
        v_hat = v / (1 - b2**t) if bias_correction else v
        updates.append(m_hat / np.sqrt(v_hat + eps_root))
    return updates


def run(tx, params, gs):
    """Returns the updates of all steps and the last state."""
    state, updates = tx.init(params), []
    for g in gs:
        update, state = tx.update(g, state, params)
        updates.append(update)
    return updates, state


def assert_bitwise_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(a, e)


def assert_close(actual, expected, rtol):
    """Errors are relative to the largest value in a coordinate's history, since a
    first moment that passes through zero has lost its leading digits."""
    expected = np.asarray(expected)
    size = np.max(np.abs(expected), axis=0, keepdims=True)
    error = np.abs(np.asarray(actual) - expected) / size
    assert np.max(error) < rtol


def types_of(tree):
    return jax.tree.map(jax.typeof, tree)


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
    ours = transforms.scale_by_radazo(b1, b2, eps_root, v0, bias_correction)
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
    actual, _ = run(transforms.scale_by_zo_adamm(bias_correction=True), PARAMS, gs)
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
    tx = transforms.scale_by_zo_adamm(initial_accumulator_value=1.0)
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
    state = transforms.scale_by_radazo(mu_dtype="bfloat16").init(params)
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
    tx = transforms.scale_by_radazo()
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    state = tx.init(weak)
    update, new_state = tx.update(weak, state)
    assert types_of(new_state) == types_of(state)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((update, new_state)))


def test_mixed_precision_follows_each_leaf():
    with jax.enable_x64(True):
        params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.float64)}
        tx = transforms.scale_by_radazo(b1=jnp.float32(0.5), eps_root=jnp.float64(1))
        update, state = tx.update(params, tx.init(params))
        assert types_of(update) == types_of(params)
        assert state.nu["a"].dtype == jnp.float32
        assert state.nu["b"].dtype == jnp.float64


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
    tx, traces = TRANSFORMS[name][0](), []

    @jax.jit
    def step(g, state):
        traces.append(None)
        return tx.update(g, state)

    state = tx.init(PARAMS)
    for g in gradients(4):
        _, state = step(g, state)
    assert len(traces) == 1
    assert state.count == 4


@pytest.mark.parametrize(
    "inner",
    [optax.scale_by_rms(0.99, 1e-8), optax.trace(0.9), optax.trace(0.9, nesterov=True)],
)
def test_float32_moments_of_optax_parts(inner):
    tx = transforms.with_float32_moments(inner)
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
