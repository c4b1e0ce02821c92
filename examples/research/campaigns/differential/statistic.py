"""The distance of the mean of estimates from the gradient, in standard errors.

An estimate of one direction is a random vector whose expectation is the gradient, times
the distribution's own covariance if it has one. Of `NUM` of them, drawn under keys
of their own, the means along a few fixed vectors v have the standard errors s / √NUM;
the statistic z = (mean - expectation · v) / error is normal, by the central limit
theorem. All keys are fixed. Some 1,400 statistics are compared in all; that any of them
exceeds `LARGEST` has the probability 1,400 · 5.7e-7 < 1e-3.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import radazo_jax as zo
from campaigns.distributions import covariance

NUM, LARGEST = 4000, 5.0
# The bias of a central difference is of the order μ² d / 2 · |∇Δf|: below a tenth of a
# percent of the gradient here, and the standard error is two percent.
SMOOTHING = 3e-3


def vectors(gradient):
    """Vectors of length 1: along the gradient, along its leaves, and two at random."""
    leaves, treedef = jax.tree.flatten(gradient)
    alone = [
        jax.tree.unflatten(treedef, [x * (i == j) for j, x in enumerate(leaves)])
        for i in range(len(leaves))
    ]
    rows = jnp.stack([ravel_pytree(tree)[0] for tree in (gradient, *alone)])
    random = jax.random.normal(jax.random.key(7), (2, rows.shape[1]))
    rows = jnp.concatenate([rows, random])
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True)


def along_vectors(loss, params, distribution):
    """Estimates along each of the vectors, [`NUM`, vectors], and their expectation."""
    estimator = zo.central_difference(
        distribution, num_directions=1, smoothing=SMOOTHING
    )
    estimate = zo.value_and_grad(loss, estimator)
    dimension = sum(x.size for x in jax.tree.leaves(params))
    expectation = distribution.factor(dimension) * covariance(distribution, dimension)

    @jax.jit
    def run(params, keys):
        gradient = jax.grad(loss)(params)
        along = vectors(gradient)

        def one(key):
            return along @ ravel_pytree(estimate(key, params)[1])[0]

        expected = jnp.asarray(expectation, along.dtype) @ ravel_pytree(gradient)[0]
        return jax.lax.map(one, keys, batch_size=200), along @ expected

    drawn, expected = run(params, jax.random.split(jax.random.key(5), NUM))
    return np.asarray(drawn, np.float64), np.asarray(expected)


def distances(drawn, expected):
    """|z| along each of the vectors that tell something."""
    # A leaf that the loss does not depend on, but for rounding, tells nothing.
    told = np.abs(expected) > 1e-4 * np.abs(expected[0])
    error = drawn.std(axis=0, ddof=1) / np.sqrt(NUM)
    return np.abs((drawn.mean(axis=0) - expected) / error)[told]
