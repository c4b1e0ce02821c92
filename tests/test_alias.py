"""The optimizers: each a chain, and at home in everything that Optax wraps around."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import every

from radazo_jax._src.transforms import aliases, moments

# Name -> the optimizer as a function of the learning rate, and its direction.
OPTIMIZERS = {
    "radazo": (aliases.radazo, moments.scale_by_radazo()),
    "zo_adamm": (aliases.zo_adamm, moments.scale_by_zo_adamm()),
    "zo_rmsprop": (aliases.zo_rmsprop, optax.scale_by_rms(0.99, 1e-8)),
    "zo_sgd": (aliases.zo_sgd, optax.identity()),
    "zo_sgd_momentum": (
        functools.partial(aliases.zo_sgd, momentum=0.9),
        optax.trace(0.9),
    ),
    "zo_sgd_nesterov": (
        functools.partial(aliases.zo_sgd, momentum=0.9, nesterov=True),
        optax.trace(0.9, nesterov=True),
    ),
    "zo_signsgd": (aliases.zo_signsgd, optax.scale_by_sign()),
}
NAMES = tuple(OPTIMIZERS)
WITH_MOMENTS = ("radazo", "zo_adamm", "zo_rmsprop", "zo_sgd_momentum")
PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(4)}


def gradients(num_steps, params=PARAMS):
    rng = np.random.default_rng(1)

    def draw(p):
        return jnp.asarray(rng.normal(size=p.shape), p.dtype)

    return [jax.tree.map(draw, params) for _ in range(num_steps)]


def run(tx, params, gs):
    state, updates = tx.init(params), []
    for g in gs:
        update, state = tx.update(g, state, params)
        updates.append(update)
    return updates


def assert_equal(actual, expected, rtol=0.0):
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=0)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)


def lax_promotion():
    """Parts of Optax rely on the promotion of scalars and arrays."""
    return jax.numpy_dtype_promotion("standard")


@pytest.mark.parametrize("name", NAMES)
def test_is_minus_the_learning_rate_times_a_direction(name):
    optimizer, direction = OPTIMIZERS[name]
    gs = gradients(50)
    actual = run(optimizer(0.25), PARAMS, gs)  # A power of two: no rounding.
    expected = run(direction, PARAMS, gs)
    assert_equal(
        actual, [jax.tree.map(lambda u: -0.25 * u, update) for update in expected]
    )


@pytest.mark.parametrize("name", NAMES)
def test_optax_own_optimizer_where_it_has_one(name):
    theirs = {
        "radazo": optax.chain(
            optax.ema(0.9, debias=False), optax.rmsprop(0.1, 0.99, 1e-8)
        ),
        "zo_adamm": None,  # It has none without the bias correction; see below.
        "zo_rmsprop": optax.rmsprop(0.1, 0.99, 1e-8),
        "zo_sgd": optax.sgd(0.1),
        "zo_sgd_momentum": optax.sgd(0.1, 0.9),
        "zo_sgd_nesterov": optax.sgd(0.1, 0.9, nesterov=True),
        "zo_signsgd": optax.sign_sgd(0.1),
    }[name]
    ours, kwargs = OPTIMIZERS[name][0], {}
    if theirs is None:
        theirs, kwargs = (
            optax.adam(0.1, 0.9, 0.99, 0.0, 1e-8),
            {"bias_correction": True},
        )
    gs = gradients(50)
    with lax_promotion():
        expected = run(theirs, PARAMS, gs)
    assert_equal(run(ours(0.1, **kwargs), PARAMS, gs), expected, rtol=2e-6)


@pytest.mark.parametrize("name", ["radazo", "zo_adamm"])
def test_arguments_reach_the_transformation(name):
    arguments = {
        "b1": 0.5,
        "b2": 0.75,
        "eps_root": 1e-2,
        "initial_accumulator_value": 2.0,
        "bias_correction": True,
        "mu_dtype": "bfloat16",
        **({"amsgrad": True} if name == "zo_adamm" else {}),
    }
    transform = {
        "radazo": moments.scale_by_radazo,
        "zo_adamm": moments.scale_by_zo_adamm,
    }[name]
    assert list(inspect.signature(transform).parameters) == list(arguments)
    gs = gradients(5)
    expected = run(optax.chain(transform(**arguments), optax.scale(-0.5)), PARAMS, gs)
    assert_equal(run(OPTIMIZERS[name][0](0.5, **arguments), PARAMS, gs), expected)


def test_arguments_reach_rmsprop():
    gs = gradients(5)
    expected = run(
        optax.chain(optax.scale_by_rms(0.75, 1e-2, 2.0), optax.scale(-0.5)), PARAMS, gs
    )
    assert_equal(run(aliases.zo_rmsprop(0.5, 0.75, 1e-2, 2.0), PARAMS, gs), expected)
    with lax_promotion():
        first = run(aliases.zo_rmsprop(0.5, bias_correction=True), PARAMS, gs)[0]
    np.testing.assert_allclose(first["b"], -0.5 * np.sign(gs[0]["b"]), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "argument", "value", "error"),
    [
        (make, argument, value, error)
        for make in (aliases.radazo, aliases.zo_adamm, aliases.zo_rmsprop)
        for argument, value, error in (
            ("b1", 1.0, ValueError),
            ("b2", 1.0, ValueError),
            ("b2", -0.5, ValueError),
            ("b2", "0.99", TypeError),
            ("eps_root", -1e-8, ValueError),
            ("eps_root", float("nan"), ValueError),
            ("initial_accumulator_value", -1.0, ValueError),
        )
        if argument in inspect.signature(make).parameters
    ]
    + [
        (aliases.zo_sgd, "momentum", 1.0, ValueError),
        (aliases.zo_sgd, "momentum", -0.1, ValueError),
        (aliases.zo_sgd, "momentum", True, TypeError),
    ],
)
def test_bad_hyperparameters(make, argument, value, error):
    with pytest.raises(error, match=f"{argument} must be .*got"):
        make(0.1, **{argument: value})


@pytest.mark.parametrize("name", NAMES)
def test_learning_rate_is_annotated_for_optax(name):
    make = OPTIMIZERS[name][0]
    annotation = inspect.signature(make).parameters["learning_rate"].annotation
    assert annotation is optax.ScalarOrSchedule


@pytest.mark.parametrize("name", NAMES)
def test_schedules(name):
    make = OPTIMIZERS[name][0]
    gs = gradients(4)
    scheduled = run(make(lambda count: jnp.where(count < 2, 1.0, 0.5)), PARAMS, gs)
    constant = run(make(1.0), PARAMS, gs)
    halved = [jax.tree.map(lambda u: 0.5 * u, update) for update in constant[2:]]
    assert_equal(scheduled, constant[:2] + halved)


@pytest.mark.parametrize("name", NAMES)
def test_is_an_extra_args_transformation_that_ignores_unknown_ones(name):
    tx = OPTIMIZERS[name][0](0.1)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, value_fn=jnp.sum, unheard_of=1)


@pytest.mark.parametrize("name", NAMES)
def test_inject_hyperparams(name):
    make = OPTIMIZERS[name][0]
    gs = gradients(10)
    with lax_promotion():
        injected = optax.inject_hyperparams(make)(learning_rate=0.1)
        injected = optax.GradientTransformation(
            jax.jit(injected.init), jax.jit(injected.update)
        )
        actual = run(injected, PARAMS, gs)
    # 1 - b2 in single rather than double precision.
    assert_equal(actual, run(make(0.1), PARAMS, gs), rtol=2e-5)


def test_inject_hyperparams_schedules_any_of_them():
    def b1(count):
        return jnp.where(count < 1, 0.0, 0.5)

    tx = optax.inject_hyperparams(aliases.radazo)(0.1, b1=b1, mu_dtype="bfloat16")
    g = jnp.ones(2)
    state = tx.init(g)
    for expected in (0.0, 0.5):
        _, state = jax.jit(tx.update)(g, state, g)
        assert state.hyperparams["b1"] == expected
    assert optax.tree.get(state, "mu").dtype == jnp.bfloat16


@pytest.mark.parametrize("hyperparam_dtype", [jnp.float32, jnp.bfloat16])
def test_inject_hyperparams_with_another_precision_than_the_moments(hyperparam_dtype):
    params = jnp.ones(3, jnp.bfloat16)
    for make in (aliases.radazo, aliases.zo_adamm):
        tx = optax.inject_hyperparams(make, hyperparam_dtype=hyperparam_dtype)(0.125)
        with lax_promotion():  # For the learning rate.
            update, state = tx.update(params, tx.init(params), params)
        assert optax.tree.get(state, "nu").dtype == jnp.float32
        expected = run(make(0.125), params, [params])[0]
        np.testing.assert_allclose(
            np.asarray(update, np.float32), np.asarray(expected, np.float32), rtol=0.1
        )


@pytest.mark.parametrize("name", every(NAMES, "radazo"))
def test_multi_steps_takes_one_step_with_the_mean(name):
    make = OPTIMIZERS[name][0]
    gs = gradients(8)
    several = optax.MultiSteps(make(0.1), every_k_schedule=4)
    compiled = optax.GradientTransformation(several.init, jax.jit(several.update))
    with lax_promotion():
        updates = run(compiled, PARAMS, gs)
    means = [
        jax.tree.map(lambda *g: sum(g) / 4, *gs[start : start + 4]) for start in (0, 4)
    ]
    expected = run(make(0.1), PARAMS, means)
    assert_equal([updates[3], updates[7]], expected, rtol=1e-4)
    for t in (0, 1, 2, 4, 5, 6):
        assert all(np.all(u == 0) for u in jax.tree.leaves(updates[t]))


@pytest.mark.parametrize("name", NAMES)
def test_masked_leaves_pass_through(name):
    make = OPTIMIZERS[name][0]
    gs = gradients(5)
    masked = run(optax.masked(make(0.1), {"w": True, "b": False}), PARAMS, gs)
    alone = run(make(0.1), PARAMS["w"], [g["w"] for g in gs])
    assert_equal([u["w"] for u in masked], alone)
    assert_equal([u["b"] for u in masked], [g["b"] for g in gs])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("combine", ["partition", "multi_transform"])
def test_each_leaf_its_own_optimizer(name, combine):
    make = OPTIMIZERS[name][0]
    parts, labels = {"slow": make(0.1), "fast": make(1.0)}, {"w": "slow", "b": "fast"}
    gs = gradients(5)
    split = run(getattr(optax, combine)(parts, labels), PARAMS, gs)
    for leaf, label in labels.items():
        alone = run(parts[label], PARAMS[leaf], [g[leaf] for g in gs])
        assert_equal([u[leaf] for u in split], alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes(name, dtype):
    tx = OPTIMIZERS[name][0](0.125)
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    state = tx.init(params)
    update, new_state = jax.jit(tx.update)(params, state, params)
    assert {u.dtype for u in jax.tree.leaves(update)} == {jnp.dtype(dtype)}
    assert jax.tree.map(jax.typeof, new_state) == jax.tree.map(jax.typeof, state)
    if name in WITH_MOMENTS:
        moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
        assert moments
        assert {leaf.dtype for leaf in moments} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float64", "complex64", "complex128"])
def test_wide_dtypes(name, dtype):
    with jax.enable_x64(True):
        tx = OPTIMIZERS[name][0](0.125)
        params = jnp.ones(3, dtype)
        state = tx.init(params)
        with lax_promotion():  # Optax's parts multiply real by complex.
            update, new_state = jax.jit(tx.update)(params, state, params)
        assert update.dtype == dtype
        assert jax.tree.map(jax.typeof, new_state) == jax.tree.map(jax.typeof, state)
        assert all(u < 0 for u in np.real(update))


@pytest.mark.parametrize("name", NAMES)
def test_scan(name):
    make = OPTIMIZERS[name][0]
    tx, gs = make(0.125), gradients(6)

    @jax.jit
    def scanned(state, gs):
        def body(state, g):
            update, state = tx.update(g, state, PARAMS)
            return state, update

        return jax.lax.scan(body, state, gs)[1]

    stacked = jax.tree.map(lambda *g: jnp.stack(g), *gs)
    actual = scanned(tx.init(PARAMS), stacked)
    expected = jax.tree.map(lambda *u: jnp.stack(u), *run(tx, PARAMS, gs))
    assert_equal(actual, expected, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_goes_downhill(name):
    def f(x):
        return jnp.sum((x - jnp.array([1.0, -2.0, 3.0])) ** 2)

    tx = OPTIMIZERS[name][0](0.01)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(f)(params), state)
        return optax.apply_updates(params, updates), state

    params = jnp.zeros(3)
    state = tx.init(params)
    for _ in range(500):
        params, state = step(params, state)
    assert f(params) < 1e-2


@pytest.mark.parametrize("name", ["radazo", "zo_adamm", "zo_rmsprop", "zo_sgd"])
def test_parameters_that_changed_since_init(name):
    options = {"momentum": 0.9} if name == "zo_sgd" else {}
    optimizer = getattr(aliases, name)(1e-2, **options)
    params = {"w": jnp.ones((2, 3))}
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"tree structure of the parameters.*'c'"):
        optimizer.update({**params, "c": jnp.ones(1)}, state, params)
    with pytest.raises(
        ValueError, match=r"must have the shape.*\(2, 3\); got \(4, 3\)"
    ):
        optimizer.update({"w": jnp.ones((4, 3))}, state, params)
