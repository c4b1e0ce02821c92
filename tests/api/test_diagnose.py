"""`diagnose`: measurements by a few evaluations before a run."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed

ESTIMATOR = zo.forward_difference(smoothing=0.1)
START = np.linspace(0.5, 1.5, 9, dtype=np.float32)


def test_measures_a_quadratic(capsys):
    """f = c|x|²/2: the curvature over the slope is μ c / 2|u·∇f|."""
    evaluations = []

    def fun(x):
        value = float(np.sum(np.asarray(x, np.float64) ** 2) / 2)
        evaluations.append(x)
        return value

    found = zo.diagnose(fun, START, ESTIMATOR, 0)
    value = np.sum(np.asarray(START, np.float64) ** 2) / 2
    points = np.stack(evaluations[4:]).astype(np.float64)
    above, below = points[0::2], points[1::2]
    np.testing.assert_allclose(above + below, 2 * np.stack([START] * 4), rtol=1e-6)
    moved = np.sum(points**2, 1) / 2 - value
    slopes = np.sum(above**2 - below**2, 1) / 4
    assert len(evaluations) == 12
    np.testing.assert_allclose(found.value, value, rtol=1e-6)
    np.testing.assert_allclose(found.difference, np.sqrt(np.mean(moved**2)), rtol=1e-6)
    expected = (0.1**2 / 2) / np.sqrt(np.mean(slopes**2))
    np.testing.assert_allclose(found.curvature, expected, rtol=1e-4)
    assert found.noise == 0
    assert found.difference_range == (found.difference, found.difference)
    assert found.ulp == np.spacing(np.float32(value))
    assert found.advice == ()
    assert "nothing to mend" in str(found)
    assert capsys.readouterr().out == ""


def test_is_the_same_for_what_can_be_traced():
    outside = zo.diagnose(lambda x: float(np.sum(x**2)), START, ESTIMATOR, 0)
    compiled = zo.diagnose(lambda x: jnp.sum(x**2), jnp.asarray(START), ESTIMATOR, 0)
    np.testing.assert_allclose(compiled.difference, outside.difference, rtol=1e-3)
    np.testing.assert_allclose(compiled.curvature, outside.curvature, rtol=1e-2)


def noisy_linear(slope, noise, seed):
    """A linear function of ten numbers, with noise."""
    draws = np.random.default_rng(seed)
    return lambda x: float(slope * x[0] + noise * draws.normal())


TEN = np.zeros(10, np.float32)


@pytest.mark.slow
def test_ranges_cover_the_true_noise_and_the_true_change():
    """Each of 60 ranges misses with probability 0.05: more than 9 have p < 0.002."""
    noise, missed = 0.1, np.zeros(2)
    estimator = zo.forward_difference(Hashed(), smoothing=0.1)
    for seed, slope in itertools.product(range(20), (0.1, 1.0, 30.0)):
        points, fun = [], noisy_linear(slope, noise, seed)

        def recorded(x, fun=fun, points=points):
            value = fun(x)
            points.append(x)
            return value

        found = zo.diagnose(recorded, TEN, estimator, seed)
        moved = np.array([x[0] for x in points if x.any()], np.float64)
        change = slope * np.sqrt(np.mean(moved**2))
        for i, (true, (least, most)) in enumerate(
            [(noise, found.noise_range), (change, found.difference_range)]
        ):
            missed[i] += not least <= true <= most
        assert 0.6 * noise < found.noise < 1.5 * noise  # Of 39 degrees of freedom.
    assert np.all(missed <= 9), missed


def test_tiny_noise_leaves_a_narrow_range_of_the_change():
    found = zo.diagnose(noisy_linear(30.0, 1e-6, 0), TEN, ESTIMATOR)
    least, most = found.difference_range
    assert 0 < least <= found.difference <= most < least + 1e-5


def test_noise_is_not_called_a_difference():
    draws = np.random.default_rng(0)
    quiet = float(np.sum(START**2))
    found = zo.diagnose(lambda x: quiet + draws.normal(), START, ESTIMATOR, 0)
    assert found.difference < 0.5
    assert found.difference_range[0] == 0
    assert "the noise of fun hides its change" in found.advice[0]


def test_noisy_values_are_evaluated_more_often():
    calls, draws = [], np.random.default_rng(0)

    def fun(x):
        calls.append(np.asarray(x))
        return draws.normal()

    zo.diagnose(fun, START, ESTIMATOR)
    at_start = [x for x in calls if np.array_equal(x, START)]
    assert (len(at_start), len(calls)) == (16, 48)


@pytest.mark.parametrize("fun", [lambda x: 3.0, lambda x: jnp.float32(3.0)])
def test_says_that_a_function_does_not_change(fun):
    found = zo.diagnose(fun, START, ESTIMATOR)
    assert found.advice[0].startswith("fun did not change: does it use its argument?")


def test_finds_differences_of_few_ulps():
    found = zo.diagnose(lambda x: 1e6 + jnp.sum(x**2), START, ESTIMATOR, 0)
    assert found.ulp == np.spacing(np.float32(1e6))
    assert "ulps: make smoothing" in found.advice[0]


def test_finds_curvature():
    found = zo.diagnose(lambda x: 1e4 * jnp.sum((x - START) ** 4), START, ESTIMATOR, 0)
    assert "curvature makes" in found.advice[0]


def test_finds_failures():
    found = zo.diagnose(lambda x: 1 / 0, START, ESTIMATOR, 0)
    assert found.failures == ("ZeroDivisionError: division by zero",)
    assert "fun failed at 12 of 12 points" in found.advice[0]


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_finds_that_all_values_are_without_use(value):
    for fun in (lambda x: value, lambda x: jnp.sum(x) * value):
        found = zo.diagnose(fun, START, ESTIMATOR, 0)
        assert "fun failed at 12 of 12 points" in found.advice[0]


@pytest.mark.slow
def test_finds_what_is_rounded_away():
    """0.1/√d per element, of numbers whose spacing is 2⁻⁷ between 1 and 2."""
    params = {"small": jnp.zeros(9), "large": jnp.full(1000, 1.5, jnp.bfloat16)}
    sphere = zo.forward_difference(smoothing=0.01)

    def fun(params):
        return jnp.sum(params["large"].astype(jnp.float32)) + jnp.sum(params["small"])

    found = zo.diagnose(fun, params, sphere, 0)
    assert found.lost["['large']"] == 1
    assert found.lost["['small']"] < 1e-6
    assert any("params['large'] loses 100%" in text for text in found.advice)
    with pytest.warns(UserWarning, match=r"params\['large'\] loses 100%"):
            zo.minimize(
                fun,
                params,
                zo.zo_sgd(1e-3),
                estimator,
                num_steps=1,
                key=0,
                progress=False,
            )


def test_factors_of_low_rank_lose_nothing():
    params = {"w": jnp.full((64, 64), 1.5, jnp.bfloat16)}
    estimator = zo.forward_difference(zo.low_rank(), smoothing=1e-4)

    def fun(params):
        x = jnp.ones((2, 64), jnp.bfloat16)
        return jnp.sum((x @ params["w"]).astype(jnp.float32))

    assert zo.diagnose(fun, params, estimator, 0).lost["['w']"] == 0


def test_bad_input_is_named():
    with pytest.raises(TypeError, match="estimator must be a GradientEstimator"):
        zo.diagnose(lambda x: 0.0, START, zo.sphere(), 0)
    with pytest.raises(TypeError, match="params must hold real floating-point"):
        zo.diagnose(lambda x: 0.0, np.arange(3), ESTIMATOR, 0)
    with pytest.raises(TypeError, match="a function that JAX traces with sample"):
        zo.diagnose(lambda x, b: 0.0, START, ESTIMATOR, sample=lambda key: 1.0)


def batch_loss(params, noise):
    return 1 + jnp.mean((params - noise) ** 2)


def normals(key):
    return jax.random.normal(key, START.shape)


@pytest.mark.slow
def test_minibatches_have_the_rate_that_a_run_takes():
    found = zo.diagnose(batch_loss, jnp.asarray(START), ESTIMATOR, 3, sample=normals)
    rate = zo.find_learning_rate(
        batch_loss, jnp.asarray(START), None, sample=normals, key=3
    )
    assert found.learning_rate == rate
    assert f"learning rate           {rate.learning_rate:.3g} / √(1" in str(found)
    # Minibatches differ between steps, but not between the points of one.
    assert found.noise == 0 and found.advice == ()


def test_minibatches_without_a_rate_have_the_reason():
    def fun(params, noise):
        return -1 - jnp.sum(params**2)

    found = zo.diagnose(fun, jnp.asarray(START), ESTIMATOR, sample=normals)
    assert found.learning_rate is None
    [advice] = found.advice
    assert "no learning rate can be measured: fun must be positive" in advice


@pytest.mark.slow
@pytest.mark.parametrize("traced", [True, False])
def test_tells_when_updates_are_rounded_away(traced):
    """An update of 2⁻¹² of a weight is lost in bfloat16, and kept in float32."""

    def fun(params):
        total = sum(jnp.sum(p.astype(jnp.float32)) for p in params.values())
        return total if traced else float(total)

    params = {"narrow": jnp.ones(64, jnp.bfloat16), "wide": jnp.ones(64)}
    optimizer = zo.zo_signsgd(2.0**-12)
    found = zo.diagnose(fun, params, ESTIMATOR, 0, optimizer)
    assert found.lost_updates == {"['narrow']": 1.0, "['wide']": 0.0}
    [advice] = [text for text in found.advice if "update" in text]
    assert "params['narrow'] loses 100% of its update" in advice
    assert "stochastic_rounding(key)" in advice
    assert "of an update          100.0%" in str(found)
    rounded = optax.chain(optimizer, zo.stochastic_rounding(1))
    found = zo.diagnose(fun, params, ESTIMATOR, 0, rounded)
    assert max(found.lost_updates.values()) == 0
