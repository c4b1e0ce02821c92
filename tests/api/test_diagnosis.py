"""Reports of `diagnose`: their place, and the advice that they need not give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo

CENTRAL = zo.central_difference(smoothing=1.0)
FORWARD = zo.forward_difference(smoothing=1.0)


def curved(x):
    return jnp.sum(x**2)


def test_a_diagnosis_is_returned_and_not_printed(capsys):
    found = zo.diagnose(curved, jnp.ones(4), FORWARD, 0)
    assert capsys.readouterr().out == ""
    assert str(found) == repr(found)
    assert "value at θ              4" in str(found) and "→ " in str(found)


@pytest.mark.parametrize(
    ("estimator", "advised"),
    [(FORWARD, True), (CENTRAL, False), (zo.spsa(smoothing=1.0), False)],
)
def test_central_differences_are_not_advised_to_themselves(estimator, advised):
    (text,) = zo.diagnose(curved, jnp.full(4, 1e-5), estimator, 0).advice
    assert text.startswith("curvature makes") and "a smaller smoothing" in text
    assert ("take central_difference" in text) == advised


@pytest.mark.parametrize("advised", [True, False])
def test_float64_is_not_advised_to_float64(advised):
    with jax.enable_x64(not advised):
        start = jnp.ones(4, jnp.float32 if advised else jnp.float64)
        offset = 1e4 if advised else 1e13

        def fun(x):
            return offset + jnp.sum(x**2)

        (text,) = zo.diagnose(fun, start, zo.forward_difference(), 0).advice
    assert "ulps: make smoothing" in text
    assert ("compute it in float64" in text) == advised


@pytest.mark.slow
def test_low_rank_is_not_advised_to_low_rank():
    params = {"v": jnp.full(64, 100, jnp.bfloat16), "w": jnp.ones((8, 8))}

    def fun(p):
        total = jnp.sum(p["w"] ** 2)
        return total + jnp.sum(p["v"].astype(jnp.float32)) / 100

    def advice(distribution):
        estimator = zo.forward_difference(distribution, smoothing=1e-3)
        found = zo.diagnose(fun, params, estimator, 0).advice
        (text,) = [text for text in found if "of its perturbation" in text]
        return text

    assert "take low_rank()" in advice(zo.gaussian())
    assert "low_rank()" not in advice(zo.low_rank())
    assert "keep it in float32" in advice(zo.low_rank())


def test_float32_is_not_advised_to_float32():
    def fun(x):
        return jnp.sum((x - 1e6) ** 2)

    estimator = zo.forward_difference(smoothing=1e-3)
    found = zo.diagnose(fun, np.full(4, 1e6, np.float32), estimator, 0).advice
    (text,) = [text for text in found if "of its perturbation" in text]
    assert "keep it in float32" not in text and "make smoothing larger" in text


@pytest.mark.slow
def test_rounded_updates_are_not_advised_to_be_rounded():
    optimizer = zo.zo_sgd(1e-4)
    params = jnp.ones(64, jnp.bfloat16)
    estimator = zo.forward_difference(smoothing=0.5)

    def fun(x):
        return jnp.sum(x.astype(jnp.float32))

    def advised(optimizer):
        found = zo.diagnose(fun, params, estimator, 0, optimizer)
        return any("stochastic_rounding" in text for text in found.advice)

    import optax

    assert advised(optimizer)
    assert not advised(optax.chain(optimizer, zo.stochastic_rounding(1)))


