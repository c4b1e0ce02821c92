"""The step size by parabolas, against closed forms, and on hard functions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.tables import jit, slow

CURVATURES = np.array([1.0, 2.0, 5.0, 3.0])
START = np.array([1.0, -2.0, 0.5, 1.5])


def loss(x):
    return jnp.sum(CURVATURES.astype(x.dtype) * x**2) / 2


def descend(fun, x, tx, num_steps, direction=None):
    """Steps along the exact gradient, or another direction of descent."""
    direction = direction or (lambda x, t: -jax.grad(fun)(x))

    def step(carry, t):
        x, state = carry
        value, gradient = jax.value_and_grad(fun)(x)
        updates, state = tx.update(
            direction(x, t),
            state,
            x,
            value=value,
            slope=jnp.sum(gradient**2),
            value_fn=fun,
        )
        return (optax.apply_updates(x, updates), state), (value, updates)

    times = jnp.arange(num_steps)
    run = jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), times))
    (x, state), (values, updates) = run(jnp.asarray(x))
    return x, state, np.asarray(values), np.asarray(updates)


@pytest.mark.parametrize("extra_evaluations", [0, 1])
def test_on_a_sphere_the_second_step_is_newtons(extra_evaluations):
    tx = zo.scale_by_parabolic_step(0.0, extra_evaluations, initial_step_size=0.1)
    x, state, _, updates = descend(
        lambda x: 1.5 * jnp.sum(x**2), START.astype(np.float32), tx, 2
    )
    np.testing.assert_allclose(updates[0], -0.3 * START, rtol=1e-5)
    np.testing.assert_allclose(state.step_size, 1 / 3, rtol=1e-3)
    np.testing.assert_allclose(x, 0, atol=2e-3)


def test_measures_the_parabola_along_any_direction():
    along = np.array([-1.0, 1.0, 0.25, 0.0])
    tx = zo.scale_by_parabolic_step(0.0, 1, initial_step_size=0.125)
    _, state, _, updates = descend(
        loss, START.astype(np.float32), tx, 2, lambda x, t: jnp.float32(along)
    )
    slope = -(CURVATURES * START) @ along / (along @ along)
    curvature = along @ (CURVATURES * along) / (along @ along)
    np.testing.assert_allclose(state.slope, slope, rtol=1e-4)
    np.testing.assert_allclose(state.curvature, curvature, rtol=1e-4)
    np.testing.assert_allclose(updates[0], 0.125 * along)


def test_averages_are_those_of_the_formula():
    decay, num = 0.7, 8
    tx = zo.scale_by_parabolic_step(decay, initial_step_size=0.15)
    _, state, values, updates = descend(loss, START.astype(np.float32), tx, num)
    x, size, average, step = START, 0.15, 0, START
    for t in range(num):
        if t > 0:
            measured = step @ (CURVATURES * step) / (step @ step)
            # The first is of the right scale, and ends the search.
            weight = min(decay, (t - 1) / t)
            average = weight * average + (1 - weight) * measured
            size = 1 / average
        step = -size * CURVATURES * x
        np.testing.assert_allclose(updates[t], step, rtol=1e-2, atol=1e-5)
        np.testing.assert_allclose(values[t], CURVATURES @ x**2 / 2, rtol=1e-2)
        x = x + step
    np.testing.assert_allclose(state.step_size, size, rtol=1e-2)


@pytest.mark.parametrize("extra_evaluations", [0, 1])
@pytest.mark.parametrize("size", [1e-6, 1e6, 1e12])
def test_the_first_step_size_may_be_wrong(size, extra_evaluations):
    tx = zo.scale_by_parabolic_step(0.8, extra_evaluations, initial_step_size=size)
    _, state, values, _ = descend(loss, START.astype(np.float32), tx, 60)
    assert np.isfinite(values[-1]) and values[-1] < 1e-3 * values[0]
    assert 1e-3 < float(state.step_size) < 1


def test_without_a_first_size_the_scale_of_the_loss_does_not_matter():
    def values(scale):
        tx, start = zo.scale_by_parabolic_step(), START.astype(np.float32)
        return descend(lambda x: scale * loss(x), start, tx, 40)[2]

    expected = values(1.0)
    for scale in (1e-12, 1e12):
        found = values(scale)
        np.testing.assert_allclose(found[:10] / scale, expected[:10], rtol=1e-2)
        assert found[-1] < 1e-3 * found[0]


def test_in_float64_it_goes_to_the_rounding_of_float64():
    with jax.enable_x64(True):
        _, state, values, _ = descend(loss, START, zo.scale_by_parabolic_step(), 200)
    assert state.step_size.dtype == state.value.dtype == jnp.float64
    assert values[-1] < 1e-20 * values[0]


def test_a_step_to_nothing_is_taken_back():
    """The loss is finite near the start alone."""

    def fun(x):
        return jnp.where(jnp.max(abs(x)) > 3, jnp.nan, loss(x) + 1000)

    tx = zo.scale_by_parabolic_step(initial_step_size=10.0)
    x, _, values, updates = descend(fun, START.astype(np.float32), tx, 40)
    assert np.isnan(values[1]) and (updates[1] == -updates[0]).all()
    np.testing.assert_allclose(values[2], values[0], rtol=1e-3)
    assert np.isfinite(values[2:]).all() and loss(x) < 0.1


def test_a_step_that_grew_unseen_is_taken_back():
    """The curvature is the known one, 1, and the size ten times its inverse."""
    tx = zo.scale_by_parabolic_step(initial_step_size=1.0)
    x, down = jnp.zeros(1), -jnp.ones(1)
    updates, state = tx.update(30 * down, tx.init(x), x, value=1000.0, slope=900.0)
    x = x + updates
    for _ in range(11):
        before = x
        updates, state = tx.update(down, state, x, value=550.0, slope=1.0)
        x = x + updates
    size = float(state.step_size)
    assert 5 < size < 20
    value = 550 - size + size**2 / 2
    back, after = tx.update(down, state, x, value=value, slope=1.0)
    assert after.revert.reverted
    np.testing.assert_array_equal(after.revert.params, before)
    np.testing.assert_array_equal(x + back, before)
    np.testing.assert_allclose(after.step_size, 1.0, rtol=1e-3)


@pytest.mark.parametrize(
    ("value", "slope"), [(np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan), (1.0, 0.0)]
)
def test_no_step_where_value_or_slope_say_nothing(value, slope):
    tx = zo.scale_by_parabolic_step(initial_step_size=0.1)
    x = jnp.ones(3)
    state = tx.init(x)
    updates, after = tx.update(-x, state, x, value=value, slope=slope)
    np.testing.assert_array_equal(updates, 0)
    assert not after.pending and after.step_size == state.step_size
    # A value may be an integer.
    updates, _ = tx.update(-x, after, x, value=1, slope=3.0)
    np.testing.assert_allclose(updates, -0.1, rtol=1e-6)


def test_negative_curvature_lengthens_the_step_and_ends():
    def well(x):
        return jnp.sum(x**4 - x**2)

    x, _, values, _ = descend(
        well, np.full(3, 1e-3, np.float32), zo.scale_by_parabolic_step(), 80
    )
    np.testing.assert_allclose(abs(x), 0.5**0.5, rtol=1e-2)
    assert np.isfinite(values).all() and values[-1] <= -0.749


@pytest.mark.parametrize("extra_evaluations", [0, slow(1)])
@pytest.mark.parametrize("smoothing", [slow(5e-3), 1.0])
def test_noise_does_not_make_it_diverge(extra_evaluations, smoothing):
    """1 % of the loss; with the smaller μ, estimates are nothing but noise.

    Now and then a step goes far up, and is taken back by the next.
    """

    def noisy(x, key):
        # By the bits of x, so that each point has a noise of its own.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        word = jnp.bitwise_xor.reduce(bits * np.uint32(2654435761))
        noise = jax.random.normal(jax.random.fold_in(key, word))
        return jnp.sum(x**2) / 2 * (1 + 0.01 * noise)

    result = zo.minimize(
        noisy,
        jax.random.uniform(jax.random.key(0), (100,), minval=-1.0),
        optax.chain(
            optax.scale(-1.0), zo.scale_by_parabolic_step(0.8, extra_evaluations)
        ),
        zo.central_difference(zo.orthonormal(), smoothing=smoothing),
        num_steps=400,
        key=0,
        sample=lambda key: key,
        progress=False,
    )
    end = np.median(result.values[-20:])
    assert end < (0.33 if smoothing == 1 else 2) * result.values[0]


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 4))])
def test_no_step_above_the_start_is_kept(seed):
    """The function is 10⁴ times as steep below a tenth of the loss."""
    center = np.random.default_rng(0).uniform(-4, 4, 80).astype(np.float32)

    def steep(x):
        share = jnp.sum((x - center) ** 2) / np.sum(center**2)
        width = 0.005
        return share - 1e4 * width * jnp.logaddexp(-share / width, -0.1 / width)

    result = zo.minimize(
        steep,
        np.zeros(80, np.float32),
        zo.parabolic_sgd(),
        zo.forward_difference(zo.orthonormal()),
        num_steps=220,
        key=seed,
        progress=False,
    )
    # One above it is taken back, and followed by one that is not.
    above = result.values > result.values[0]
    assert above.any() and not (above[1:] & above[:-1]).any()


def test_a_first_step_along_any_direction_is_as_long_as_one_along_the_estimate():
    grad, direction = jnp.array([3.0, 4.0]), jnp.array([-1e5, 0.0])
    tx = zo.scale_by_parabolic_step(extra_evaluations=1)
    update, _ = tx.update(
        direction,
        tx.init(grad),
        jnp.zeros(2),
        value=7.0,
        slope=50.0,
        grad=grad,
        value_fn=lambda params: 0.0,
    )
    # A fiftieth of 7 by the slope of 50 / |ĝ|.
    np.testing.assert_allclose(update, [-7 / 50 / 10, 0.0], rtol=1e-6)


def test_what_is_missing_is_named():
    x = jnp.ones(3)
    for num, given, name in (
        (0, {}, "value"),
        (0, {"value": 1.0}, "slope"),
        (1, {"value": 1.0}, "value_fn"),
    ):
        tx = zo.scale_by_parabolic_step(extra_evaluations=num)
        with pytest.raises(ValueError, match=f"^{name} must be passed to update"):
            tx.update(x, tx.init(x), x, **given)
    with pytest.raises(ValueError, match=r"extra_evaluations must be 0 or 1; got 3\."):
        zo.scale_by_parabolic_step(extra_evaluations=3)
    with pytest.raises(ValueError, match="initial_step_size must be"):
        zo.scale_by_parabolic_step(initial_step_size=-1.0)
    with pytest.raises(
        TypeError, match=r"extra_evaluations must be an int.*static_args"
    ):
        optax.inject_hyperparams(zo.scale_by_parabolic_step)(extra_evaluations=1).init(
            x
        )


def test_updates_have_the_dtypes_of_the_directions():
    params = {"h": jnp.ones(3, jnp.bfloat16), "f": jnp.ones(2)}
    result = zo.minimize(
        lambda p: jnp.sum(p["h"].astype(jnp.float32) ** 2) + jnp.sum(p["f"] ** 2),
        params,
        zo.parabolic_sgd(),
        zo.forward_difference(Hashed(), smoothing=0.5),
        num_steps=30,
        key=0,
        progress=False,
    )
    assert result.params["h"].dtype == jnp.bfloat16
    assert result.values[-1] < result.values[0]
