"""Estimators against eq. (2) in float64 NumPy, closed forms, and their contracts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.compare import Hashed
from tests.helpers.jaxprs import waits_of
from tests.helpers.relatives import CURVATURES, PARAMS
from tests.helpers.relatives import flat as flat64
from tests.helpers.relatives import quadratic as quadratic64
from tests.helpers.relatives import traced as quadratic
from tests.helpers.tables import DISTRIBUTIONS, ESTIMATORS, each_distribution, jit, slow


@pytest.fixture(params=ESTIMATORS)
def difference(request):
    return ESTIMATORS[request.param]


def flat(tree):
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])


def cubic(params):
    x = flat(params)
    return jnp.sum(CURVATURES.astype(x.dtype) * x**3)


def estimate(fun, estimator, key=0, params=PARAMS, **kwargs):
    return zo.estimators.estimate(
        estimator, fun, key, params, estimator.init(params), **kwargs
    )[0]


# --- Eq. (2), transcribed ---------------------------------------------------------


@functools.cache
def numpy_directions(distribution, key, num):
    """The directions the estimators take: the k-th from `fold_in(key, k)`.

    Or the k-th under the key itself, of those that depend on one another.
    """

    @jit
    @jax.vmap
    def draw(k):
        own = jax.random.fold_in(jax.random.key(key), k)
        direction = distribution.sample(
            jax.random.key(key) if distribution.sequential else own, PARAMS
        )
        if distribution.sequential:
            direction = dataclasses.replace(direction, number=k.astype(jnp.uint32))
        return flat(distribution.materialize(direction, PARAMS))

    return np.asarray(draw(jnp.arange(num)), np.float64)


def numpy_eq2(f, theta, us, mu, factor, *, central):
    """Eq. (2) as printed, and its central counterpart, in float64."""
    total = np.zeros_like(theta)
    for u in us:
        if central:
            total += (f(theta + mu * u) - f(theta - mu * u)) / (2 * mu) * u
        else:
            total += (f(theta + mu * u) - f(theta)) / mu * u
    return factor / len(us) * total


@pytest.mark.parametrize(
    ("distribution", "name", "batch_size"),
    [
        *each_distribution(ESTIMATORS, (None, 1)),
        slow("sphere", "forward", 3),
        slow("low_rank", "central", 3),
    ],
)
def test_is_eq_2(distribution, name, batch_size):
    distribution, mu, num = DISTRIBUTIONS[distribution], 0.5, 7
    estimator = ESTIMATORS[name](distribution, num, mu)
    evaluator = zo.vectorized(batch_size)
    run = jit(functools.partial(estimate, quadratic, estimator, evaluator=evaluator))
    value, gradient = run()

    theta, f = flat64(PARAMS), quadratic64
    us = numpy_directions(distribution, 0, num)
    expected = numpy_eq2(
        f, theta, us, mu, distribution.factor(len(theta)), central=name == "central"
    )
    np.testing.assert_allclose(flat(gradient), expected, rtol=2e-4, atol=2e-4)
    if name == "forward":
        np.testing.assert_allclose(value, f(theta), rtol=1e-6)
    else:
        values = [f(theta + s * mu * u) for u in us for s in (1, -1)]
        np.testing.assert_allclose(value, np.mean(values), rtol=1e-5)


# --- Expectations in closed form --------------------------------------------------


def mean_gradient(fun, estimator, num=4000):
    @jax.jit
    @jax.vmap
    def one(key):
        return flat(estimate(fun, estimator, key)[1])

    gradients = np.asarray(one(jax.random.split(jax.random.key(1), num)), np.float64)
    return gradients.mean(0), gradients.std(0) / np.sqrt(num)


@pytest.mark.parametrize(
    ("name", "fourth", "difference"),
    # c E[u⁴] of a coordinate: d * 3/(d(d+2)), 3, 1, d * 1/d.
    [
        slow("sphere", 3 / 8, zo.forward_difference),
        slow("gaussian", 3.0, zo.central_difference),
        slow("rademacher", 1.0, zo.forward_difference),
        ("coordinate", 1.0, zo.central_difference),
    ],
)
def test_mean_on_a_cubic_is_the_smoothed_gradient(name, fourth, difference):
    # For f = Σ aᵢxᵢ³ and a symmetric distribution, ∇F_μ = 3 aᵢxᵢ² + μ² aᵢ c E[uᵢ⁴]:
    # large μ, so that the two gradients lie many standard errors apart.
    mu = 1.5
    mean, standard_error = mean_gradient(
        cubic, difference(DISTRIBUTIONS[name], 4, mu), 20_000
    )
    x = flat64(PARAMS)
    expected = 3 * CURVATURES * x**2 + mu**2 * CURVATURES * fourth
    assert (abs(mean - expected) <= 4 * standard_error).all()
    plain = 3 * CURVATURES * x**2
    if fourth >= 1:
        assert (abs(mean - plain) > 4 * standard_error).any()


# --- The number of evaluations, and what they share -------------------------------


@pytest.mark.parametrize(
    ("name", "expected", "batch_size"),
    [("forward", 6, 2), ("central", 10, None), slow("forward", 6, 1)],
)
def test_counts_evaluations(name, expected, batch_size):
    points = []

    def counted(params):
        jax.debug.callback(lambda x: points.append(np.asarray(x)), flat(params))
        return quadratic(params)

    estimator, evaluator = ESTIMATORS[name](Hashed(), 5), zo.vectorized(batch_size)
    run = jit(lambda: estimate(counted, estimator, evaluator=evaluator))
    jax.block_until_ready(run())
    jax.effects_barrier()
    assert len(points) == expected
    assert len({p.tobytes() for p in points}) == expected


def test_all_evaluations_get_the_same_arguments(difference):
    # With noise from a key among the arguments, the differences see none of it.
    def noisy(params, key, *, offset):
        return quadratic(params) + 100.0 * jax.random.normal(key) + offset

    estimator = difference(zo.rademacher(), num_directions=4)

    @jit
    def both(key, noise, offset):
        return (
            zo.value_and_grad(noisy, estimator)(key, PARAMS, noise, offset=offset),
            zo.value_and_grad(quadratic, estimator)(key, PARAMS),
        )

    given = jax.random.key(3), jax.random.key(9), jnp.float32(7)
    (_, got), (_, expected) = both(*given)
    np.testing.assert_allclose(flat(got), flat(expected), atol=0.2)


def test_a_loss_may_take_entries_out_of_its_arguments(difference):
    def loss(params, batch, *, options):
        shift = batch.pop("shift") * options.pop()
        return quadratic({name: params.pop(name) + shift for name in list(params)})

    def plain(params):
        return quadratic(jax.tree.map(lambda x: x + 3.0, params))

    estimator = difference(Hashed(), num_directions=2)
    params, batch, options = dict(PARAMS), {"shift": jnp.float32(1.5)}, [2.0]
    got = zo.value_and_grad(loss, estimator)(0, params, batch, options=options)
    expected = zo.value_and_grad(plain, estimator)(0, PARAMS)
    np.testing.assert_allclose(flat(got), flat(expected), rtol=1e-4)
    assert set(params) == set(PARAMS)
    assert list(batch) == ["shift"]
    assert options == [2.0]


# --- value_and_grad ---------------------------------------------------------------


def test_value_and_grad_mirrors_jax(difference):
    x = jnp.ones((4, 6))

    def loss(params, x, *, scale):
        residual = x @ flat(params)
        return scale * jnp.mean(residual**2), {"residual": residual}

    estimator = difference(zo.coordinate(), 600, 1e-2)
    value_and_grad = jit(zo.value_and_grad(loss, estimator, has_aux=True))
    (value, aux), gradient = value_and_grad(jax.random.key(0), PARAMS, x, scale=0.5)
    expected = jax.value_and_grad(loss, has_aux=True)(PARAMS, x, scale=0.5)
    (expected_value, expected_aux), expected_gradient = expected
    np.testing.assert_allclose(value, expected_value, rtol=1e-2)
    np.testing.assert_allclose(aux["residual"], expected_aux["residual"], atol=0.02)
    assert jax.tree.structure(gradient) == jax.tree.structure(expected_gradient)
    np.testing.assert_allclose(flat(gradient), flat(expected_gradient), rtol=0.4)


def test_dtypes():
    params = {"h": jnp.ones(3, jnp.bfloat16), "f": jnp.ones(2, jnp.float32)}

    def loss(p):
        return jnp.sum(p["h"]) + jnp.sum(p["f"]).astype(jnp.bfloat16)

    value, gradient = jit(zo.value_and_grad(loss, zo.forward_difference(Hashed())))(
        0, params
    )
    assert value.dtype == jnp.float32
    assert jax.tree.map(lambda g: g.dtype, gradient) == {
        "h": jnp.bfloat16,
        "f": jnp.float32,
    }


def test_python_floats_are_parameters():
    value, gradient = zo.value_and_grad(
        lambda p: p["x"] ** 2, zo.forward_difference(zo.coordinate())
    )(0, {"x": 3.0})
    assert float(value) == 9.0
    np.testing.assert_allclose(gradient["x"], 6.0, rtol=1e-2)


def test_masked_parameters_are_left_alone():
    import optax

    params = {"w": jnp.ones(3), "frozen": optax.MaskedNode()}
    value_and_grad = zo.value_and_grad(
        lambda p: jnp.sum(p["w"] ** 2), zo.forward_difference(Hashed())
    )
    _, gradient = jit(value_and_grad)(0, params)
    assert gradient["frozen"] == optax.MaskedNode()


# --- Bad input --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (lambda p: p["b"], ValueError, r"scalar loss; got an array of shape \(2,\)"),
        (lambda p: jnp.int32(1), TypeError, "real .* loss; got dtype int32"),
        (lambda p: 3, TypeError, "real .* loss; got dtype int"),
        (lambda p: jnp.complex64(1), TypeError, "got dtype complex64"),
        (lambda p: None, TypeError, "scalar loss; got None"),
        (lambda p: (jnp.sum(p["b"]), 1.0), (TypeError, ValueError), "has_aux=True"),
    ],
)
def test_bad_losses(output, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: estimate(output, zo.forward_difference()))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({}, ValueError, "params must hold at least one array; got the empty tree"),
        (None, ValueError, "empty tree None"),
        ({"a": jnp.zeros((0, 3))}, ValueError, "at least one number; got empty {a"),
        ({"n": {"i": jnp.arange(3)}}, TypeError, r"int32 at params\['n'\]\['i'\]"),
        ([jnp.ones(2), jnp.array([True])], TypeError, r"bool at params\[1\]"),
        ({"c": jnp.ones(2, jnp.complex64)}, TypeError, r"complex64 at params\['c'\]"),
        ({"s": "text"}, TypeError, r"'text' .* at params\['s'\]"),
        ({"k": jax.random.key(0)}, TypeError, r"at params\['k'\]"),
        (7, TypeError, "int.* at params"),
    ],
)
def test_bad_parameters(params, error, message):
    with pytest.raises(error, match=message):
        estimate(lambda p: jnp.float32(0), zo.forward_difference(), params=params)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_directions": 0}, ValueError, "num_directions.*0"),
        ({"smoothing": 0.0}, ValueError, "smoothing"),
        ({"distribution": "sphere"}, TypeError, "must be a Distribution such as sphe"),
        ({"distribution": zo.sphere}, TypeError, "distribution must be a Distributi"),
    ],
)
def test_bad_options(difference, options, error, message):
    with pytest.raises(error, match=message):
        difference(**options)


def test_bad_sizes_of_batches():
    with pytest.raises(ValueError, match=r"batch_size.*0"):
        zo.vectorized(0)
    with pytest.raises(TypeError, match=r"batch_size.*2\.0"):
        zo.sharded("k", 2.0)


@pytest.mark.parametrize(("batch_size", "waits"), [(None, False), (1, True)])
def test_evaluations_in_turn_begin_with_the_one_at_the_parameters(batch_size, waits):
    # Otherwise a compiler would run two evaluations at once, in the memory of both.
    estimator = zo.forward_difference(num_directions=3)
    value_and_grad = zo.value_and_grad(
        quadratic, estimator, evaluator=zo.vectorized(batch_size)
    )
    jaxpr = jax.make_jaxpr(value_and_grad)(jax.random.key(0), PARAMS)
    shapes = {leaf.shape for leaf in jax.tree.leaves(PARAMS)}
    assert any(shapes <= set(tied) for tied in waits_of(jaxpr)) == waits


@pytest.mark.parametrize("batch_size", [slow(None), 1])
@pytest.mark.parametrize("make", [zo.forward_difference, zo.central_difference])
def test_aux_holds_what_is_no_array(make, batch_size):
    def loss(params):
        return jnp.sum(params**2), {"name": "loss", "none": None, "twice": 2 * params}

    value_and_grad = zo.value_and_grad(
        loss, make(Hashed(), 3), evaluator=zo.vectorized(batch_size), has_aux=True
    )
    (_, aux), _ = value_and_grad(0, jnp.ones(4))
    assert aux["name"] == "loss" and aux["none"] is None
    assert aux["twice"].shape == (4,)


def test_the_key_comes_first():
    value_and_grad = zo.value_and_grad(jnp.sum, zo.forward_difference())
    params = {"w": jnp.ones(3)}
    for call in (
        lambda: value_and_grad(params),
        lambda: value_and_grad(params, jax.random.key(0)),
        lambda: value_and_grad(jnp.ones(3), 0),
    ):
        with pytest.raises(TypeError, match="key must be the first argument"):
            call()
    with pytest.raises(TypeError, match="params must be the second argument"):
        value_and_grad(jax.random.key(0))
    value, _ = value_and_grad(0, jnp.ones(3))
    assert value == 3
