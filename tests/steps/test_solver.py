"""`solver`: pure steps, under all transformations of JAX, equal to `train`."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.short_runs import METHOD, START, traced, traced_square
from tests.helpers.tables import every, mesh_of, slow

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": jnp.ones(2)}
STEPS = 6


def loss(params, target=0.5):
    return jnp.sum((params["w"] - target) ** 2) + jnp.sum(params["b"] ** 2)


def sample(key):
    return jax.random.normal(key)


METHODS = {
    "radazo": lambda: (zo.radazo(1e-2), zo.forward_difference(Hashed(), 3)),
    "replayed": lambda: (
        zo.radazo(1e-2, moments="replayed"),
        zo.forward_difference(Hashed(), 3),
    ),
}
RADAZO = METHODS["radazo"]()


def scanned(step, state, num=STEPS):
    return jax.lax.scan(lambda state, _: step(state), state, length=num)


# --- The steps of `minimize` ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "minibatches"),
    [("radazo", False), slow("radazo", True), slow("replayed", False)],
)
def test_takes_the_steps_of_minimize_bit_for_bit(name, minibatches):
    method = METHODS[name]()
    options = {"sample": sample} if minibatches else {}
    init, step = zo.solver(loss, *method, **options)
    state, step = init(PARAMS, 0), jax.jit(step)
    values = []
    for _ in range(STEPS):
        state, info = step(state)
        values.append(info.value)
    expected = traced(loss, PARAMS, STEPS, method, chunk_size=4, **options)
    chex.assert_trees_all_equal(state, expected.state)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, expected.state)
    np.testing.assert_array_equal(values, expected.values)


def test_a_batch_given_to_the_step_is_like_a_sampled_one():
    targets = jnp.linspace(0, 1, STEPS)
    init, step = zo.solver(loss, *RADAZO)
    state, step = init(PARAMS, 0), jax.jit(step)
    by_name, by_position = state, state
    for target in targets:
        by_position, info = step(by_position, target)
        by_name, again = step(by_name, target=target)
        chex.assert_trees_all_equal(info, again)
    chex.assert_trees_all_equal(by_name, by_position)
    assert not np.array_equal(by_name.params["w"], step(state)[0].params["w"])


def test_what_happened_in_a_step():
    init, step = zo.solver(loss, *RADAZO)
    state, info = jax.jit(step)(init(PARAMS, 0))
    assert info.values.shape == (4,)
    np.testing.assert_array_equal(info.value, info.values[0])
    np.testing.assert_allclose(info.value, loss(PARAMS), rtol=1e-6)
    assert not info.skipped
    assert int(state.step) == 1


# --- Transformations --------------------------------------------------------------


@pytest.mark.parametrize("name", every(METHODS, "radazo"))
def test_under_scan(name):
    init, step = zo.solver(loss, *METHODS[name]())
    state = init(PARAMS, 0)
    after, infos = jax.device_get(jax.jit(functools.partial(scanned, step))(state))
    step = jax.jit(step)
    for i in range(STEPS):
        state, info = step(state)
        chex.assert_trees_all_close(
            jax.tree.map(lambda x, i=i: x[i], infos), info, rtol=1e-5
        )
    chex.assert_trees_all_close(after.params, state.params, rtol=1e-5)


@pytest.mark.slow
def test_keys_learning_rates_and_starting_points_in_one_program():
    """16 × 4 runs under `vmap`, `init` included, each like the run on its own.

    In float64, since a difference divides the rounding of the values by `smoothing`.
    """
    with jax.enable_x64(True):
        start = jax.tree.map(lambda p: p.astype(jnp.float64), PARAMS)
        keys = jax.random.split(jax.random.key(7), 16)
        rates = jnp.array([1e-3, 1e-2, 3e-2, 1e-1])
        move = jax.vmap(lambda by: jax.tree.map(lambda p: p + by, start))
        starts = move(jnp.arange(16.0) / 16)

        def run(key, start, rate):
            optimizer = zo.radazo(rate)
            init, step = zo.solver(loss, optimizer, RADAZO[1], bounds=(-3.0, 3.0))
            state, infos = scanned(step, init(start, key))
            return state.params, infos.value

        over_rates = jax.vmap(run, (None, None, 0))
        params, values = jax.jit(jax.vmap(over_rates, (0, 0, None)))(
            keys, starts, rates
        )
        assert values.shape == (16, 4, STEPS)
        single = jax.jit(run)
        for i, j in itertools.product((0, 5, 15), range(4)):
            at = jax.tree.map(lambda x, i=i: x[i], starts)
            expected_params, expected = single(keys[i], at, rates[j])
            found = jax.tree.map(lambda x, i=i, j=j: x[i, j], params)
            np.testing.assert_allclose(values[i, j], expected, rtol=1e-10)
            chex.assert_trees_all_close(found, expected_params, rtol=1e-10)
        # The first value depends on the starting point alone; the second, on all three.
        first = np.broadcast_to(jax.vmap(loss)(starts)[:, None], (16, 4))
        np.testing.assert_allclose(values[:, :, 0], first, rtol=1e-10)
        assert len(np.unique(values[:, :, 1])) == 64


@pytest.mark.parametrize("name", every(METHODS, "radazo"))
def test_the_state_can_be_donated(name):
    """Parameters and key of the caller stay, and all leaves are used in place."""
    params, key = jax.tree.map(jnp.copy, PARAMS), jax.random.key(0)
    init, step = zo.solver(loss, *METHODS[name]())
    expected, _ = jax.jit(step)(init(params, key))
    first = init(params, key)
    donating = jax.jit(step, donate_argnums=0)
    state, _ = donating(first)
    chex.assert_trees_all_equal(state, expected)
    state, _ = donating(state)
    assert int(state.step) == 2
    assert all(x.is_deleted() for x in jax.tree.leaves(first.params))
    assert not any(x.is_deleted() for x in [key, *jax.tree.leaves(params)])


@pytest.mark.slow
@pytest.mark.parametrize("evaluator", [zo.vectorized(), zo.sharded("k")])
def test_on_sharded_parameters(evaluator):
    specs = {"w": jax.P(None, "model"), "b": jax.P("model")}
    params = PARAMS | {"w": jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)}
    plain = zo.solver(loss, *RADAZO)
    expected, _ = jax.jit(functools.partial(scanned, plain.step))(plain.init(params, 0))
    with jax.set_mesh(mesh_of(4, 1, 2)):
        placed = jax.tree.map(jax.device_put, params, specs)
        init, step = zo.solver(loss, *RADAZO, evaluator=evaluator)
        state, step = init(placed, 0), jax.jit(step)
        for _ in range(STEPS):
            state, _ = step(state)
        for name, spec in specs.items():
            assert state.params[name].sharding.spec == spec
    got = jax.device_get(state.params)
    chex.assert_trees_all_close(got, expected.params, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), None])
def test_init_under_jit_and_vmap(bounds):
    init, _ = zo.solver(loss, *RADAZO, bounds=bounds)
    expected = init(PARAMS, jax.random.key(0))
    chex.assert_trees_all_equal(jax.jit(init)(PARAMS, jax.random.key(0)), expected)
    stacked = jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS)
    state = jax.vmap(init)(stacked, jax.random.split(jax.random.key(0)))
    chex.assert_trees_all_equal(state.params, stacked)


def test_bounds_are_checked_where_they_are_known():
    for bounds, message in (
        ((2.0, -2.0), "no lower bound that exceeds its upper bound"),
        ((-0.5, 0.5), "params must lie within bounds"),
    ):
        init, _ = zo.solver(loss, *RADAZO, bounds=bounds)
        with pytest.raises(ValueError, match=message):
            init(PARAMS, 0)
    crossed, _ = zo.solver(loss, *RADAZO, bounds=(2.0, -2.0))
    with pytest.raises(ValueError, match="no lower bound that exceeds"):
        jax.jit(crossed)(PARAMS, 0)


# --- Bad input --------------------------------------------------------------------


def test_states_of_other_runs_are_refused():
    _, step = zo.solver(loss, *RADAZO)
    with pytest.raises(TypeError, match="state must be a SolverState, made by init"):
        jax.jit(step)(PARAMS)
    other = zo.solver(loss, zo.zo_sgd(0.1), RADAZO[1]).init(PARAMS, 0)
    with pytest.raises(ValueError, match="state must be of this optimizer"):
        jax.jit(step)(other)
    estimator = zo.contrib.residual_feedback()
    other = zo.solver(loss, RADAZO[0], estimator).init(PARAMS, 0)
    with pytest.raises(ValueError, match="state must be of this estimator"):
        step(other)


def test_bad_arguments():
    with pytest.raises(TypeError, match="fun must be a function of params"):
        zo.solver(3.0, *RADAZO)
    init, step = zo.solver(loss, *RADAZO, sample=sample)
    message = "step must get no batch if sample draws it; got 1 further arguments"
    with pytest.raises(TypeError, match=message):
        step(init(PARAMS, 0), jnp.zeros(()))
    with pytest.raises(TypeError, match="params must hold real floating-point"):
        init({"w": jnp.arange(3)}, 0)


# --- Auxiliary values -----------------------------------------------------------


def stepped(fun, **options):
    init, step = zo.solver(fun, *METHOD, **options)
    state, info = jax.jit(step)(init(START, jax.random.key(0)))
    return state.params, info.value


def minimized(fun, **options):
    result = traced(fun, **options)
    return result.params, result.values


@pytest.mark.parametrize("call", [stepped, minimized])
def test_an_auxiliary_value_changes_no_step(call):
    found = call(lambda p: (traced_square(p), {"largest": jnp.max(p)}), has_aux=True)
    for x, expected in zip(found, call(traced_square), strict=True):
        np.testing.assert_array_equal(x, expected)


def test_the_auxiliary_value_of_a_step_is_in_its_info():
    """It is the one at the first point, θ."""
    init, step = zo.solver(
        lambda p: (traced_square(p), {"largest": jnp.max(p)}), *METHOD, has_aux=True
    )
    _, info = jax.jit(step)(init(START, jax.random.key(0)))
    assert info.aux["largest"] == np.max(START)


def test_a_function_without_a_pair_is_named():
    for call in (stepped, minimized):
        with pytest.raises(TypeError, match="must return a pair"):
            call(traced_square, has_aux=True)


# --- The paper's algorithms -----------------------------------------------------


DIMENSION = 12
CURVATURES = np.linspace(0.5, 3.0, DIMENSION)


def quadratic(x):
    return 0.5 * jnp.sum(CURVATURES.astype(x.dtype) * x**2)


def quadratic64(x):
    return 0.5 * np.sum(CURVATURES * x**2)


@pytest.mark.parametrize("refined", [True, False], ids=["algorithm 2", "algorithm 1"])
def test_the_papers_algorithms_end_to_end(refined):
    """Algorithms 1 and 2 with eq. (2), transcribed in float64."""
    b1, b2, zeta, eta, mu, num = 0.9, 0.99, 1e-8, 1e-2, 0.1, 4
    distribution = zo.sphere()
    optimizer = (zo.radazo if refined else zo.zo_adamm)(eta, b1, b2, zeta)
    value_and_grad = zo.value_and_grad(
        quadratic, zo.forward_difference(distribution, num, mu)
    )
    key = jax.random.key(0)

    @jax.jit
    def step(x, state, t):
        _, gradient = value_and_grad(jax.random.fold_in(key, t), x)
        updates, state = optimizer.update(gradient, state, x)
        return optax.apply_updates(x, updates), state

    @jax.jit
    def directions(t):
        keys = [jax.random.fold_in(jax.random.fold_in(key, t), k) for k in range(num)]
        like = jnp.zeros(DIMENSION)
        return [
            distribution.materialize(distribution.sample(k, like), like) for k in keys
        ]

    x = jnp.ones(DIMENSION)
    state = optimizer.init(x)
    theta = np.ones(DIMENSION)
    m, v = np.zeros(DIMENSION), np.zeros(DIMENSION)
    for t in range(30):
        us = [np.asarray(u, np.float64) for u in directions(t)]
        base = quadratic64(theta)
        g = (
            DIMENSION
            / num
            * sum((quadratic64(theta + mu * u) - base) / mu * u for u in us)
        )
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (m if refined else g) ** 2
        theta = theta - eta * m / np.sqrt(v + zeta)
        x, state = step(x, state, t)
        # float32 rounding of the differences, amplified by 1/μ, is what remains.
        np.testing.assert_allclose(x, theta, atol=5e-4)
    assert quadratic64(theta) < 0.6 * quadratic64(np.ones(DIMENSION))


# --- States whose dtypes change, and derivatives --------------------------------


# Their hyperparameters are arrays of float32, which moments in bfloat16 turn to.
CHANGING = ["adam", "amsgrad", "lamb", "lion"]


def loss_of_two(p):
    return jnp.sum(p["a"].astype(jnp.float32) ** 2) + jnp.sum(p["b"] ** 2)


def of_two_dtypes(optimizer):
    start = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones(4, jnp.float32)}
    estimator = zo.forward_difference(Hashed(), 2, smoothing=0.1)
    with jax.numpy_dtype_promotion("standard"):  # As Optax's moments need it.
        return traced(loss_of_two, start, 2, (optimizer, estimator))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGING)
def test_states_that_change_their_dtype_run_or_are_named(name):
    optimizer = optax.inject_hyperparams(getattr(optax, name))(learning_rate=1e-3)
    try:
        result = of_two_dtypes(optimizer)
    except TypeError as error:
        assert "optimizer must" in str(error) and "while_loop" not in str(error)
    else:
        assert result.params["a"].dtype == jnp.bfloat16 and len(result.values) == 2


@pytest.mark.parametrize("derivative", [jax.grad, slow(jax.jacfwd)])
def test_a_step_of_zo_sgd_is_differentiable(derivative):
    """The derivatives by the scale of the start, and by the rate."""

    @jax.jit
    def final(x):
        scale, rate = x
        init, step = zo.solver(lambda p: jnp.sum(p**2), zo.zo_sgd(rate), METHOD[1])
        state, _ = step(init(scale * jnp.ones(3), jax.random.key(0)))
        return jnp.sum(state.params**2)

    with jax.enable_x64(True):
        # Central differences of a quadratic are exact, up to the rounding of the
        # loss to float32, divided by the distances: 2⁻²⁴ / (5e-3 · 0.05) = 2e-4.
        x, h = jnp.array([1.0, 0.1]), 0.05
        expected = [(final(x + h * d) - final(x - h * d)) / (2 * h) for d in jnp.eye(2)]
        np.testing.assert_allclose(derivative(final)(x), expected, rtol=1e-3)
