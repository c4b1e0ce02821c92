"""A function that JAX does not see, its traced twin, and runs of them."""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from tests.helpers import short_runs, workers
from tests.helpers.compare import Hashed
from tests.helpers.workers import CENTER

START = np.zeros(6, np.float32)
OPTIMIZER = zo.radazo(3e-2)
ESTIMATOR = zo.forward_difference(Hashed(), num_directions=3, smoothing=0.5)
STEPS = 12
fun = workers.distance


def traced(x):
    return jnp.sum(jnp.abs(jnp.round((x - CENTER) * 64))) / 64


def run(fun=fun, start=START, steps=STEPS, estimator=ESTIMATOR, **options):
    return short_runs.run(fun, start, steps, (OPTIMIZER, estimator), **options)


@functools.cache
def reference():
    """The run, one point after the other."""
    return run()


def spawning():
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(2, mp_context=context)
