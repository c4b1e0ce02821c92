"""Starting points on, and off, the bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo

METHOD = zo.zo_sgd(1e-2), zo.forward_difference(zo.rademacher(), num_directions=2)


def square(x):
    return float(np.sum(x**2))


def run(start, bounds, method=METHOD):
    return zo.minimize_black_box(
        *(square, start, *method), num_steps=2, key=0, bounds=bounds, progress=False
    )


def traced(start, bounds, method=METHOD):
    return zo.minimize(
        *(lambda x: jnp.sum(x**2), start, *method),
        num_steps=2,
        key=0,
        bounds=bounds,
        progress=False,
    )


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.xfail(
    strict=True, raises=zo.RunError, reason="no coordinate has a difference"
)
@pytest.mark.parametrize(("call", "size"), [(run, 1), slow(traced, 3)])
def test_equal_bounds_give_their_point_by_the_default_method(call, size):
    start = np.full(size, 4, np.float32)
    result = call(start, (4.0, 4.0), (None, None))
    np.testing.assert_array_equal(result.params, start)


@pytest.mark.parametrize("call", [run, slow(traced)])
def test_equal_bounds_give_their_point(call):
    start = np.full(3, 4, np.float32)
    result = call(start, (4.0, 4.0))
    np.testing.assert_array_equal(result.params, start)


def asked(start, bounds):
    """A start of `ask_tell`, whose candidates are evaluated elsewhere."""
    init, _, _ = zo.ask_tell(*METHOD, bounds=bounds)
    return init(start, jax.random.key(0)).run


def solved(start, bounds):
    return zo.solver(lambda x: jnp.sum(x**2), *METHOD, bounds=bounds).init(start, 0)


CALLS = [run, slow(traced), asked, solved]


@pytest.mark.xfail(
    strict=True, raises=ValueError, reason="a start off a bound is refused"
)
@pytest.mark.parametrize("call", CALLS)
def test_a_start_off_a_bound_by_rounding_is_clipped(call):
    off = np.array([np.nextafter(np.float32(0.5), np.float32(1)), 0.25], np.float32)
    found = np.asarray(call(off, (0.0, 0.5)).params)
    assert np.all(found <= 0.5) and abs(found[0] - 0.5) < 0.1


@pytest.mark.xfail(
    strict=True, raises=ValueError, reason="a start off a bound is refused"
)
def test_a_start_in_float64_off_a_bound_by_rounding_is_clipped():
    assert 0.1 + 0.2 > 0.3
    assert np.all(np.asarray(run(np.array([0.1 + 0.2, 0.2]), (0.0, 0.3)).params) <= 0.3)


@pytest.mark.parametrize("call", CALLS)
def test_a_start_on_a_bound_is_in_the_bounds(call):
    found = np.asarray(call(np.full(2, 0.5, np.float32), (0.0, 0.5)).params)
    assert np.all(found <= 0.5)


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="the message names the array alone"
)
@pytest.mark.parametrize(
    ("value", "bound"), [(1.75, 1.25), (-3.5, -2.25)], ids=["above", "below"]
)
def test_a_start_far_off_a_bound_is_named(value, bound):
    """The array, the element, its value and the bound."""
    start = {"b": np.zeros(2, np.float32), "w": np.zeros(5, np.float32)}
    start["w"][3] = value
    init, _, _ = zo.ask_tell(*METHOD, bounds=(-2.25, 1.25))
    with pytest.raises(ValueError, match="params must") as caught:
        init(start, jax.random.key(0))
    for word in ("w", "3", str(value), str(bound)):
        assert word in str(caught.value)
