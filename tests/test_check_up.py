"""What a few evaluations tell before a run."""

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo

ESTIMATOR = zo.forward_difference(smoothing=0.1)
START = np.linspace(0.5, 1.5, 9, dtype=np.float32)


def test_measures_a_quadratic(capsys):
    """f = c|x|²/2: the curvature over the slope is μ c / 2|u·∇f|."""
    evaluations = []

    def fun(x):
        value = float(np.sum(np.asarray(x, np.float64) ** 2) / 2)
        evaluations.append(x)
        return value

    found = zo.check_up(fun, START, ESTIMATOR, 0)
    value = np.sum(np.asarray(START, np.float64) ** 2) / 2
    points = np.stack(evaluations[4:]).astype(np.float64)
    above, below = points[0::2], points[1::2]
    np.testing.assert_allclose(above + below, 2 * np.stack([START] * 4), rtol=1e-6)
    moved = np.sum(above**2, 1) / 2 - value
    slopes = np.sum(above**2 - below**2, 1) / 4
    assert len(evaluations) == 12
    np.testing.assert_allclose(found.value, value, rtol=1e-6)
    np.testing.assert_allclose(found.difference, np.sqrt(np.mean(moved**2)), rtol=1e-6)
    expected = (0.1**2 / 2) / np.sqrt(np.mean(slopes**2))
    np.testing.assert_allclose(found.curvature, expected, rtol=1e-4)
    assert found.noise == 0
    assert found.ulp == np.spacing(np.float32(value))
    assert found.advice == ()
    assert "nothing to mend" in capsys.readouterr().out


def test_is_the_same_for_what_can_be_traced():
    outside = zo.check_up(lambda x: float(np.sum(x**2)), START, ESTIMATOR, 0)
    compiled = zo.check_up(lambda x: jnp.sum(x**2), jnp.asarray(START), ESTIMATOR, 0)
    np.testing.assert_allclose(compiled.difference, outside.difference, rtol=1e-3)
    np.testing.assert_allclose(compiled.curvature, outside.curvature, rtol=1e-2)


@pytest.mark.parametrize(
    "shifted",
    [
        zo.prior_guided(smoothing=0.1),
        zo.variance_reduced(smoothing=0.1),
        zo.accelerated(ESTIMATOR),
    ],
)
def test_leaves_out_the_tree_beside_which_points_lie(shifted):
    """It is zero before the first step, and the directions are the same."""
    expected = zo.check_up(lambda x: float(np.sum(x**2)), START, ESTIMATOR, 0)
    found = zo.check_up(lambda x: float(np.sum(x**2)), START, shifted, 0)
    assert found == expected


def test_finds_noise():
    draws = np.random.default_rng(0)
    quiet = float(np.sum(START**2))
    found = zo.check_up(lambda x: quiet + draws.normal(), START, ESTIMATOR, 0)
    assert 0.3 < found.noise < 3
    assert "the noise of fun hides its change" in found.advice[0]


def test_finds_differences_of_few_ulps():
    found = zo.check_up(lambda x: 1e6 + jnp.sum(x**2), START, ESTIMATOR, 0)
    assert found.ulp == np.spacing(np.float32(1e6))
    assert "ulps: make smoothing" in found.advice[0]


def test_finds_curvature():
    found = zo.check_up(lambda x: 1e4 * jnp.sum((x - START) ** 4), START, ESTIMATOR, 0)
    assert "curvature makes" in found.advice[0]


def test_finds_failures():
    found = zo.check_up(lambda x: 1 / 0, START, ESTIMATOR, 0)
    assert found.failures == ("ZeroDivisionError: division by zero",)
    assert "fun failed at 12 of 12 points" in found.advice[0]


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_finds_that_all_values_are_without_use(value):
    for fun in (lambda x: value, lambda x: jnp.sum(x) * value):
        found = zo.check_up(fun, START, ESTIMATOR, 0)
        assert "fun failed at 12 of 12 points" in found.advice[0]


@pytest.mark.slow
def test_finds_what_is_rounded_away():
    """0.1/√d per element, of numbers whose spacing is 2⁻⁷ between 1 and 2."""
    params = {"small": jnp.zeros(9), "large": jnp.full(1000, 1.5, jnp.bfloat16)}
    sphere = zo.forward_difference(smoothing=0.01)

    def fun(params):
        return jnp.sum(params["large"].astype(jnp.float32)) + jnp.sum(params["small"])

    found = zo.check_up(fun, params, sphere, 0)
    assert found.lost["['large']"] == 1
    assert found.lost["['small']"] < 1e-6
    assert any("params['large'] loses 100%" in text for text in found.advice)
    for estimator in (sphere, zo.accelerated(sphere)):
        with pytest.warns(UserWarning, match=r"params\['large'\] loses 100%"):
            zo.minimize(fun, params, zo.zo_sgd(1e-3), estimator, 1, 0, progress=False)


def test_factors_of_low_rank_lose_nothing():
    params = {"w": jnp.full((64, 64), 1.5, jnp.bfloat16)}
    estimator = zo.forward_difference(zo.low_rank(), smoothing=1e-4)

    def fun(params):
        x = jnp.ones((2, 64), jnp.bfloat16)
        return jnp.sum((x @ params["w"]).astype(jnp.float32))

    assert zo.check_up(fun, params, estimator, 0).lost["['w']"] == 0


def test_bad_input_is_named():
    with pytest.raises(TypeError, match="estimator must be a GradientEstimator"):
        zo.check_up(lambda x: 0.0, START, zo.sphere(), 0)
    with pytest.raises(TypeError, match="params must hold real floating-point"):
        zo.check_up(lambda x: 0.0, np.arange(3), ESTIMATOR, 0)
