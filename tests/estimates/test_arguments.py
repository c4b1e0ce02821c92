"""Arguments of losses that `value_and_grad` passes on, and which it differentiates."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.compiled import compilations
from tests.helpers.tables import every

PARAMS = jnp.array([1.0, 2.0, 3.0])
X = np.array([1.0, 5.0, -2.0], np.float32)

# A loss and its further arguments, which `jax.value_and_grad` evaluates.
LOSSES = {
    "float64": (lambda p, t: jnp.sum(p**2) * (t[1] - t[0]), (1.7e9 + X,)),
    "int64": (lambda p, i: jnp.sum(p) * float(i[1] - i[0]), (2**40 + np.arange(3),)),
    "number": (lambda p, t: jnp.sum(p**2) * (t - 1.7e9), (1.7e9 + 0.25,)),
    "strings": (lambda p, b: jnp.sum(p**2) * len(b["id"]), ({"id": np.array(["a"])},)),
    "object": (lambda p, b: jnp.sum(p) * b[0]["k"], (np.array([{"k": 2.0}]),)),
    "dates": (
        lambda p, b: jnp.sum(p) * float((b[1] - b[0]) / np.timedelta64(1, "D")),
        (np.array(["2020-01-01", "2020-01-03"], "M8[s]"),),
    ),
    "mask": (lambda p, x: jnp.sum(p[x > 0] ** 2), (X,)),
    "JAX's mask": (lambda p, x: jnp.sum(p[x > 0] ** 2), (jnp.asarray(X),)),
    "shape": (lambda p, n: jnp.sum(p) * jnp.sum(jnp.ones(n)), (np.array([2, 3]),)),
    "branch": (lambda p, s: jnp.sum(p) if s > 0 else p[0], (jnp.float32(2),)),
}


@pytest.mark.parametrize("name", every(LOSSES, "float64", "mask"))
def test_a_loss_gets_its_arguments_as_from_jax(name):
    loss, args = LOSSES[name]
    estimator = zo.central_difference(zo.coordinate(replace=False), 3)
    found = zo.value_and_grad(loss, estimator)(jax.random.key(0), PARAMS, *args)
    expected = jax.value_and_grad(loss)(PARAMS, *args)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3),
        found,
        expected,
    )


def test_a_number_that_changes_compiles_nothing(caplog):
    def loss(p, batch, step):
        key = jax.random.fold_in(jax.random.key(0), step)
        noise = jax.random.normal(key, p.shape)
        return jnp.mean((p - noise) ** 2) * batch["t"] * 0.5**step

    value_and_grad = zo.value_and_grad(loss, zo.forward_difference())
    for i in range(4):
        key, args = jax.random.key(i), (PARAMS, {"t": 1 / (2.0 + i)}, i)
        with compilations(caplog) as found:
            value, _ = value_and_grad(key, *args)
        assert any("_in_program" in text for text in found) == (i == 0)
        np.testing.assert_allclose(value, loss(*args), rtol=1e-5)


def test_a_ref_is_named():
    calls = jax.new_ref(jnp.zeros(()))

    def loss(x):
        calls[...] += 1
        return jnp.sum(x)

    value_and_grad = zo.value_and_grad(loss, zo.forward_difference())
    for call in (value_and_grad, jax.jit(value_and_grad)):
        with pytest.raises(TypeError, match=r"fun must not read or write a jax\.Ref"):
            call(jax.random.key(0), PARAMS)


def test_a_python_function_is_named():
    value_and_grad = zo.value_and_grad(np.linalg.norm, zo.forward_difference())
    with pytest.raises(TypeError, match="fun must be a function that JAX can trace"):
        value_and_grad(jax.random.key(0), PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0**200, 2.0**-200])
def test_float64_keeps_its_range(scale):
    with jax.enable_x64(True):
        params = jnp.array([[0.3, -1.0, 2.0], [0.5, 0.2, -0.7]])
        for estimator in (
            zo.forward_difference(),
            zo.central_difference(zo.low_rank(), 1),
            zo.central_difference(num_directions=40),
            zo.forward_difference(zo.rademacher()),
        ):
            one, many = (
                zo.value_and_grad(lambda x, s=s: s * jnp.sum((x - 1) ** 2), estimator)(
                    jax.random.key(0), params
                )
                for s in (1.0, scale)
            )
            # A power of two rounds nothing.
            np.testing.assert_array_equal(scale * one[1], many[1])


def test_a_history_in_float64_keeps_its_range():
    with jax.enable_x64(True):
        result = zo.train(
            lambda x: 2.0**200 * jnp.sum((x - 1) ** 2),
            jnp.zeros(3),
            zo.radazo(1e-2),
            zo.forward_difference(),
            num_steps=12,
        )
    assert result.values[0] == 3 * 2.0**200
    assert np.isfinite(result.history.value).all()


# --- Positions of parameters ----------------------------------------------------


ESTIMATOR = zo.forward_difference(zo.rademacher(), num_directions=3)
KEY = jax.random.key(0)
FIRST, SECOND = jnp.arange(3.0), jnp.ones(3)


def sines(x, y, *, scale=1.0):
    return scale * jnp.sum(jnp.sin(x) * y)


@pytest.mark.parametrize("argnums", [1, -1])
def test_the_gradient_is_with_respect_to_the_argument_at_a_position(argnums):
    found = zo.value_and_grad(sines, ESTIMATOR, argnums)(KEY, FIRST, SECOND, scale=2.0)
    swapped = zo.value_and_grad(lambda y, x, scale: sines(x, y, scale=scale), ESTIMATOR)
    chex.assert_trees_all_equal(found, swapped(KEY, SECOND, FIRST, scale=2.0))


@pytest.mark.parametrize("argnums", [(0, 1), (1, 0), [1]])
def test_several_arguments_have_a_tuple_of_gradients(argnums):
    """Like a tree of parameters; each argument keeps its place."""

    def of_tuple(params):
        x, y = FIRST, SECOND
        for i, value in zip(argnums, params, strict=True):
            x, y = (value, y) if i == 0 else (x, value)
        return sines(x, y)

    found = zo.value_and_grad(sines, ESTIMATOR, argnums)(KEY, FIRST, SECOND)
    params = tuple((FIRST, SECOND)[i] for i in argnums)
    chex.assert_trees_all_equal(
        found, zo.value_and_grad(of_tuple, ESTIMATOR)(KEY, params)
    )


def test_bad_positions_are_named():
    for argnums in ("0", 0.0, (), zo.vectorized()):
        with pytest.raises(TypeError, match="argnums must be the position"):
            zo.value_and_grad(sines, ESTIMATOR, argnums)
    with pytest.raises(ValueError, match="argnums must be positions of the 2 argum"):
        zo.value_and_grad(sines, ESTIMATOR, 2)(KEY, FIRST, SECOND)
