"""Programs of earlier calls are freed."""

import functools
import json
import sys

import pytest

from tests.helpers.short_runs import fails
from tests.helpers.subprocesses import output_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# The mappings of one program; Linux allows a process 65,530.
PROGRAM = 144

CALLS = """
import json, sys
import jax.numpy as jnp, numpy as np
import radazo_jax as zo

def mappings():
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)

def minimize(fun, optimizer, estimator):
    zo.minimize(
        fun, np.ones(50, np.float32), optimizer, estimator, num_steps=2, key=0,
        progress=False,
    )

def same(i):
    minimize(*kept)

def equal(i):
    fun = lambda p: jnp.sum((p - 1) ** 2)
    minimize(fun, zo.radazo(1e-2), zo.forward_difference())

def different(i):
    fun = lambda p: jnp.sum((p - i) ** 2)
    minimize(fun, zo.radazo(1e-2), zo.forward_difference())

kept = lambda p: jnp.sum(p**2), zo.radazo(1e-2), zo.forward_difference()
grown = {}
for name in sys.argv[2:]:
    call = globals()[name]
    for i in range(int(sys.argv[1])):
        call(i)
    before = mappings()
    for i in range(100, 105):
        call(i)
    grown[name] = mappings() - before
print(json.dumps(grown))
"""


@functools.cache
def grown(warm_up, *names):
    """The mappings that five calls add."""
    return json.loads(output_of(CALLS, warm_up, *names, timeout=300).splitlines()[-1])


def test_five_calls_with_the_same_arguments_take_no_memory():
    assert grown(1, "same", "equal")["same"] < PROGRAM


GROWS = fails(AssertionError, "no program is ever freed")


@GROWS
def test_five_calls_with_equal_new_arguments_take_no_memory():
    assert grown(1, "same", "equal")["equal"] < PROGRAM


@pytest.mark.slow
@GROWS
def test_five_calls_with_different_functions_take_no_memory_after_twenty():
    assert grown(20, "different")["different"] < PROGRAM
