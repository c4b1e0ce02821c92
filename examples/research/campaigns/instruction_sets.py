"""Parameters after steps on given values, to compare instruction sets.

python -m campaigns.instruction_sets FILE
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from radazo_jax._src.workers.messages import Request
from radazo_jax._src.workers.replica import Recipe, Replica

DISTRIBUTIONS = {
    "rademacher": zo.rademacher(),
    "orthonormal": zo.orthonormal(),
    "gaussian": zo.gaussian(),
}
OPTIMIZERS = {"zo_sgd": zo.zo_sgd(1e-3), "radazo": zo.radazo(1e-3)}
STEPS, DIRECTIONS, DIMENSION = 30, 8, 1000


def square(params):
    return jnp.sum(params**2)


def stepped(distribution, optimizer):
    """The parameters of a worker after steps, and the checksums on the way."""
    recipe = Recipe(
        lambda: square,
        np.linspace(-1, 1, DIMENSION, dtype=np.float32),
        optimizer,
        zo.forward_difference(distribution, DIRECTIONS),
        *(None, None, 1),
        np.asarray(jax.random.key_data(jax.random.key(0))),
    )
    replica = Replica(recipe)
    shape = (STEPS, DIRECTIONS + 1)
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    none = np.zeros(0, np.uint16)
    reply = replica.answer(Request(0, 0, values[:0], np.zeros(0, np.uint32), none))
    for step in range(STEPS):
        sums = np.array([reply.checksum], np.uint32)
        reply = replica.answer(Request(0, step, values[step : step + 1], sums, none))
    return replica.params()


def computed():
    cases = [("rademacher", "radazo"), *((name, "zo_sgd") for name in DISTRIBUTIONS)]
    return {
        f"{name} {optimizer}": stepped(DISTRIBUTIONS[name], OPTIMIZERS[optimizer])
        for name, optimizer in cases
    }


if __name__ == "__main__":
    np.savez(sys.argv[1], **computed())
