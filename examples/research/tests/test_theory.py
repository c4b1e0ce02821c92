"""The paper's quantities: pinned in double precision, and held against measurement."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import radazo_jax as zo
from paper import functions, theory

B1, B2 = 0.9, 0.99


def _constants(**changed):
    values = dict(b1=0.9, b2=0.99, learning_rate=1e-3, smoothness=3.0, dimension=100)
    return values | changed


# Each formula, written out from the paper a second time, in NumPy's float64.
_PINS = {
    "sigma2": (
        lambda: theory.gradient_variance_bound(
            noise_std=0.3,
            value_bound=2.0,
            dimension=50,
            num_directions=7,
            smoothing=0.1,
        ),
        8 * (np.float64(0.3) ** 2 + 4) * 50 / 7 / 0.1**2,
    ),
    "bias of smoothing": (
        lambda: theory.smoothing_bias_bound(
            smoothing=0.1, smoothness=3.0, dimension=50
        ),
        0.1 * 3 * np.sqrt(np.float64(50)),
    ),
    "variance of m": (
        lambda: theory.first_moment_variance(b1=0.9, gradient_variance=5.0),
        np.float64(5) * 0.1 / 1.9,
    ),
    "variance of m after t steps": (
        lambda: theory.first_moment_variance(b1=0.9, gradient_variance=5.0, step=4),
        5 * 0.01 * np.sum(np.float64(0.81) ** np.arange(4)),
    ),
    "squared bias of m": (
        lambda: theory.first_moment_squared_bias(
            **_constants(), step=4, squared_gradient=7.0
        ),
        0.9 * 1.9 * 9 * 1e-6 * 100 / (0.1**2 * 0.01) + 0.9**4 * np.float64(7),
    ),
    "v of m": (
        lambda: theory.second_moment_bound_radazo(
            **_constants(),
            gradient_variance=5.0,
            step=4,
            average_squared_gradient=7.0,
            initial_accumulator_value=0.5,
        ),
        0.99**4 * np.float64(0.5)
        + 0.1 * 5
        + 0.9 * 1.9**2 * 9 * 1e-6 * 100 / (0.1**2 * 0.01)
        + 1.9**2 / 0.9 * 7,
    ),
    "v of g": (
        lambda: theory.second_moment_bound_zo_adamm(
            b1=0.9,
            b2=0.99,
            gradient_variance=5.0,
            step=4,
            average_squared_gradient=7.0,
            initial_accumulator_value=0.5,
        ),
        0.99**4 * np.float64(0.5) + 1.9 * 5 + 1.9**2 / 0.9 * 7,
    ),
    "V": (
        lambda: theory.convergence_constant_radazo(
            **_constants(), gradient_variance=5.0, initial_norm=0.5
        ),
        np.sqrt(
            np.float64(0.5) + 0.1 * 5 + 0.9 * 1.9**2 * 9 * 1e-6 * 100 / (0.1**2 * 0.01)
        ),
    ),
    "V hat": (
        lambda: theory.convergence_constant_zo_adamm(
            b1=0.9, gradient_variance=5.0, initial_norm=0.5
        ),
        np.sqrt(np.float64(0.5) + 1.9 * 5),
    ),
    "speedup": (lambda: theory.predicted_speedup(0.9), np.float64(19) ** 0.25),
    "step ratio": (lambda: theory.step_ratio(0.9), np.float64(19) ** 0.5),
}


@pytest.mark.parametrize("name", _PINS)
def test_formula_in_double_precision(name):
    function, expected = _PINS[name]
    np.testing.assert_allclose(function(), expected, rtol=1e-12)


def test_bounds_without_momentum_are_those_of_the_gradient():
    """With β₁ = 0 theorem 5.3 is lemma 5.2, as the paper remarks."""
    assert theory.first_moment_variance(b1=0.0, gradient_variance=5.0) == 5.0
    constants = _constants(b1=0.0)
    bias = theory.first_moment_squared_bias(**constants, step=1, squared_gradient=7.0)
    assert bias == 0.0
    assert theory.predicted_speedup(0.0) == theory.step_ratio(0.0) == 1.0


def test_speedup_is_the_ratio_of_the_roots_of_the_constants():
    """This holds if Σ² dominates, and not otherwise."""

    def ratio(gradient_variance):
        ours = theory.convergence_constant_radazo(
            **_constants(), gradient_variance=gradient_variance
        )
        other = theory.convergence_constant_zo_adamm(
            b1=0.9, gradient_variance=gradient_variance
        )
        return math.sqrt(other / ours)

    assert ratio(1e12) == pytest.approx(theory.predicted_speedup(0.9), rel=1e-6)
    assert ratio(1.0) < 0.99 * theory.predicted_speedup(0.9)


def _valid():
    return {
        theory.gradient_variance_bound: dict(
            noise_std=0.0, value_bound=1.0, dimension=3, num_directions=2, smoothing=1.0
        ),
        theory.smoothing_bias_bound: dict(smoothing=1.0, smoothness=1.0, dimension=3),
        theory.first_moment_variance: dict(b1=0.9, gradient_variance=1.0, step=1),
        theory.first_moment_squared_bias: dict(
            **_constants(), step=1, squared_gradient=1.0
        ),
        theory.second_moment_bound_radazo: dict(
            **_constants(),
            gradient_variance=1.0,
            step=1,
            average_squared_gradient=1.0,
            initial_accumulator_value=0.0,
        ),
        theory.second_moment_bound_zo_adamm: dict(
            b1=0.9,
            b2=0.99,
            gradient_variance=1.0,
            step=1,
            average_squared_gradient=1.0,
            initial_accumulator_value=0.0,
        ),
        theory.convergence_constant_radazo: dict(
            **_constants(), gradient_variance=1.0, initial_norm=0.0
        ),
        theory.convergence_constant_zo_adamm: dict(
            b1=0.9, gradient_variance=1.0, initial_norm=0.0
        ),
        theory.predicted_speedup: dict(b1=0.9),
        theory.step_ratio: dict(b1=0.9),
    }


@pytest.mark.parametrize(
    ("function", "argument"),
    [(f, name) for f, arguments in _valid().items() for name in arguments],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_every_argument_is_checked_by_name(function, argument):
    arguments = _valid()[function]
    function(**arguments)
    with pytest.raises(ValueError, match=f"{argument} must be .*; got -1"):
        function(**arguments | {argument: -1})


@pytest.mark.parametrize(
    "function",
    [theory.second_moment_bound_radazo, theory.second_moment_bound_zo_adamm],
)
def test_second_moment_bounds_need_momentum(function):
    """They divide by β₁."""
    with pytest.raises(ValueError, match="b1 must be a finite number > 0"):
        function(**_valid()[function] | {"b1": 0.0})


# At fixed θ. With d = 2000 and K = 1 the mean of g is √(d/K) = 45 times smaller than
# its deviation in each coordinate: what E[v] holds of it, and the ratio does not, is
# (1 + β₁)/(1 − β₁) K/d = 1 %.
DIMENSION = 2000
STEPS = 6000


@pytest.fixture(scope="module")
def moments():
    """Averages (m − ∇F)², (g − ∇F)² and v² over steps and coordinates."""
    theta = functions.uniform_start(jax.random.key(0), DIMENSION)
    value_and_grad = zo.value_and_grad(
        functions.quadratic, zo.forward_difference(num_directions=1)
    )
    ours, other = zo.scale_by_radazo(B1, B2), zo.scale_by_zo_adamm(B1, B2)

    def step(carry, t):
        ours_state, other_state = carry
        _, g = value_and_grad(jax.random.fold_in(jax.random.key(1), t), theta)
        _, ours_state = ours.update(g, ours_state)
        _, other_state = other.update(g, other_state)
        out = (
            jnp.mean((ours_state.mu - theta) ** 2),
            jnp.mean((g - theta) ** 2),
            jnp.mean(ours_state.nu),
            jnp.mean(other_state.nu),
        )
        return (ours_state, other_state), out

    # It takes longer to run than to compile.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 2})
    def run():
        carry = ours.init(theta), other.init(theta)
        _, outs = jax.lax.scan(step, carry, jnp.arange(STEPS, dtype=jnp.uint32))
        # v forgets its start with β₂ᵗ: 1e-4 after 1000 steps.
        return [out[1000:].mean() for out in outs]

    return dict(zip(("m", "g", "v_m", "v_g"), map(float, run()), strict=True))


# Standard error: the variance of g within a step goes with (∇F·u)², whose relative
# deviation is √2, over 5000 steps 2 %; of the ratio less, for both have it in common.
@pytest.mark.slow
def test_variance_of_m_is_that_of_g_reduced(moments):
    predicted = theory.first_moment_variance(b1=B1, gradient_variance=moments["g"])
    assert moments["m"] == pytest.approx(predicted, rel=0.05)


def test_second_moments_are_in_the_same_ratio(moments):
    predicted = theory.first_moment_variance(b1=B1, gradient_variance=1.0)
    assert moments["v_m"] / moments["v_g"] == pytest.approx(predicted, rel=0.05)


def test_measured_moments_respect_the_bounds(moments):
    """With the measured variance in the place of Σ²; at fixed θ, η is 0."""
    theta = functions.uniform_start(jax.random.key(0), DIMENSION)
    squared = float(jnp.mean(theta**2))
    common = dict(
        b1=B1,
        b2=B2,
        gradient_variance=moments["g"],
        step=STEPS,
        average_squared_gradient=squared,
    )
    ours = theory.second_moment_bound_radazo(
        **common, learning_rate=0.0, smoothness=1.0, dimension=DIMENSION
    )
    assert moments["v_m"] <= ours
    assert moments["v_g"] <= theory.second_moment_bound_zo_adamm(**common)


def test_variance_respects_sigma_squared():
    """The function is bounded, so C is known, and far from linear."""
    dimension, smoothing, num_directions = 20, 0.5, 3
    theta = functions.uniform_start(jax.random.key(0), dimension)

    def fun(theta):
        return jnp.mean(jnp.cos(20 * theta))  # C = 1

    estimator = zo.forward_difference(zo.sphere(), num_directions, smoothing)
    estimate = zo.value_and_grad(fun, estimator)
    keys = jax.random.split(jax.random.key(1), 4000)
    grads = jax.jit(jax.vmap(lambda key: estimate(key, theta)[1]))(keys)
    bound = theory.gradient_variance_bound(
        noise_std=0.0,
        value_bound=1.0,
        dimension=dimension,
        num_directions=num_directions,
        smoothing=smoothing,
    )
    assert 0 < grads.var(axis=0).max() <= bound


# F_μ averages over the ball, whose coordinates have the density (1 − b²)^((d−1)/2) on
# [-1, 1]; so for a sum of functions of one coordinate each, ∇F_μ is an integral over b
# that Gauss–Jacobi quadrature does to many digits.
SMALL, WIDE = 8, 0.5


def _separable_gradient(theta, smoothing):
    """∇F_μ of F = Σ sin(3 θᵢ) + θᵢ³, in float64."""
    nodes, weights = special.roots_jacobi(
        60, (len(theta) - 1) / 2, (len(theta) - 1) / 2
    )
    points = theta[:, None] + smoothing * nodes
    slopes = 3 * np.cos(3 * points) + 3 * points**2
    return slopes @ (weights / weights.sum())


def _rosenbrock_gradient(theta, smoothing):
    """∇F_μ of Rosenbrock's function, in closed form.

    With b uniform in the ball, E bᵢ² = 1/(d + 2) = s and odd moments vanish:
    E(y − x²)² gains μ²s (1 + 4x² − 2(y − x²)) and terms without x and y.
    """
    extra = smoothing**2 / (len(theta) + 2)
    x, y = theta[:-1], theta[1:]
    gradient = np.zeros_like(theta)
    gradient[:-1] += -400 * x * (y - x**2) - 2 * (1 - x) + 1200 * extra * x
    gradient[1:] += 200 * (y - x**2) - 200 * extra
    return gradient


def _separable(theta):
    return jnp.sum(jnp.sin(3 * theta) + theta**3)


@pytest.mark.parametrize(
    ("fun", "smoothed_gradient"),
    [
        (_separable, _separable_gradient),
        pytest.param(
            functions.rosenbrock, _rosenbrock_gradient, marks=pytest.mark.slow
        ),
    ],
    ids=["separable", "rosenbrock"],
)
@pytest.mark.parametrize("estimator", [zo.forward_difference, zo.central_difference])
def test_expected_estimate_is_the_gradient_of_the_smoothed_function(
    fun, smoothed_gradient, estimator
):
    theta = np.random.default_rng(0).uniform(-1, 1, SMALL)
    expected = smoothed_gradient(theta, WIDE)
    estimate = zo.value_and_grad(fun, estimator(zo.sphere(), 2000, WIDE))
    params = jnp.asarray(theta, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 200)
    grads = np.asarray(
        jax.jit(lambda keys: jax.lax.map(lambda k: estimate(k, params)[1], keys))(keys),
        np.float64,
    )
    error = grads.std(axis=0, ddof=1) / math.sqrt(len(grads))
    # Five standard errors in each coordinate; that they are small enough to see the
    # difference to ∇F is checked too.
    assert (abs(grads.mean(axis=0) - expected) < 5 * error).all()
    unsmoothed = smoothed_gradient(theta, 1e-9)
    assert (abs(expected - unsmoothed) > 5 * error).any()


def test_smoothing_moves_the_gradient_by_no_more_than_the_bound():
    rng = np.random.default_rng(1)
    for dimension in (2, 8, 50):
        for smoothing in (0.01, 0.1, 0.5):
            theta = rng.uniform(-1, 1, dimension)
            # |F''ᵢᵢ| = |−9 sin(3x) + 6x| ≤ 9 + 6 |x|, and x stays within μ of θ.
            smoothness = 9 + 6 * (abs(theta).max() + smoothing)
            moved = np.linalg.norm(
                _separable_gradient(theta, smoothing)
                - (3 * np.cos(3 * theta) + 3 * theta**2)
            )
            bound = theory.smoothing_bias_bound(
                smoothing=smoothing, smoothness=smoothness, dimension=dimension
            )
            assert 0 < moved <= bound
