"""Starting points on, and off, the bounds."""

import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import METHOD, run, traced, traced_square
from tests.helpers.tables import slow


def asked(start, bounds):
    """A start of `ask_tell`, whose candidates are evaluated elsewhere."""
    return zo.ask_tell(start, *METHOD, bounds=bounds)


def solved(start, bounds):
    return zo.solver(traced_square, *METHOD, bounds=bounds).init(start, 0)


@pytest.mark.slow
@pytest.mark.parametrize("call", [run, traced])
def test_equal_bounds_give_their_point(call):
    start = np.full(3, 4, np.float32)
    result = call(start=start, bounds=(4.0, 4.0))
    np.testing.assert_array_equal(result.params, start)


UP = np.nextafter(np.float32(0.5), np.float32(1))


@pytest.mark.parametrize("call", [run, slow(traced), asked, solved])
@pytest.mark.parametrize("value", [0.5, UP])
def test_a_start_off_a_bound_by_rounding_is_clipped(call, value):
    start = np.array([value, 0.25, 0.25], np.float32)
    found = np.asarray(call(start=start, bounds=(0.0, 0.5)).params)
    assert np.all(found <= 0.5) and abs(found[0] - 0.5) < 0.1


def test_a_start_in_float64_off_a_bound_by_rounding_is_clipped():
    start = np.array([0.1 + 0.2, 0.2, 0.2])  # The sum is above 0.3.
    assert np.all(np.asarray(run(start=start, bounds=(0.0, 0.3)).params) <= 0.3)


@pytest.mark.parametrize(("value", "bound"), [(1.75, 1.25), (-3.5, -2.25)])
def test_a_start_far_off_a_bound_is_named(value, bound):
    """The array, the element, its value and the bound."""
    start = {"b": np.zeros(2, np.float32), "w": np.zeros(5, np.float32)}
    start["w"][3] = value
    with pytest.raises(ValueError, match="params must") as caught:
        asked(start, (-2.25, 1.25))
    assert all(word in str(caught.value) for word in ("w", "3", str(value), str(bound)))
