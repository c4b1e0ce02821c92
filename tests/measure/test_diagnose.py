"""`diagnose`: measurements by a few evaluations before a run, and its report."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import called
from tests.helpers.tables import slow

ESTIMATOR = zo.forward_difference(smoothing=0.1)
START = np.linspace(0.5, 1.5, 9, dtype=np.float32)
VALUE = np.sum(np.asarray(START, np.float64) ** 2) / 2


def test_measures_a_quadratic(capsys):
    """f = |x|²/2: the curvature over the slope is μ / 2|u·∇f|."""
    points = []

    def fun(x):
        points.append(np.asarray(x, np.float64))
        return float(np.sum(points[-1] ** 2) / 2)

    found = zo.diagnose(fun, START, ESTIMATOR, 0)
    at_start, above, below = np.split(np.stack(points).reshape(4, 3, 9), 3, axis=1)
    np.testing.assert_array_equal(at_start, np.broadcast_to(START, (4, 1, 9)))
    above, below = above[:, 0], below[:, 0]
    around = np.concatenate([above, below])
    np.testing.assert_allclose(above + below, 2 * np.stack([START] * 4), rtol=1e-6)
    moved = np.sum(around**2, 1) / 2 - VALUE
    slopes = np.sum(above**2 - below**2, 1) / 4
    assert len(points) == 12
    np.testing.assert_allclose(found.value, VALUE, rtol=1e-6)
    np.testing.assert_allclose(found.difference, np.sqrt(np.mean(moved**2)), rtol=1e-6)
    expected = (0.1**2 / 2) / np.sqrt(np.mean(slopes**2))
    np.testing.assert_allclose(found.curvature, expected, rtol=1e-4)
    assert (found.noise, found.advice, found.smoothing) == (0, (), None)
    assert found.ulp == np.spacing(np.float32(VALUE))
    assert str(found) == repr(found) and "→ nothing to change" in str(found)
    assert capsys.readouterr().out == ""


def test_measures_a_traced_function_with_its_smoothing():
    """The mean square of u·∇f over the sphere is |∇f|²/d, of 20 directions."""

    def fun(x):
        return jnp.sum(x**2) / 2

    found = zo.diagnose(fun, START, ESTIMATOR, 0)
    alone = zo.find_smoothing(fun, START)
    assert found.smoothing.smoothing == alone.smoothing
    assert f"smoothing               {alone.smoothing:.3g}" in str(found)
    # A root of the mean of 20 squares is within 2.5 · √(2/20)/2 of the expected one.
    expected = 0.1 * np.sqrt(2 * VALUE / 9)
    np.testing.assert_allclose(found.difference, expected, rtol=0.4)
    np.testing.assert_allclose(found.value, VALUE, rtol=1e-6)
    assert (found.noise, found.advice) == (0, ())


INPUTS = jax.random.normal(jax.random.key(0), (64, 9))


def rounded(x):
    """A function with steps of 1/4, of which directions cross none or some."""
    return jnp.mean(jnp.round(4 * INPUTS @ x) ** 2) / 16


def partly_binary(x):
    """Short differences agree with each other, because they show only x[0]."""
    signs = jnp.sign(x[1:] - 1) * jnp.mean(jnp.abs(x))
    return jnp.mean((jnp.tanh(INPUTS[:, 1:] @ signs + x[0]) - INPUTS[:, 0]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fun, factors",
    [(rounded, [1 / 64, 1.0]), (partly_binary, [1 / 64, 1 / 8, 1 / 2, 1, 2, 16])],
)
def test_a_smoothing_that_it_would_not_choose_is_named(fun, factors):
    """And one within a factor of 2 of the measured one is not."""
    chosen = zo.find_smoothing(fun, START).smoothing
    for factor in factors:
        found = zo.diagnose(
            fun, START, zo.forward_difference(smoothing=factor * chosen)
        )
        advised = [f"take smoothing={chosen:.2g}" in advice for advice in found.advice]
        assert advised == [True] * (not 1 / 2 <= factor <= 2)


@pytest.mark.slow
def test_any_short_smoothing_of_a_smooth_function_will_do():
    def fun(x):
        return jnp.mean(jnp.tanh(INPUTS @ x) ** 2)

    chosen = zo.find_smoothing(fun, START).smoothing
    found = zo.diagnose(fun, START, zo.forward_difference(smoothing=chosen / 8))
    assert found.advice == ()


def noisy(slope, noise, seed):
    """A linear function with noise."""
    draws = np.random.default_rng(seed)
    return lambda x: float(slope * x[0] + noise * draws.normal())


def test_noise_is_separated_from_the_change():
    """There are 24 evaluations, and 15 degrees of freedom of the noise."""
    calls, fun = [], noisy(30.0, 0.1, 3)

    def recorded(x):
        calls.append(np.asarray(x, np.float64))
        return fun(x)

    found = zo.diagnose(recorded, np.zeros(10, np.float32), ESTIMATOR, 0)
    at_start = [x for x in calls if not x.any()]
    assert (len(at_start), len(calls)) == (16, 24)
    # χ² of 15 is within (4.6, 32.8) with a probability of 0.99.
    assert 0.1 * np.sqrt(4.6 / 15) < found.noise < 0.1 * np.sqrt(32.8 / 15)
    change = 30 * np.sqrt(np.mean([x[0] ** 2 for x in calls if x.any()]))
    # The noise of eight differences.
    np.testing.assert_allclose(found.difference, change, atol=3 * 0.1 / np.sqrt(8))
    hidden = zo.diagnose(noisy(0.0, 1.0, 1), np.zeros(10, np.float32), ESTIMATOR)
    assert hidden.difference < 0.5
    assert "the noise of fun hides its change" in hidden.advice[0]


@pytest.mark.slow
def test_the_noise_of_a_traced_function_is_seen():
    """20 times three values at θ: 40 degrees of freedom."""
    draws = np.random.default_rng(0)

    def fun(x):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        drawn = jax.pure_callback(
            lambda _: np.float32(draws.normal()), shape, x[0], vmap_method="sequential"
        )
        return jnp.sum(x) + drawn

    found = zo.diagnose(fun, START, ESTIMATOR)
    assert 0.6 < found.noise < 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, spacing",
    [(jnp.float32, np.spacing(np.float32(1e6))), (jnp.bfloat16, 2.0 ** (19 - 7))],
)
def test_spacings_are_those_of_the_loss(dtype, spacing):
    def fun(x):
        return (1e6 + jnp.sum(x**2)).astype(dtype)

    found = zo.diagnose(fun, START, ESTIMATOR, 0)
    assert found.ulp == spacing == float(ml_dtypes.finfo(dtype).eps) * 2.0**19
    assert found.advice


@pytest.mark.parametrize(
    "fun, estimator, advised",
    [
        (lambda x: 3.0, ESTIMATOR, "fun did not change: does it use its argument?"),
        slow(lambda x: jnp.sum(x) * 0 + 3, ESTIMATOR, "fun did not change"),
        (lambda x: float(1e6 + np.sum(x**2)), ESTIMATOR, "ulps: make smoothing"),
        (
            lambda x: float(np.sum((x - START) ** 2 + 0.01 * x)),
            ESTIMATOR,
            "curvature makes",
        ),
        (lambda x: 1 / 0, ESTIMATOR, "fun failed at 12 of 12 points"),
        (lambda x: np.nan, ESTIMATOR, "fun failed at 12 of 12 points"),
        slow(lambda x: jnp.sum(x) * jnp.nan, ESTIMATOR, "failed at 100 of 100 points"),
    ],
)
def test_advice_on_values(fun, estimator, advised):
    assert advised in zo.diagnose(fun, START, estimator).advice[0]


def test_a_minimum_of_zero_has_no_slope():
    """The values around it are 0.01, and so is their spacing."""
    found = zo.diagnose(lambda x: float(np.sum((x - START) ** 2)), START, ESTIMATOR)
    assert found.value == 0 and found.ulp == np.spacing(np.float32(0.01))
    (advice,) = found.advice
    assert advice.startswith("fun has no slope at params, as at a minimum")


def test_a_start_without_a_value_has_one_line_of_advice():
    found = zo.diagnose(lambda x: np.nan, START, ESTIMATOR)
    assert len(found.advice) == 1 and "start elsewhere" in found.advice[0]
    assert "difference" not in str(found) and "value at θ              nan" in str(
        found
    )


def test_failures_are_told():
    found = zo.diagnose(lambda x: 1 / 0, START, ESTIMATOR, 0)
    assert found.failures == ("ZeroDivisionError: division by zero",)
    assert "failed                  ZeroDivisionError" in str(found)


def weighed(params):
    x = jnp.ones((2, 64), jnp.bfloat16)
    small = jnp.sum(params["small"])
    return jnp.sum((x @ params["large"]).astype(jnp.float32)) + small


@pytest.mark.slow
@pytest.mark.parametrize(
    "distribution, share", [(zo.rademacher(), 1.0), (zo.low_rank(), 0.0)], ids=repr
)
def test_finds_what_is_rounded_away(distribution, share):
    """1e-4 of numbers whose spacing is 2⁻⁷; a matrix may be perturbed by factors."""
    params = {"large": jnp.full((64, 64), 1.5, jnp.bfloat16), "small": jnp.zeros(9)}
    estimator = zo.forward_difference(distribution, smoothing=1e-4)
    found = zo.diagnose(weighed, params, estimator)
    assert found.lost["['large']"] == share and found.lost["['small']"] < 1e-6
    warned = any("params['large'] loses 100%" in text for text in found.advice)
    assert warned == bool(share)


RUN = zo.zo_sgd(1e-3), zo.forward_difference(zo.rademacher(), smoothing=1e-4)
LARGE = {"large": jnp.full((64, 64), 1.5, jnp.bfloat16), "small": jnp.zeros(9)}


@pytest.mark.parametrize(
    "begin",
    [
        lambda: zo.train(weighed, LARGE, *RUN, num_steps=1, progress=False),
        slow(lambda: zo.solver(weighed, *RUN).init(LARGE, 0)),
        slow(lambda: called(lambda x: 0.0, LARGE, *RUN, num_steps=1, progress=False)),
    ],
)
def test_a_run_warns_of_what_is_rounded_away(begin):
    """1e-4 · 2⁶ is the first such distance of more than half of the spacing, 2⁻⁸."""
    expected = r"params\['large'\] loses 100%.*Take smoothing=0\.006 or more"
    with pytest.warns(UserWarning, match=expected):
        begin()


@pytest.mark.slow
def test_a_smoothing_that_was_measured_is_not_warned_of(recwarn):
    """A program may compute without the rounding, and the differences show it."""

    def loss(params, _):
        return jnp.mean(params.astype(jnp.float32) ** 2)

    options = {"sample": jax.random.uniform, "num_steps": 3, "progress": False}
    zo.train(loss, jnp.full(64, 1.5, jnp.bfloat16), **options)
    assert not recwarn.list


def batch_loss(params, noise):
    return 1 + jnp.mean((params - noise) ** 2)


def normals(key):
    return jax.random.normal(key, START.shape)


@pytest.mark.slow
def test_minibatches_have_the_settings_that_a_run_takes():
    options = {"sample": normals, "key": 3}
    found = zo.diagnose(batch_loss, jnp.asarray(START), ESTIMATOR, **options)
    rate = zo.find_learning_rate(batch_loss, jnp.asarray(START), None, **options)
    count = found.learning_rate.num_evaluations + found.smoothing.num_evaluations
    assert found.learning_rate._replace(num_evaluations=count) == rate
    assert repr(found.smoothing) in str(found)
    assert repr(found.learning_rate._replace(smoothing=None)) in str(found)
    # Minibatches differ between steps, but not between the points of one.
    assert found.noise == 0


@pytest.mark.slow
def test_minibatches_without_a_rate_have_the_reason():
    def fun(params, noise):
        return -1 - jnp.sum(params**2)

    found = zo.diagnose(fun, jnp.asarray(START), ESTIMATOR, sample=normals)
    assert found.learning_rate is None
    assert "no learning rate can be measured: fun must be positive" in found.advice[-1]


def test_bad_input_is_named():
    with pytest.raises(TypeError, match="estimator must be a GradientEstimator"):
        zo.diagnose(lambda x: 0.0, START, zo.sphere(), 0)
    with pytest.raises(TypeError, match="params must hold real floating-point"):
        zo.diagnose(lambda x: 0.0, np.arange(3), ESTIMATOR, 0)
    with pytest.raises(TypeError, match="a function that JAX traces with sample"):
        zo.diagnose(lambda x, b: 0.0, START, ESTIMATOR, sample=lambda key: 1.0)
