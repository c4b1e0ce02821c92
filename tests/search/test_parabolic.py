"""The step size by parabolas, against closed forms, and on hard functions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from radazo_jax.estimators import Lookahead
from radazo_jax.search import Descent
from tests.helpers.compare import Hashed
from tests.helpers.searches import REJECTED, descend, descent, step
from tests.helpers.tables import jit, slow

CURVATURES = np.array([1.0, 2.0, 5.0, 3.0])
START = np.array([1.0, -2.0, 0.5, 1.5])


def loss(x):
    return jnp.sum(CURVATURES.astype(x.dtype) * x**2) / 2


@pytest.mark.parametrize("extra_evaluations", [0, 1])
def test_on_a_sphere_the_second_step_is_newtons(extra_evaluations):
    search = zo.search.parabolic(0.0, extra_evaluations, initial_step_size=0.1)
    xs, state, _ = descend(
        lambda x: 1.5 * jnp.sum(x**2), START.astype(np.float32), search, 2
    )
    np.testing.assert_allclose(xs[1], 0.7 * START, rtol=1e-5)
    np.testing.assert_allclose(state.step_size, 1 / 3, rtol=1e-3)
    np.testing.assert_allclose(xs[2], 0, atol=2e-3)


def test_measures_the_parabola_along_any_direction():
    along = np.array([-1.0, 1.0, 0.25, 0.0])
    search = zo.search.parabolic(0.0, 1, initial_step_size=0.125)
    xs, state, _ = descend(
        loss, START.astype(np.float32), search, 2, lambda x, t: jnp.float32(along)
    )
    slope = -(CURVATURES * START) @ along / (along @ along)
    curvature = along @ (CURVATURES * along) / (along @ along)
    np.testing.assert_allclose(state.slope, slope, rtol=1e-4)
    np.testing.assert_allclose(state.curvature, curvature, rtol=1e-4)
    np.testing.assert_allclose(xs[1], START + 0.125 * along)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_averages_are_those_of_the_formula(dtype):
    decay, num = 0.7, 8
    search = zo.search.parabolic(decay, initial_step_size=0.15)
    with jax.enable_x64(dtype == "float64"):
        xs, state, values = descend(loss, START.astype(dtype), search, num)
    rtol, atol = (1e-2, 1e-5) if dtype == "float32" else (1e-9, 1e-12)
    x, size, average, step = START, 0.15, 0, START
    for t in range(num):
        if t > 0:
            measured = step @ (CURVATURES * step) / (step @ step)
            # The first is of the right scale, and ends the search.
            weight = min(decay, (t - 1) / t)
            average = weight * average + (1 - weight) * measured
            size = 1 / average
        step = -size * CURVATURES * x
        np.testing.assert_allclose(xs[t + 1] - xs[t], step, rtol=rtol, atol=atol)
        np.testing.assert_allclose(values[t], CURVATURES @ x**2 / 2, rtol=rtol)
        x = x + step
    np.testing.assert_allclose(state.step_size, size, rtol=rtol)


@pytest.mark.parametrize("extra_evaluations", [0, 1])
@pytest.mark.parametrize("size", [1e-6, 1e6, 1e12])
def test_the_first_step_size_may_be_wrong(size, extra_evaluations):
    search = zo.search.parabolic(0.8, extra_evaluations, initial_step_size=size)
    _, state, values = descend(loss, START.astype(np.float32), search, 60)
    assert np.isfinite(values[-1]) and values[-1] < 1e-3 * values[0]
    assert 1e-3 < float(state.step_size) < 1


def test_without_a_first_size_the_scale_of_the_loss_does_not_matter():
    def values(scale):
        search, start = zo.search.parabolic(), START.astype(np.float32)
        return descend(lambda x: scale * loss(x), start, search, 40)[2]

    expected = values(1.0)
    for scale in (1e-12, 1e12):
        found = values(scale)
        np.testing.assert_allclose(found[:10] / scale, expected[:10], rtol=1e-2)
        assert found[-1] < 1e-3 * found[0]


def test_in_float64_it_goes_to_the_rounding_of_float64():
    with jax.enable_x64(True):
        _, state, values = descend(loss, START, zo.search.parabolic(), 200)
    assert state.step_size.dtype == state.value.dtype == jnp.float64
    assert values[-1] < 1e-20 * values[0]


def test_a_step_to_nothing_is_taken_back():
    """The loss is finite near the start alone."""

    def fun(x):
        return jnp.where(jnp.max(abs(x)) > 3, jnp.nan, loss(x) + 1000)

    search = zo.search.parabolic(initial_step_size=10.0)
    xs, _, values = descend(fun, START.astype(np.float32), search, 40)
    assert np.isnan(values[1]) and (xs[2] == xs[0]).all()
    assert values[2] == values[0]
    assert np.isfinite(values[2:]).all() and loss(xs[-1]) < 0.1


def test_a_step_that_grew_unseen_is_taken_back():
    """The curvature is the known one, 1, and the size ten times its inverse."""
    search = zo.search.parabolic(initial_step_size=1.0)
    x, down = jnp.zeros(1), -jnp.ones(1)

    @jit
    def one_step(state, x, direction, value, slope):
        return step(search, state, x, descent(direction, value, slope))

    x, state, _ = one_step(search.init(x), x, 30 * down, 1000.0, 900.0)
    for _ in range(11):
        before = x
        x, state, _ = one_step(state, x, down, 550.0, 1.0)
    size = float(state.step_size)
    assert 5 < size < 20
    value = 550 - size + size**2 / 2
    after, state, accepted = one_step(state, x, down, value, 1.0)
    assert not accepted
    np.testing.assert_array_equal(after, before)
    np.testing.assert_allclose(state.step_size, 1.0, rtol=1e-3)


@pytest.mark.parametrize(
    ("value", "slope"), [(np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan), (1.0, 0.0)]
)
def test_no_step_where_value_or_slope_say_nothing(value, slope):
    search = zo.search.parabolic(initial_step_size=0.1)
    x = jnp.ones(3)
    state = search.init(x)
    after, moved, _ = step(search, state, x, descent(-x, value, slope))
    np.testing.assert_array_equal(after, x)
    assert not moved.pending and moved.step_size == state.step_size
    after, _, _ = step(search, moved, x, descent(-x, 1.0, 3.0))
    np.testing.assert_allclose(after, 0.9, rtol=1e-6)


def test_negative_curvature_lengthens_the_step_and_ends():
    def well(x):
        return jnp.sum(x**4 - x**2)

    xs, _, values = descend(
        well, np.full(3, 1e-3, np.float32), zo.search.parabolic(), 80
    )
    np.testing.assert_allclose(abs(xs[-1]), 0.5**0.5, rtol=1e-2)
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
        optax.sgd(1.0),
        zo.central_difference(zo.orthonormal(), smoothing=smoothing),
        zo.search.parabolic(0.8, extra_evaluations),
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
        optax.sgd(1.0),
        zo.forward_difference(zo.orthonormal()),
        zo.search.parabolic(),
        num_steps=220,
        key=seed,
        progress=False,
    )
    # One above it is taken back, and followed by one that is not.
    above = result.values > result.values[0]
    assert above.any() and not (above[1:] & above[:-1]).any()


def test_a_first_step_along_any_direction_is_as_long_as_one_along_the_estimate():
    gradient, direction = jnp.array([3.0, 4.0]), jnp.array([-1e5, 0.0])
    search = zo.search.parabolic(extra_evaluations=1)
    found = descent(direction, 7.0, 50.0, gradient=gradient, loss=lambda params: 0.0)
    after, _ = search.move(search.init(jnp.zeros(2)), jnp.zeros(2), found)
    # A fiftieth of 7 by the slope of 50 / |ĝ|.
    np.testing.assert_allclose(after, [-7 / 50 / 10, 0.0], rtol=1e-6)


AHEAD = jnp.array([0.0, 3.0])


def from_ahead(value, value_ahead):
    """A direction of length 2 from a lookahead point, with the losses at both."""
    lookahead = Lookahead(AHEAD, jnp.float32(value_ahead))
    return descent(jnp.array([-2.0, 0.0]), value, 4.0, lookahead=lookahead)


def test_a_step_from_the_lookahead_point_is_measured_from_there():
    """If it is rejected, the run returns to the parameters before it."""
    search, params = zo.search.parabolic(initial_step_size=0.5), jnp.zeros(2)
    moved, state, _ = step(search, search.init(params), params, from_ahead(1.0, 5.0))
    size = float(state.step_size)
    np.testing.assert_allclose(moved, AHEAD + size * jnp.array([-2.0, 0.0]))
    np.testing.assert_allclose(state.square, size**2 * 4, rtol=1e-6)
    # The loss falls from 5 to 5 − 4η/2, half of the fall by the slope, so η is right.
    value = 5.0 - 2.0 * size
    _, after, accepted = step(search, state, moved, from_ahead(value, value))
    assert accepted
    np.testing.assert_allclose(after.step_size, size, rtol=1e-5)
    back, _, accepted = step(search, state, moved, from_ahead(np.nan, 5.0))
    assert not accepted
    np.testing.assert_array_equal(back, params)


def test_no_step_starts_at_a_lookahead_point_above_the_first_loss():
    search, params = zo.search.parabolic(initial_step_size=0.5), jnp.zeros(2)
    params, state, _ = step(search, search.init(params), params, from_ahead(10.0, 10.0))
    # Down by 1, half of the fall by the slope: a good step, but the lookahead point
    # is above the first loss.
    stays, state, accepted = step(search, state, params, from_ahead(9.0, 11.0))
    assert accepted
    np.testing.assert_array_equal(stays, params)
    after, state, _ = step(search, state, params, from_ahead(9.0, 9.5))
    # The two values belong to the same parameters, and are equal.
    assert state.noise == 0
    size = float(state.step_size)
    np.testing.assert_allclose(
        after, params + AHEAD + size * jnp.array([-2.0, 0.0]), rtol=1e-6
    )


@pytest.mark.parametrize("bounds", [None, (-0.2, 3.0)])
def test_the_measured_step_is_the_one_from_the_lookahead_point(bounds):
    """After a reset of the momentum and along a bound, too."""
    scales = jnp.logspace(0, 2, 12)
    plain = zo.forward_difference(Hashed(), 3, 1e-3)
    estimator, search = zo.accelerated(plain), zo.search.parabolic()

    def fun(x):
        return jnp.sum(scales * x**2)

    def project(x):
        return x if bounds is None else jnp.clip(x, *bounds)

    trees = bounds and tuple(jnp.full(12, b, jnp.float32) for b in bounds)

    @jit
    def once(key, x, state, search_state):
        draw = zo.estimators.Draw.once(key)._replace(bounds=trees)
        points, state = estimator.points(draw, x, state)
        at = jax.vmap(project)(zo.estimators.candidates(points, x))
        values = points.split(jax.vmap(fun)(at))
        estimate, state = estimator.reduce(points, values, x, state)
        gradient = estimate.gradient.materialize(x)
        found = Descent(-gradient, gradient, estimate, values.base, project, None)
        after, search_state, accepted = step(search, search_state, x, found)
        start = x + estimate.lookahead.displacement
        moved = accepted & search_state.pending
        return after, state, search_state, (start, moved, estimate.slope)

    x = jnp.linspace(0.5, 2.5, 12)
    state, search_state = estimator.init(x), search.init(x)
    resets = clipped = 0
    for t in range(60):
        x, state, search_state, (start, moved, slope) = once(
            jax.random.key(t), x, state, search_state
        )
        if not moved:
            continue
        square = float(jnp.sum((x - start) ** 2))
        np.testing.assert_allclose(search_state.square, square, rtol=1e-2)
        fall = search_state.step_size * slope
        np.testing.assert_allclose(search_state.fall, fall, rtol=1e-5)
        resets += int(state.share == 0) and t * 3 >= 12
        clipped += float(search_state.share) < 1
    assert resets and bool(clipped) == (bounds is not None)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"extra_evaluations must be 0 or 1; got 3\."):
        zo.search.parabolic(extra_evaluations=3)
    with pytest.raises(ValueError, match="initial_step_size must be"):
        zo.search.parabolic(initial_step_size=-1.0)
    with pytest.raises(ValueError, match="decay must be"):
        zo.search.parabolic(1.0)


def test_numbers_are_compared_as_floats():
    search = zo.search.parabolic(np.float32(0.5), initial_step_size=jnp.ones(()))
    assert search == zo.search.parabolic(0.5, initial_step_size=1)
    assert hash(search) == hash(zo.search.parabolic(0.5, initial_step_size=1))


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [None, (0.0, 1.0)])
def test_a_step_that_raises_the_loss_too_much_is_rejected(bounds):
    """A first step a thousand times too long, with momentum in the direction."""
    search = zo.search.parabolic(extra_evaluations=1, initial_step_size=1e3)
    init, step = zo.solver(
        lambda x: jnp.sum((x - 1.0) ** 2),
        zo.radazo(1.0),
        zo.forward_difference(Hashed(), num_directions=4),
        search,
        bounds=bounds,
    )
    first = init(jnp.full(20, 0.3), 0)
    step = jit(step)
    second, _ = step(first)
    third, info = step(second)
    # Within bounds the step ends at a corner, and the loss rises from 9.8 to 11.
    assert info.value > 9.8 and info.outcome == REJECTED
    assert (third.params == first.params).all()


def test_updates_have_the_dtypes_of_the_directions():
    params = {"h": jnp.ones(3, jnp.bfloat16), "f": jnp.ones(2)}
    result = zo.minimize(
        lambda p: jnp.sum(p["h"].astype(jnp.float32) ** 2) + jnp.sum(p["f"] ** 2),
        params,
        optax.sgd(1.0),
        zo.forward_difference(Hashed(), smoothing=0.5),
        zo.search.parabolic(),
        num_steps=30,
        key=0,
        progress=False,
    )
    assert result.params["h"].dtype == jnp.bfloat16
    assert result.values[-1] < result.values[0]
