"""Programs that compute in other precisions than their parameters have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import radazo_jax as zo
from radazo_jax._src.base import xla
from tests.helpers.tables import jit, slow

KEY = jax.random.key(0)


def test_eight_bits_round_the_perturbed_matrix_once():
    """A leaf in eight bits and an exact perturbation were added before."""
    params, x = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.ones((2, 8))
    distribution = zo.low_rank()

    def product(w):
        left, right = (a.astype(jnp.float8_e4m3fn) for a in (x, w))
        return jnp.matmul(left, right, preferred_element_type=jnp.float32)

    @jit
    def both(key):
        direction = distribution.sample(key, params)
        u = distribution.materialize(direction, params)
        return [
            (zo.perturb(product)(params, direction, s), product(params + s * u))
            for s in (1e-2, 0.1, 0.5)
        ]

    for got, expected in both(KEY):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
def test_a_gpu_multiplies_short_activations_without_widening_them(dtype, monkeypatch):
    monkeypatch.setattr(xla, "on_one_gpu", lambda fun, otherwise: fun())
    w, distribution, scale = jnp.ones((64, 48), dtype), zo.low_rank(2), 1e-3
    x = jax.random.normal(KEY, (16, 64), dtype)
    direction = distribution.sample(KEY, w)

    def product(w):
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    perturbed = jit(zo.perturb(product))
    noise = perturbed(w, direction, scale) - perturbed(w, direction, 0.0)
    u = distribution.materialize(direction, w.astype(jnp.float32))
    expected = scale * (np.asarray(x, np.float64) @ np.asarray(u, np.float64))
    # The plain products are up to 30, in float32. Factors of 8 bits would be off by
    # 2⁻⁹ of products of up to 0.03.
    np.testing.assert_allclose(noise, expected, atol=2e-5)
    program = str(jax.make_jaxpr(zo.perturb(product))(w, direction, scale))
    assert "f32[16,48]" in program and "f32[16,64]" not in program


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["sphere", "low_rank"])
@pytest.mark.slow
def test_64_bits_inside_of_a_loss(name):
    """The context in which a program was traced is not part of its equations."""
    distribution = getattr(zo, name)()
    params = jnp.ones((5, 4))

    def loss(w):
        with jax.enable_x64(True):
            wide = w.astype(jnp.float64)
            # In 32 bits, the small term would be lost.
            return (jnp.sum(wide + 1e-12) * 1e12 - jnp.sum(wide) * 1e12).astype(
                jnp.float32
            )

    direction = distribution.sample(KEY, params)
    value = zo.perturb(loss)(params, direction, 0.1)
    np.testing.assert_allclose(value, 20, rtol=1e-2)


@pytest.mark.parametrize("batch_size", [slow(None), slow(2), 1])
def test_a_stack_without_layers(batch_size):
    params = {"stack": jnp.zeros((0, 4, 4)), "w": jnp.ones((5, 4))}

    def loss(params):
        x = jnp.ones((2, 5)) @ params["w"]
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, params["stack"])
        return jnp.sum(x)

    estimator = zo.forward_difference(zo.low_rank(), 3)
    value_and_grad = zo.value_and_grad(
        loss, estimator, evaluator=zo.vectorized(batch_size)
    )
    value, gradient = jit(value_and_grad)(KEY, params)
    assert value == 40 and gradient["stack"].shape == (0, 4, 4)


def ordered(w):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return io_callback(lambda w: np.float32(np.sum(w)), shape, w, ordered=True)


def linear(w):
    def double(_, x):
        return 2 * x

    return jnp.sum(jax.custom_derivatives.linear_call(double, double, (), w))


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (ordered, "low_rank"),
        (linear, "sphere"),
        slow(ordered, "sphere"),
        slow(linear, "low_rank"),
    ],
)
def test_a_loss_that_cannot_be_batched_is_told_the_way_out(loss, name):
    estimator = zo.forward_difference(getattr(zo, name)(), 3)
    message = r"under jax\.vmap: .*Pass vectorized\(batch_size=1\)"
    with pytest.raises((ValueError, NotImplementedError), match=message) as error:
        jit(zo.value_and_grad(loss, estimator))(KEY, jnp.ones((4, 3)))
    assert error.value.__cause__ is not None
    in_turn = jit(zo.value_and_grad(loss, estimator, evaluator=zo.vectorized(1)))
    value, _ = in_turn(KEY, jnp.ones((4, 3)))
    assert np.isfinite(value)
