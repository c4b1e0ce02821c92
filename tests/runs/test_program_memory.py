"""Programs of earlier calls are freed."""

import functools
import json
import sys

import pytest

from tests.helpers.subprocesses import output_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

# The mappings of one program; Linux allows a process 65,530.
PROGRAM = 144

# Compiled as by users: less optimized programs are of fewer mappings.
CALLS = """
import json, os, sys
os.environ.pop("XLA_FLAGS", None)
import jax.numpy as jnp
import radazo_jax as zo
from radazo_jax._src import programs
from tests.helpers.short_runs import traced

# Fewer programs than a user's process keeps, so that few calls drop some.
programs._MOST = 3

def renewed(fun):
    traced(fun, method=(zo.radazo(1e-2), zo.forward_difference()))

def mappings():
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)

calls = {
    "same": lambda i: traced(),
    "equal": lambda i: renewed(lambda p: jnp.sum((p - 1) ** 2)),
    "different": lambda i: renewed(lambda p: jnp.sum((p - i) ** 2)),
}
grown, warm_up = {}, int(sys.argv[1])
for name in sys.argv[2:]:
    for i in range(warm_up + 5):
        if i == warm_up:
            before = mappings()
        calls[name](i)
    grown[name] = mappings() - before
print(json.dumps(grown))
"""


@functools.cache
def grown(warm_up, *names):
    """The mappings that five calls add."""
    return json.loads(output_of(CALLS, warm_up, *names, timeout=300).splitlines()[-1])


def test_five_calls_with_the_same_arguments_take_no_memory():
    assert grown(1, "same", "equal")["same"] < PROGRAM


def test_five_calls_with_equal_new_arguments_take_no_memory():
    assert grown(1, "same", "equal")["equal"] < PROGRAM


def test_five_calls_with_different_functions_take_no_memory_once_some_are_dropped():
    assert grown(5, "different")["different"] < PROGRAM
