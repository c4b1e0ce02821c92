"""Short runs of three parameters."""

import inspect

import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from tests.helpers.calls import square

START = np.ones(3, np.float32)
# The same objects in all runs, so that they compile once.
METHOD = zo.zo_sgd(1e-2), zo.forward_difference(zo.rademacher(), num_directions=4)


OF_CALLS = tuple(inspect.signature(zo.external).parameters)


def called(fun, start, *method, **options):
    """A run of `train` on a Python function; some options are the evaluator's."""
    given = {name: options.pop(name) for name in OF_CALLS if name in options}
    evaluator = zo.external(**given)
    return zo.train(fun, start, *method, evaluator=evaluator, **options)


def traced_square(x):
    return jnp.sum(x**2)


def run(fun=square, start=START, num_steps=3, method=METHOD, **options):
    options = {"num_steps": num_steps, "key": 0, "progress": False, **options}
    return called(fun, start, *method, **options)


def traced(fun=traced_square, start=START, num_steps=3, method=METHOD, **options):
    options = {"num_steps": num_steps, "key": 0, "progress": False, **options}
    return zo.train(fun, start, *method, **options)
