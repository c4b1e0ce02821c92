"""The learning rate of R-AdaZO before a run, against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.compiled import compilations
from tests.helpers.tables import slow

KEY = jax.random.key(0)
PARAMS = {"a": jnp.full((5, 3), 2.0), "b": jnp.full(4, -1.0)}
SIZE = 19
RMS = np.sqrt((15 * 4 + 4) / SIZE)


def squares(params):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


def quadratic(params, *, curvature=3.0):
    """2 + h/2 |θ|²: its flatness is √(2 rise / (h d)), by a symmetric pair."""
    return 2.0 + curvature / 2 * squares(params)


def find(*args, smoothing=0.1, **options):
    """The rate alone: the smoothing has tests of its own."""
    return zo.find_learning_rate(*args, smoothing=smoothing, **options)


def flatness(loss, curvature=3.0):
    return np.sqrt(2 * 0.1 * loss / (curvature * SIZE))


@pytest.mark.parametrize("distribution", [slow(zo.sphere()), zo.rademacher()], ids=repr)
def test_the_flatness_of_a_quadratic_function(distribution):
    found = find(quadratic, PARAMS, 100, distribution=distribution)
    loss = float(quadratic(PARAMS))
    assert found.loss == loss
    np.testing.assert_allclose(found.rise, 0.1 * loss, rtol=1e-6)
    np.testing.assert_allclose(found.flatness, flatness(loss), rtol=1e-4)
    np.testing.assert_allclose(found.rms, RMS, rtol=1e-6)


@pytest.mark.parametrize(("num_steps", "b1"), [(100, 0.9), (100, 0.99), (2500, 0.0)])
def test_the_rate_is_the_rule(num_steps, b1):
    found = find(quadratic, PARAMS, num_steps, b1=b1)
    # c s / √T at β₁ = 0.9, and less at a larger β₁.
    expected = 1.2 * found.flatness / np.sqrt(num_steps)
    expected *= np.sqrt(19 * (1 - b1) / (1 + b1))
    np.testing.assert_allclose(found.learning_rate, expected, rtol=1e-12)


def test_a_flat_function_is_limited_by_the_size_of_the_parameters():
    found = find(lambda p: quadratic(p, curvature=1e-3), PARAMS, 100)
    assert found.flatness == found.rms
    assert found.num_evaluations == 17
    assert "limited by the size of the parameters: a change" in repr(found)


def test_a_rise_that_is_hidden_at_the_size_of_the_parameters():
    """A loss falls a little at their size, and rises at twice it."""

    def loss(params):
        size = squares(params) / squares(PARAMS)
        return 2 - 1e-4 * (size - 1) + 1e-2 * jnp.maximum(size - 3, 0)

    found = find(loss, PARAMS, 100)
    assert found.flatness == found.rms
    assert found.num_evaluations == 33
    assert "limited by the size of the parameters: noise hides" in repr(found)


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_a_loss_that_only_falls_has_the_rate_of_the_size_of_the_parameters(scale):
    """The share of wrong labels does so above chance level. From zeros, it is 1."""

    def loss(params):
        return 2 - squares(params) / (1 + squares(params))

    params = jax.tree.map(lambda p: scale * p, PARAMS)
    found = find(loss, params, 100)
    assert found.flatness == (found.rms or 1.0)
    expected = 1.2 * found.flatness / np.sqrt(100)
    np.testing.assert_allclose(found.learning_rate, expected, rtol=1e-12)
    assert "limited by the size of the parameters: no size showed" in repr(found)


def test_wrong_labels_at_a_random_start_have_a_rate():
    """Every start above chance level has one, and a constant has none."""
    x = jax.random.normal(jax.random.key(1), (200, 6))
    y = jnp.argmax(x @ jax.random.normal(jax.random.key(2), (6, 4)), 1)

    def loss(w, rows):
        return jnp.mean(jnp.argmax(x[rows] @ w, 1) != y[rows])

    def sample(key):
        return jax.random.randint(key, (64,), 0, len(x))

    for seed in range(10, 16):
        w = jax.random.normal(jax.random.key(seed), (6, 4))
        found = find(loss, w, 100, sample=sample, key=seed)
        assert 0 < found.flatness <= found.rms


def test_probes_of_all_sizes_and_batch_sizes_share_a_program(caplog):
    options = {"sample": jax.random.normal, "smoothing": None, "progress": False}

    def loss(params, noise):
        return quadratic(params) + 0 * noise

    find(loss, PARAMS, 100, **options)
    with compilations(caplog) as found:
        for batch_size in (None, 2):
            evaluator = zo.vectorized(batch_size)
            find(loss, PARAMS, 100, evaluator=evaluator, **options)
            options |= {"rise": 1.0}
    assert not found


@pytest.mark.slow
def test_the_smoothing_is_measured_unless_it_is_named():
    alone = zo.find_smoothing(quadratic, PARAMS)
    assert find(quadratic, PARAMS, 100).smoothing == 0.1
    both = zo.find_learning_rate(quadratic, PARAMS, 100)
    assert both.smoothing == alone.smoothing
    assert both.num_evaluations == 49 + alone.num_evaluations
    assert f"smoothing               {alone.smoothing:.3g}" in repr(both)


def test_parameters_of_zero_have_no_limit():
    params = jax.tree.map(jnp.zeros_like, PARAMS)
    found = find(lambda p: quadratic(p, curvature=1e-3), params, 100)
    np.testing.assert_allclose(found.flatness, flatness(2.0, 1e-3), rtol=1e-4)


def test_all_sizes_have_the_same_minibatches():
    """Then a term of the minibatch alone does not matter."""

    def loss(params, noise):
        return quadratic(params) + noise

    def sample(key):
        return 100 * jax.random.normal(key)

    plain = find(quadratic, PARAMS, 100, rise=1.0)
    found = find(loss, PARAMS, 100, sample=sample, rise=1.0)
    assert abs(found.loss - plain.loss) > 1
    np.testing.assert_allclose(found.flatness, plain.flatness, rtol=1e-3)


def test_evaluations_are_counted():
    calls = []

    def loss(params):
        def called(x):
            calls.append(1)
            return x

        value = quadratic(params)
        shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
        return jax.pure_callback(called, shape, value, vmap_method="sequential")

    found = find(loss, PARAMS, 100)
    assert len(calls) == found.num_evaluations == 49


@pytest.mark.slow
def test_the_key_decides_and_the_batch_size_does_not():
    def loss(params):
        return jnp.sum(jnp.cosh(params["a"])) + squares(params)

    def at(key, batch_size=1):
        evaluator = zo.vectorized(batch_size=batch_size)
        return find(loss, PARAMS, 50, key=key, evaluator=evaluator)

    first = at(0)
    assert at(0) == first
    assert at(1).flatness != first.flatness
    np.testing.assert_allclose(
        at(0, batch_size=2).learning_rate, first.learning_rate, rtol=1e-2
    )


def test_a_reward_has_a_rise_of_its_own():
    """The default is half the standard deviation between eight minibatches."""

    def loss(params, noise):
        return quadratic(params) - 1e3 + noise

    def at(rise=None):
        return find(loss, PARAMS, 9, sample=jax.random.normal, key=KEY, rise=rise)

    np.testing.assert_allclose(at(9.8).flatness, flatness(98.0), rtol=1e-3)
    found = at()
    batches = [jax.random.split(jax.random.fold_in(KEY, i))[1] for i in range(8)]
    draws = [float(jax.random.normal(key)) for key in batches]
    np.testing.assert_allclose(found.rise, np.std(draws, ddof=1) / 2, rtol=1e-3)
    np.testing.assert_allclose(found.flatness, flatness(10 * found.rise), rtol=1e-2)


def constant(params):
    return 1 + 0 * squares(params)


def one_at_start(params):
    return 1.0 + jnp.where(params["b"][0] == -1.0, 0.0, 1.0)


def empty(key):
    return jax.random.normal(key, (0, 3))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_steps": 1}, ValueError, "num_steps must be an int ≥ 2; got 1"),
        ({"b1": 1.0}, ValueError, "b1 must be a number in"),
        ({"smoothing": -1.0}, ValueError, "smoothing must be a finite number > 0"),
        ({"rise": 0.0}, ValueError, "rise must be a finite number > 0; got 0.0"),
        ({"distribution": "sphere"}, TypeError, "distribution must be a Distribution"),
        ({"evaluator": zo.external()}, TypeError, "functions that JAX traces"),
        ({"fun": lambda p: 0 * squares(p)}, ValueError, "must be positive at params"),
        ({"fun": lambda p: -squares(p)}, ValueError, "must be positive at params"),
        ({"fun": lambda p: jnp.nan * squares(p)}, ValueError, "must be finite"),
        ({"fun": constant}, ValueError, "must change with params"),
        ({"fun": one_at_start}, ValueError, "rose by 10 times rise"),
        (
            {"fun": lambda p, x: constant(p) + 0.1 + x**2, "sample": jax.random.normal},
            ValueError,
            "must change with params",
        ),
        (
            {"fun": constant, "params": {"a": jnp.zeros(3)}},
            ValueError,
            "must change with params; got 1 at all points up to a change of 5.24e",
        ),
        (
            {"fun": lambda p, x: squares(p) + jnp.mean(x), "sample": empty},
            ValueError,
            "check that sample returns examples",
        ),
    ],
)
def test_what_has_no_rate_is_named(arguments, error, message):
    defaults = {"fun": quadratic, "params": PARAMS, "num_steps": 100}
    with pytest.raises(error, match=message):
        zo.find_learning_rate(**(defaults | arguments))
