"""Backtracking, against the rule in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.searches import REJECTED, TAKEN, descend, descent, step
from tests.helpers.tables import jit

CURVATURES = np.array([1.0, 3.0, 7.0, 30.0])
START = np.array([1.0, -2.0, 0.5, 1.5])


def rule(fun, grad, x, num_steps):
    """The parameters before each step, and which steps were rejected, in NumPy."""
    found, rejected = [x], []
    start, value, direction, size, slope, tries = x, None, None, 1.0, 0.0, 0
    for t in range(num_steps):
        now = fun(x)
        accepted = t == 0 or now < value + 0.1 * slope if slope < 0 else True
        rejected.append(not accepted)
        if accepted:
            start, value, direction = x, now, -grad(x)
            size, slope, tries = 1.0, grad(x) @ -grad(x), 0
        else:
            rise = 2 * (now - value - slope)
            share = np.clip(-slope / rise, 0.1, 0.5) if rise > 0 else 0.5
            if not np.isfinite(now):
                share = 0.9 if tries == 0 else 0.5
            tries += 1
            share = 0.0 if tries >= 9 else share
            size, slope = size * share, slope * share
        x = start + size * direction
        found.append(x)
    return np.array(found), np.array(rejected)


def valley(x, np=jnp):
    """It fails far from the minimum."""
    value = np.sum(CURVATURES * x**2) / 2
    return np.where(value > 1e4, np.nan, value)


@pytest.mark.parametrize("scale", [1.0, 0.01, 5.0])
def test_is_the_rule(scale):
    def scaled(x, np=jnp):
        return valley(scale * x, np)

    def grad(x):
        return scale**2 * CURVATURES * x

    expected, rejected = rule(lambda x: scaled(x, np), grad, START, 60)
    with jax.enable_x64(True):
        found, _, _ = descend(
            scaled, START, zo.search.backtracking(), 60, lambda x, t: -grad(x)
        )
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    assert rejected.any() == (scale >= 1)


def test_a_step_is_accepted_below_its_limit_alone():
    search, params = zo.search.backtracking(), jnp.zeros(2)
    found = descent(jnp.array([-2.0, 0.0]), 5.0, 4.0)
    after, state, _ = step(search, search.init(params), params, found)
    np.testing.assert_array_equal(after, [-2.0, 0.0])
    np.testing.assert_allclose(state.limit, 5 - 0.1 * 4, rtol=1e-6)
    below = jnp.nextafter(state.limit, -jnp.inf)
    for value, accepted in ((below, True), (state.limit, False), (jnp.nan, False)):
        assert search.judge(state, after, jnp.float32(value))[0] == accepted


@pytest.mark.parametrize(("noisy", "tries"), [(False, 9), (True, 4)])
def test_a_direction_that_leads_nowhere_is_left(noisy, tries):
    search, params = zo.search.backtracking(), jnp.array([0.3, 0.7])
    found = descent(jnp.array([-1.0, 1.0]), 1.0, 2.0, noisy=noisy)
    x, state, _ = step(search, search.init(params), params, found)
    failed = descent(jnp.zeros(2), jnp.nan, 0.0)
    sizes = [float(state.step_size)]
    for _ in range(tries):
        assert (x != params).any()
        x, state, accepted = step(search, state, x, failed)
        assert not accepted
        sizes.append(float(state.step_size))
    np.testing.assert_array_equal(x, params)
    halves = 0.9 * 0.5 ** np.arange(tries - 1)
    np.testing.assert_allclose(sizes, [1, *halves, 0], rtol=1e-6)
    # The gradient is then estimated anew, whatever the value is.
    assert search.judge(state, x, jnp.float32(jnp.nan))[0]


def test_a_direction_of_ascent_is_not_taken():
    search, params = zo.search.backtracking(), jnp.array([0.3, 0.7])
    for gradient in ([-1.0, 1.0], [0.0, 0.0], [np.nan, 0.0]):
        found = descent(jnp.array([-1.0, 1.0]), 1.0, 2.0, gradient=jnp.array(gradient))
        after, state, _ = step(search, search.init(params), params, found)
        np.testing.assert_array_equal(after, params)
        assert search.judge(state, after, jnp.float32(2.0))[0]


def test_the_slope_is_that_of_the_step_within_the_bounds():
    search, params = zo.search.backtracking(), jnp.array([0.5, 0.5])
    found = descent(
        jnp.array([-1.0, -0.25]), 1.0, 2.0, project=lambda x: jnp.clip(x, 0.0, 1.0)
    )
    after, state, _ = step(search, search.init(params), params, found)
    np.testing.assert_array_equal(after, [0.0, 0.25])
    np.testing.assert_allclose(state.slope, -0.5 * 1.0 - 0.25**2, rtol=1e-6)


def test_bfgs_fixes_the_coordinates_at_bounds():
    """A step to a bound ends on it exactly, and not a rounding error inside."""
    center = np.linspace(-2, 2, 6).astype(np.float32)
    low, high = np.float32(-0.7), np.float32(0.9)
    matrix = np.eye(6, dtype=np.float32) + 0.3

    def fun(x):
        return (x - center) @ matrix @ (x - center)

    init, step = zo.solver(
        fun,
        zo.bfgs(),
        zo.full_difference(),
        zo.search.backtracking(),
        bounds=(low, high),
    )

    def body(state, _):
        after, info = step(state)
        return after, (info.value, state.params)

    def run(start):
        """The best of the parameters."""
        values, params = jax.lax.scan(body, init(start, 0), length=40)[1]
        return params[jnp.argmin(values)]

    starts = jax.random.uniform(jax.random.key(0), (20, 6), minval=low, maxval=high)
    ends = np.asarray(jit(jax.vmap(run))(starts))
    # The minimum in the box, by projected gradients in float64.
    best = np.zeros(6)
    for _ in range(5000):
        best = np.clip(best - 0.1 * matrix @ (best - center), low, high)
    at_low, at_high = best <= low + 1e-6, best >= high - 1e-6
    assert at_low.any() and at_high.any() and not (at_low | at_high).all()
    assert (ends[:, at_low] == low).all() and (ends[:, at_high] == high).all()
    np.testing.assert_allclose(ends, np.tile(best, (20, 1)), atol=5e-3)


def test_a_rejected_step_needs_one_value():
    """Other values do not change the run, nor what the estimator remembers."""

    def fun(x):
        return jnp.sum(jnp.asarray(CURVATURES, x.dtype) * x**2)

    method = optax.sgd(1.0), zo.full_difference(), zo.search.backtracking()
    whole, one = (zo.ask_tell(START.astype(np.float32), *method) for _ in range(2))
    alone = 0
    for _ in range(30):
        points, _ = whole.ask(), one.ask()
        values = np.array([fun(x) for x in points])
        whole.tell(values)
        if values[0] < one.state.search_state.limit:
            one.tell(values)
        else:
            alone += 1
            one.tell(values[:1])
        for a, b in zip(*map(jax.tree.leaves, (whole.state, one.state)), strict=True):
            if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(a, b)
    assert 0 < alone < 30


def test_rejected_steps_are_rejected_once_each():
    init, step = zo.solver(
        lambda x: jnp.sum(30 * x**2),
        optax.sgd(1.0),
        zo.full_difference(),
        zo.search.backtracking(),
    )
    state, step = init(jnp.ones(3), 0), jit(step)
    outcomes = []
    for _ in range(8):
        state, info = step(state)
        outcomes.append(int(info.outcome))
    # f(θ) is evaluated twice at the start.
    assert set(outcomes[1:]) == {TAKEN, REJECTED}
    assert outcomes[:2] == [zo.runs.Outcome.INCOMPLETE, TAKEN]
