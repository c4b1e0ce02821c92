"""The synthetic functions against the paper's formulas, written out in NumPy."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paper import functions


def _quadratic(t):
    return 0.5 * sum(x**2 for x in t)


def _cubic(t):
    return sum(abs(x) ** 3 + x**2 / 2 for x in t)


def _levy(t):
    w = [1 + (x - 1) / 4 for x in t]
    total = math.sin(math.pi * w[0]) ** 2
    for x in w[1:-1]:
        total += (x - 1) ** 2 * (1 + 10 * math.sin(math.pi * x + 1) ** 2)
    return total + (w[-1] - 1) ** 2 * (1 + math.sin(2 * math.pi * w[-1]) ** 2)


def _rosenbrock(t):
    pairs = itertools.pairwise(t)
    return sum(100 * (y - x**2) ** 2 + (1 - x) ** 2 for x, y in pairs)


def _ellipsoid(t):
    d = len(t)
    return 0.5 * sum(1e4 ** (i / (d - 1)) * x**2 for i, x in enumerate(t))


_FORMULAS = {
    functions.quadratic: _quadratic,
    functions.cubic: _cubic,
    functions.levy: _levy,
    functions.rosenbrock: _rosenbrock,
    functions.ellipsoid: _ellipsoid,
}
_FUNCTIONS = pytest.mark.parametrize("fun", _FORMULAS, ids=lambda fun: fun.__name__)


@_FUNCTIONS
@pytest.mark.parametrize("dimension", [2, 3, 17])
def test_value_is_the_formula_in_float64(fun, dimension):
    theta = np.random.default_rng(dimension).uniform(-3, 3, dimension)
    with jax.enable_x64(True):
        value = jax.jit(fun)(jnp.asarray(theta))
        assert value.dtype == jnp.float64
    # Ten operations or so a coordinate, and the sum: a few ulp each.
    np.testing.assert_allclose(value, _FORMULAS[fun](theta.tolist()), rtol=1e-13)


@_FUNCTIONS
def test_value_in_float32_is_close(fun):
    theta = np.random.default_rng(0).uniform(-3, 3, 1000).astype(np.float32)
    value = jax.jit(fun)(theta)
    assert value.dtype == jnp.float32
    # Arguments of sin have an absolute error of about 1e-6 here.
    np.testing.assert_allclose(value, _FORMULAS[fun](theta.tolist()), rtol=1e-5)


@pytest.mark.parametrize("name", functions.PROBLEMS)
def test_minimum_is_where_it_is_said_to_be(name):
    fun, minimizer = functions.PROBLEMS[name]
    best = jnp.full(6, minimizer)
    assert abs(float(jax.jit(fun)(best))) < 1e-12
    nearby = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
    values = jax.jit(jax.vmap(fun))(minimizer + 0.3 * nearby)
    assert values.min() > 0


def test_problems_are_those_of_the_paper():
    assert [p.fun for p in functions.PROBLEMS.values()] == list(_FORMULAS)[:4]


def test_start_fills_the_box_and_depends_on_the_key():
    start = functions.uniform_start(jax.random.key(0), 10_000)
    assert start.dtype == jnp.float32
    # Its standard deviation is 1/√3, with a standard error of 0.3 % here.
    np.testing.assert_allclose(start.std(), 1 / math.sqrt(3), rtol=0.02)
    assert abs(float(start.mean())) < 4 / math.sqrt(3 * 10_000)
    assert -1 <= start.min() < -0.99 and 0.99 < start.max() < 1
    other = functions.uniform_start(jax.random.key(1), 10_000)
    assert not jnp.array_equal(start, other)
