"""Mistakes in a function, which end a run at its first points."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import radazo_jax as zo
from tests.helpers.short_runs import run


class Stopped(KeyError):
    """An error of the user's that is a mistake of Python's kind."""


async def _async(x):
    return 1.0


def _raising(error):
    def fun(x):
        raise error

    return fun


MISTAKES = {
    "a name": (lambda x: undefined(x), NameError),  # noqa: F821
    "an argument": (lambda: 0.0, TypeError),
    "an index": (lambda x: x[99], IndexError),
    "a module": (_raising(ModuleNotFoundError("no solver")), ImportError),
    "a subclass": (_raising(Stopped("mesh")), KeyError),
    "no return": (lambda x: None, TypeError),
    "a text": (lambda x: np.str_("1.0"), TypeError),
    "a complex number": (lambda x: np.complex128(1), TypeError),
    "complex numbers": (lambda x: np.ones(1, complex), TypeError),
    "async": (_async, TypeError),
}
POOL = ThreadPoolExecutor(2)


@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [
        *((kind, {}, 1) for kind in MISTAKES),
        ("a name", {"retries": 2}, 3),
        ("a name", {"batched": True}, 1),
        ("a complex number", {"executor": POOL}, 5),
    ],
)
def test_a_mistake_ends_the_run_at_its_first_points(kind, options, most):
    """Five points a step; the first is enough if they are evaluated in turn."""
    fun, error = MISTAKES[kind]
    calls = []

    def counted(*args):
        calls.append(args)
        return fun(*args)

    with pytest.raises(zo.RunError, match=r"^fun must return a number") as caught:
        run(counted, **options)
    assert len(calls) <= most
    assert isinstance(caught.value.__cause__, error)
    assert "continues the run" not in str(caught.value)
    assert caught.value.result.num_evaluations == 0


def test_a_mistake_in_a_process_is_shown_with_its_trace():
    pytest.importorskip("loky")
    with pytest.raises(zo.RunError, match="undefined") as caught:
        run(MISTAKES["a name"][0], workers=1)
    assert isinstance(caught.value.__cause__, NameError)
    assert "in <lambda>" in caught.value.__cause__.__notes__[0]


@pytest.mark.parametrize(
    "start", [ValueError("mesh"), FloatingPointError(), RuntimeError(), OSError(), None]
)
def test_a_start_that_fails_as_simulators_do_goes_on(start):
    calls = []

    def fun(x):
        calls.append(x)
        if len(calls) > 10:
            return float(np.sum(x**2))
        if start is not None:
            raise start
        return np.nan

    assert run(fun, num_steps=4).best.value < np.inf


def test_a_mistake_after_a_number_fails_its_point():
    def fun(x):
        return float(x[0]) if x[0] <= 1 else {}["mesh"]

    result = run(fun)
    assert result.history.failed.sum() > 0


class Series:
    """An array of one element that cannot be indexed, as one of pandas."""

    shape = (1,)

    def item(self):
        return 2.5


def test_an_array_of_one_element_is_a_number_in_any_library():
    assert run(lambda x: Series()).best.value == 2.5
