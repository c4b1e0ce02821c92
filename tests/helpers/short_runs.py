"""Short runs of three parameters."""

import jax.numpy as jnp
import numpy as np

import radazo_jax as zo

START = np.ones(3, np.float32)
# The same objects in all runs, so that they compile once.
METHOD = zo.zo_sgd(1e-2), zo.forward_difference(zo.rademacher(), num_directions=4)


def square(x):
    return float(np.sum(x**2))


def traced_square(x):
    return jnp.sum(x**2)


def run(fun=square, start=START, num_steps=3, method=METHOD, **options):
    options = {"num_steps": num_steps, "key": 0, "progress": False, **options}
    return zo.minimize_black_box(fun, start, *method, **options)


def traced(fun=traced_square, start=START, num_steps=3, method=METHOD, **options):
    options = {"num_steps": num_steps, "key": 0, "progress": False, **options}
    return zo.minimize(fun, start, *method, **options)
