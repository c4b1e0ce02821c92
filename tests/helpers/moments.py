"""The transformations, gradients for them, and the paper's algorithms in float64."""

import chex
import jax
import numpy as np

from radazo_jax._src.optimizers import moments
from tests.helpers.tables import jit

TRANSFORMS = {
    "radazo": (moments.scale_by_radazo, moments.ScaleByRadazoState),
    "zo_adamm": (moments.scale_by_zo_adamm, moments.ScaleByZoAdammState),
}
NAMES = tuple(TRANSFORMS)
PARAMS = {"w": np.zeros((3, 2), np.float32), "b": (np.zeros(4, np.float32),)}


def gradients(num_steps, params=None, seed=0):
    """A trajectory of noisy gradients, with coordinates of very different sizes."""
    rng = np.random.default_rng(seed)
    params = PARAMS if params is None else params

    def draw(p):
        size = 10.0 ** rng.uniform(-3, 2, p.shape)
        noise = rng.normal(size=(num_steps, *p.shape))
        if np.iscomplexobj(p):
            noise = noise + 1j * rng.normal(size=noise.shape)
        return (size * (noise + 0.3)).astype(p.dtype)

    drawn = jax.tree.map(draw, params)
    return [jax.tree.map(lambda d, t=t: d[t], drawn) for t in range(num_steps)]


def reference(name, gs, b1=0.9, b2=0.99, eps_root=1e-8, v0=0.0, bias_correction=False):
    """Algorithms 1 and 2 of Shu et al. (2025) for one array, in double precision."""
    m, v = np.zeros_like(gs[0], dtype=np.result_type(gs[0], np.float64)), v0
    updates = []
    for t, g in enumerate(gs, start=1):
        m = b1 * m + (1 - b1) * g.astype(m.dtype)
        m_hat = m / (1 - b1**t) if bias_correction else m
        # The line in which the algorithms differ.
        measured = m_hat if name == "radazo" else g.astype(m.dtype)
        v = b2 * v + (1 - b2) * np.abs(measured) ** 2
        v_hat = v / (1 - b2**t) if bias_correction else v
        updates.append(m_hat / np.sqrt(v_hat + eps_root))
    return updates


def run(tx, params, gs):
    """Returns the updates of all steps and the last state."""
    state, updates = tx.init(params), []
    one = jit(tx.update)
    for g in gs:
        update, state = one(g, state, params)
        updates.append(update)
    return updates, state


def assert_bitwise_equal(actual, expected):
    chex.assert_trees_all_equal(actual, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)


def assert_close(actual, expected, rtol):
    """Errors are relative to the largest value in a coordinate's history, since a
    first moment that passes through zero has lost its leading digits."""
    expected = np.asarray(expected)
    size = np.max(np.abs(expected), axis=0, keepdims=True)
    error = np.abs(np.asarray(actual) - expected) / size
    assert np.max(error) < rtol


def types_of(tree):
    return jax.tree.map(jax.typeof, tree)
