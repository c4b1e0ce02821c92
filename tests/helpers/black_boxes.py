"""A function that JAX does not see, its traced twin, and runs of them."""

import functools

import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from tests.helpers import short_runs
from tests.helpers.compare import Hashed

START = np.zeros(6, np.float32)
OPTIMIZER = zo.radazo(3e-2)
ESTIMATOR = zo.forward_difference(Hashed(), num_directions=3, smoothing=0.5)
STEPS = 12
CENTER = np.linspace(-1, 1, 6, dtype=np.float32)


def fun(x):
    """Sums of few multiples of 1/64 are exact, in NumPy's order and in XLA's."""
    return float(np.sum(np.abs(np.round((x - CENTER) * 64))) / 64)


def traced(x):
    return jnp.sum(jnp.abs(jnp.round((x - CENTER) * 64))) / 64


def run(fun=fun, start=START, steps=STEPS, estimator=ESTIMATOR, **options):
    return short_runs.run(fun, start, steps, (OPTIMIZER, estimator), **options)


@functools.cache
def reference():
    """The run, one point after the other."""
    return run()
